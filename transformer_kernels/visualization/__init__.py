"""Plots: attention maps, position codes, words in context, training curves and scaling sweeps.

Used by `transformer-kernels attend`, `nearest`, `plot` and `sweep`. matplotlib is imported when a figure is drawn.
"""
