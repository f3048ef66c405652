"""Launch configurations of the bias + GELU kernels by (capability, itemsize) and width.

Written by `benchmarks/tune_triton.py`. Not yet tuned on a device: 16 elements a thread, so that two to four 16-byte
loads of each input are in flight. A row is cut into blocks of `columns`; the backward kernel is persistent over rows.
"""

from transformer_kernels.backends.triton import RowTile, Table

_FORWARD_16_BIT = (
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (None, RowTile(rows=4, columns=512, num_warps=4)),
)

_FORWARD_32_BIT = (
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (None, RowTile(rows=4, columns=512, num_warps=4)),
)

_BACKWARD_16_BIT = (
    (64, RowTile(rows=16, columns=64, num_warps=4, num_stages=3, programs=2)),
    (128, RowTile(rows=16, columns=128, num_warps=4, num_stages=3, programs=2)),
    (256, RowTile(rows=8, columns=256, num_warps=4, num_stages=3, programs=2)),
    (None, RowTile(rows=4, columns=512, num_warps=4, num_stages=3, programs=4)),
)

_BACKWARD_32_BIT = (
    (64, RowTile(rows=16, columns=64, num_warps=4, num_stages=3, programs=2)),
    (128, RowTile(rows=16, columns=128, num_warps=4, num_stages=3, programs=2)),
    (256, RowTile(rows=8, columns=256, num_warps=4, num_stages=3, programs=2)),
    (None, RowTile(rows=4, columns=512, num_warps=4, num_stages=3, programs=4)),
)

FORWARD = Table(
    "bias_gelu forward",
    {
        ((8, 0), 2): _FORWARD_16_BIT,
        ((8, 0), 4): _FORWARD_32_BIT,
        ((9, 0), 2): _FORWARD_16_BIT,
        ((9, 0), 4): _FORWARD_32_BIT,
    },
)

BACKWARD = Table(
    "bias_gelu backward",
    {
        ((8, 0), 2): _BACKWARD_16_BIT,
        ((8, 0), 4): _BACKWARD_32_BIT,
        ((9, 0), 2): _BACKWARD_16_BIT,
        ((9, 0), 4): _BACKWARD_32_BIT,
    },
)
