"""Launch configurations of the cross-entropy kernels by (capability, itemsize) and width.

Written by `benchmarks/tune_triton.py`. Not yet tuned on a device: 8 to 32 elements a thread. In FORWARD a tile holds
whole rows as far as registers go, and the last one walks over a row; in BACKWARD a row is cut into blocks of `columns`.
"""

from transformer_kernels.backends.triton import RowTile, Table

_FORWARD_16_BIT = (
    (16, RowTile(rows=128, columns=16, num_warps=4)),
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=4, columns=512, num_warps=4)),
    (1024, RowTile(rows=2, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=8)),
    (16384, RowTile(rows=1, columns=16384, num_warps=16)),
    (None, RowTile(rows=1, columns=4096, num_warps=8)),
)

_FORWARD_32_BIT = (
    (16, RowTile(rows=128, columns=16, num_warps=4)),
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=2, columns=512, num_warps=4)),
    (1024, RowTile(rows=2, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=16)),
    (16384, RowTile(rows=1, columns=16384, num_warps=16)),
    (None, RowTile(rows=1, columns=4096, num_warps=16)),
)

_BACKWARD_16_BIT = (
    (16, RowTile(rows=128, columns=16, num_warps=4)),
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (None, RowTile(rows=4, columns=512, num_warps=4)),
)

_BACKWARD_32_BIT = (
    (16, RowTile(rows=128, columns=16, num_warps=4)),
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (None, RowTile(rows=4, columns=512, num_warps=4)),
)

FORWARD = Table(
    "cross_entropy forward",
    {
        ((8, 0), 2): _FORWARD_16_BIT,
        ((8, 0), 4): _FORWARD_32_BIT,
        ((9, 0), 2): _FORWARD_16_BIT,
        ((9, 0), 4): _FORWARD_32_BIT,
    },
)

BACKWARD = Table(
    "cross_entropy backward",
    {
        ((8, 0), 2): _BACKWARD_16_BIT,
        ((8, 0), 4): _BACKWARD_32_BIT,
        ((9, 0), 2): _BACKWARD_16_BIT,
        ((9, 0), 4): _BACKWARD_32_BIT,
    },
)
