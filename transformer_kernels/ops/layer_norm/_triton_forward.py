"""Forward kernels of layer_norm and rms_norm, alone and after an addition: one read of each input, fp32 statistics.

Where `mean` is None the rows are not centred: that is RMSNorm, and its rstd is 1 / sqrt(mean square + eps).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels._dropout import keep_scale, keep_threshold
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, keep_by_column, round_to, to_fp32
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, whole_rows

FORWARD = Tiles("layer_norm forward", whole_rows, widest=16384)


@triton.jit
def dropped_out(values, seed, row, group, threshold, keep_scale):
    """`values` [R, C] with dropout: kept where philox of (column, row) says so, times `keep_scale`."""
    keep = keep_by_column(tl.load(seed), group, row, row >> 32, threshold)  # [R, C]
    return tl.where(keep, values * keep_scale, 0.0)


@triton.jit
def added(
    x, residual, seed, summed, offsets, inside, row, group, threshold, keep_scale, DROPOUT: tl.constexpr
):  # fmt: skip
    """dropout(x) + residual, stored to `summed` and rounded to its type: the backward pass sees the same numbers."""
    values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))
    if DROPOUT:
        values = dropped_out(values, seed, row, group, threshold, keep_scale)
    values += to_fp32(tl.load(residual + offsets, mask=inside, other=0.0))
    tl.store(summed + offsets, from_fp32(values, summed.dtype.element_ty), mask=inside)
    return round_to(values, summed.dtype.element_ty)


@triton.jit
def centred_rows(values, pivot, inside, N, eps):
    """Whole rows [R, C] about their mean, the mean less `pivot` [R, 1], and 1 / sqrt(var + eps).

    The pivot is an element of the row: sums of small numbers keep their digits where the mean is 1e6.
    """
    shifted = tl.where(inside, values - pivot, 0.0)
    row_shift = tl.sum(shifted, axis=1, keep_dims=True) / N  # [R, 1]
    centred = tl.where(inside, shifted - row_shift, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / N
    return centred, row_shift, tl.rsqrt(variance + eps)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_forward_kernel(
    x, residual, seed, weight, bias, y, summed, mean, rstd, M, N, eps, threshold, keep_scale,
    ADD: tl.constexpr, DROPOUT: tl.constexpr, HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS whole rows and keeps them in registers; the variance is that of the centred values."""
    N = N // VECTOR * VECTOR  # tells the compiler the alignment of a row without a recompilation for each width
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    offsets = row * N + columns
    if ADD:
        groups = tl.arange(0, BLOCK_N // 8)[None, :]
        values = added(x, residual, seed, summed, offsets, inside, row, groups, threshold, keep_scale, DROPOUT)
    else:
        values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]

    if mean is None:
        centred = values
        row_rstd = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / N + eps)
    else:
        source = residual if ADD else x
        pivot = to_fp32(tl.load(source + row * N, mask=row < M, other=0.0))  # [ROWS, 1]
        centred, row_shift, row_rstd = centred_rows(values, pivot, inside, N, eps)
        tl.store(mean + row, pivot + row_shift, mask=row < M)
    tl.store(rstd + row, row_rstd, mask=row < M)

    scale = to_fp32(tl.load(weight + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    result = centred * row_rstd * scale
    if HAS_BIAS:
        result += to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))
    tl.store(y + offsets, from_fp32(result, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_forward_two_pass_kernel(
    x, residual, seed, weight, bias, y, summed, mean, rstd, M, N, eps, threshold, keep_scale,
    ADD: tl.constexpr, DROPOUT: tl.constexpr, HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns one row: Welford's update in each lane and one merge (Chan et al. 1983), then a second walk."""
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.arange(0, BLOCK_N // 8)[None, :]
    lane_mean = tl.zeros([1, BLOCK_N], tl.float32)
    lane_square = tl.zeros([1, BLOCK_N], tl.float32)  # sum of squared deviations from lane_mean
    steps = 0.0
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        offsets = row * N + columns
        if ADD:
            values = added(
                x, residual, seed, summed, offsets, inside, row, start // 8 + groups, threshold, keep_scale, DROPOUT
            )
        else:
            values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0, eviction_policy="evict_last"))
        if mean is None:
            lane_square += values * values
        else:
            steps += 1.0
            deviation = tl.where(inside, values - lane_mean, 0.0)
            lane_mean += deviation / steps
            lane_square += deviation * (values - lane_mean)

    only = row + tl.zeros([1, 1], tl.int64)
    pivot = tl.sum(lane_mean, axis=1, keep_dims=True) / BLOCK_N  # near the mean; what it misses comes next
    if mean is None:
        row_shift = pivot  # both 0
        variance = tl.sum(lane_square, axis=1, keep_dims=True) / N
    else:
        lane_count = ((N - 1 - lanes) // BLOCK_N + 1).to(tl.float32)
        row_shift = tl.sum((lane_mean - pivot) * lane_count, axis=1, keep_dims=True) / N
        deviation = lane_mean - pivot - row_shift
        variance = tl.sum(lane_square + deviation * deviation * lane_count, axis=1, keep_dims=True) / N
        tl.store(mean + only, pivot + row_shift)
    row_rstd = tl.rsqrt(variance + eps)  # [1, 1]
    tl.store(rstd + only, row_rstd)

    tl.debug_barrier()  # the second walk reads what other threads may have stored to summed
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        offsets = row * N + columns
        source = summed if ADD else x
        values = to_fp32(tl.load(source + offsets, mask=inside, other=0.0, eviction_policy="evict_first"))
        result = (values - pivot - row_shift) * row_rstd
        result *= to_fp32(tl.load(weight + columns, mask=inside, other=0.0))
        if HAS_BIAS:
            result += to_fp32(tl.load(bias + columns, mask=inside, other=0.0))
        tl.store(y + offsets, from_fp32(result, y.dtype.element_ty), mask=inside)


def forward_rows(
    x: Tensor,
    residual: Tensor | None,
    seed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    centre: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, summed, mean, rstd) of x or, with a residual, of dropout(x) + residual; mean is None without centring."""
    N = x.shape[-1]
    M = x.numel() // N
    tile = FORWARD.find(_triton.capability(x.device), x.element_size(), N)
    y = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    mean = torch.empty(M, dtype=torch.float32, device=x.device) if centre else None
    # rstd has memory of its own: the alignment of half a buffer would follow M, and so would compilations
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    given = (residual is not None, seed is not None, bias is not None)
    launch = _launch(tile, M, N, x.element_size(), eps, dropout_p, given)
    launch(x, residual, seed, weight, bias, y, summed, mean, rstd)
    return y, summed, mean, rstd


@_triton.planned
def _launch(
    tile: RowTile, M: int, N: int, itemsize: int, eps: float, dropout_p: float, given: tuple[bool, bool, bool]
) -> _triton.Launch:
    numbers = (M, N, eps, *dropout_numbers(dropout_p))
    kind = (*given, _triton.vector_width(itemsize, N))
    if tile.columns < N:
        return _triton.Launch(layer_norm_forward_two_pass_kernel, (M,), numbers, (*kind, tile.columns), tile.num_warps)
    grid = (_triton.ceil_div(M, tile.rows),)
    return _triton.Launch(layer_norm_forward_kernel, grid, numbers, (*kind, tile.rows, tile.columns), tile.num_warps)


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """The least 16 bits that keep an element, and what a kept one is multiplied by."""
    return keep_threshold(dropout_p), keep_scale(dropout_p)
