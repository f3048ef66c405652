"""Looking inside: attention maps, position codes, words in context, training curves, and how the loss scales.

`transformer-kernels attend`, `plot` and `sweep` call what is here. matplotlib is imported when a picture is drawn.
"""
