"""Launch configurations of the GELU kernels by (capability, itemsize): elements of a program, and its warps.

Written by `benchmarks/tune_triton.py`. Not yet tuned on a device: two 16-byte loads of each input in flight per thread.
"""

from transformer_kernels.backends.triton import RowTile, Table

_FORWARD_16_BIT = ((None, RowTile(rows=1, columns=2048, num_warps=4)),)

_FORWARD_32_BIT = ((None, RowTile(rows=1, columns=1024, num_warps=4)),)

_BACKWARD_16_BIT = ((None, RowTile(rows=1, columns=2048, num_warps=4)),)

_BACKWARD_32_BIT = ((None, RowTile(rows=1, columns=1024, num_warps=4)),)

FORWARD = Table(
    "gelu forward",
    {
        ((8, 0), 2): _FORWARD_16_BIT,
        ((8, 0), 4): _FORWARD_32_BIT,
        ((9, 0), 2): _FORWARD_16_BIT,
        ((9, 0), 4): _FORWARD_32_BIT,
    },
)

BACKWARD = Table(
    "gelu backward",
    {
        ((8, 0), 2): _BACKWARD_16_BIT,
        ((8, 0), 4): _BACKWARD_32_BIT,
        ((9, 0), 2): _BACKWARD_16_BIT,
        ((9, 0), 4): _BACKWARD_32_BIT,
    },
)
