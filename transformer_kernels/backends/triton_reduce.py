"""The second pass of a column sum without atomics: reduces the programs' partial sums in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32
from transformer_kernels.backends.triton_tiles import RowTile

NARROW_TILE = RowTile(rows=128, columns=32, num_warps=8)
"""Up to WIDE columns there are hundreds of partial rows: few columns per program give enough programs."""

WIDE_TILE = RowTile(rows=16, columns=256, num_warps=4)
WIDE = 8192


@triton.jit(do_not_specialize=["P", "N"])
def sum_partials_kernel(partials, first, second, P, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns BLOCK_N columns of one of the two sums: partials (2, P, N) fp32 -> first (N,), second (N,)."""
    which = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    partials += which.to(tl.int64) * P * N
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, P, ROWS):
        row = start + rows
        inside = (row < P) & (columns < N)
        total += tl.load(partials + row.to(tl.int64) * N + columns, mask=inside, other=0.0)  # [ROWS, BLOCK_N]
    result = tl.sum(total, axis=0, keep_dims=True)  # [1, BLOCK_N]
    if which == 0:
        tl.store(first + columns, from_fp32(result, first.dtype.element_ty), mask=columns < N)
    else:
        tl.store(second + columns, from_fp32(result, second.dtype.element_ty), mask=columns < N)


class Partials:
    """Partial sums of P programs, fp32 (1 or 2, P, N), and the launch that adds them up: one or two sums (N,)."""

    def __init__(self, count: int, P: int, N: int) -> None:
        tile = NARROW_TILE if N <= WIDE else WIDE_TILE
        self.shape = count, P, N
        self._sum = tile.launch(sum_partials_kernel, (_triton.ceil_div(N, tile.columns), count), (P, N), ())

    def empty(self, device: torch.device) -> Tensor:
        """Uninitialised memory for the partial sums."""
        return torch.empty(self.shape, dtype=torch.float32, device=device)

    def sum(self, partials: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The sums in `dtype`."""
        count, _, N = self.shape
        sums = [torch.empty(N, dtype=dtype, device=partials.device) for _ in range(count)]
        self._sum(partials, sums[0], sums[-1])
        return sums
