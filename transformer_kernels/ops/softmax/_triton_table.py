"""Launch configurations of the softmax kernels by (capability, itemsize) and width.

Written by `benchmarks/tune_triton.py`. Not yet tuned on a device: 16 to 32 elements a thread, so that two to four
16-byte loads are in flight, and one warp per row where it can hold one.
"""

from transformer_kernels.backends.triton import RowTile, Table

_FORWARD_16_BIT = (
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=4, columns=512, num_warps=4)),
    (1024, RowTile(rows=4, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=8)),
    (16384, RowTile(rows=1, columns=16384, num_warps=16)),
    (32768, RowTile(rows=1, columns=32768, num_warps=32)),
    (None, RowTile(rows=1, columns=8192, num_warps=16)),
)

_FORWARD_32_BIT = (
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=4, columns=512, num_warps=4)),
    (1024, RowTile(rows=2, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=16)),
    (16384, RowTile(rows=1, columns=16384, num_warps=16)),
    (32768, RowTile(rows=1, columns=32768, num_warps=32)),
    (None, RowTile(rows=1, columns=4096, num_warps=16)),
)

_BACKWARD_16_BIT = (
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=4, columns=512, num_warps=4)),
    (1024, RowTile(rows=2, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=16)),
    (16384, RowTile(rows=1, columns=16384, num_warps=32)),
    (None, RowTile(rows=1, columns=8192, num_warps=16)),
)

_BACKWARD_32_BIT = (
    (32, RowTile(rows=64, columns=32, num_warps=4)),
    (64, RowTile(rows=32, columns=64, num_warps=4)),
    (128, RowTile(rows=16, columns=128, num_warps=4)),
    (256, RowTile(rows=8, columns=256, num_warps=4)),
    (512, RowTile(rows=4, columns=512, num_warps=4)),
    (1024, RowTile(rows=2, columns=1024, num_warps=4)),
    (2048, RowTile(rows=1, columns=2048, num_warps=4)),
    (4096, RowTile(rows=1, columns=4096, num_warps=8)),
    (8192, RowTile(rows=1, columns=8192, num_warps=16)),
    (16384, RowTile(rows=1, columns=16384, num_warps=32)),
    (None, RowTile(rows=1, columns=4096, num_warps=16)),
)

FORWARD = Table(
    "softmax forward",
    {
        ((8, 0), 2): _FORWARD_16_BIT,
        ((8, 0), 4): _FORWARD_32_BIT,
        ((9, 0), 2): _FORWARD_16_BIT,
        ((9, 0), 4): _FORWARD_32_BIT,
    },
)

BACKWARD = Table(
    "softmax backward",
    {
        ((8, 0), 2): _BACKWARD_16_BIT,
        ((8, 0), 4): _BACKWARD_32_BIT,
        ((9, 0), 2): _BACKWARD_16_BIT,
        ((9, 0), 4): _BACKWARD_32_BIT,
    },
)
