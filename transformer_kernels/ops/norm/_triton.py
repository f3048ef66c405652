"""Norms in Triton, optionally after an addition: one read of each input, fp32 statistics, no atomics.

`mean` is None for RMSNorm: rows are not centred, rstd = 1 / sqrt(mean square + eps), and backward does not subtract
mean(g).
"""

import torch
import triton
import triton.language as tl

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, keep_by_column, round_to, to_fp32
from transformer_kernels.backends.triton_reduce import Partials
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, persistent_rows, whole_rows
from transformer_kernels.ops import _kernels
from transformer_kernels.ops._dropout import keep_scale, keep_threshold
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.norm import Gradients, NormCall, NormResult, rows_of

FORWARD = Tiles("layer_norm forward", whole_rows, widest=16384)
BACKWARD = Tiles("layer_norm backward", persistent_rows, widest=8192)
COLUMN_TILE = RowTile(rows=4, columns=1024, num_warps=4, programs=2)
"""For rows too wide for registers: one program sums a block of columns over part of the rows."""


@triton.jit
def dropped_out(values, seed, row, group, threshold, keep_scale):
    """dropout(values) for `values` [R, C], with philox by (column, row)."""
    keep = keep_by_column(tl.load(seed), group, row, row >> 32, threshold)  # [R, C]
    return tl.where(keep, values * keep_scale, 0.0)


@triton.jit
def added(x, residual, seed, summed, offsets, inside, row, group, threshold, keep_scale):
    """dropout(x) + residual, stored to `summed` and rounded to its dtype, since backward reads `summed`."""
    values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))
    if seed is not None:
        values = dropped_out(values, seed, row, group, threshold, keep_scale)
    values += to_fp32(tl.load(residual + offsets, mask=inside, other=0.0))
    tl.store(summed + offsets, from_fp32(values, summed.dtype.element_ty), mask=inside)
    return round_to(values, summed.dtype.element_ty)


@triton.jit
def centred_rows(values, pivot, inside, N, eps):
    """Centred rows [R, C], their mean minus `pivot` [R, 1], and 1 / sqrt(var + eps).

    The pivot is an element of the row; subtracting it first keeps the sums accurate for a mean of 1e6.
    """
    shifted = tl.where(inside, values - pivot, 0.0)
    row_shift = tl.sum(shifted, axis=1, keep_dims=True) / N  # [R, 1]
    centred = tl.where(inside, shifted - row_shift, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / N
    return centred, row_shift, tl.rsqrt(variance + eps)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_forward_kernel(
    x, residual, seed, weight, bias, y, summed, mean, rstd, M, N, eps, threshold, keep_scale,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS whole rows in registers; the variance is computed from centred values."""
    N = N // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    offsets = row * N + columns
    if residual is not None:
        groups = tl.arange(0, BLOCK_N // 8)[None, :]
        values = added(x, residual, seed, summed, offsets, inside, row, groups, threshold, keep_scale)
    else:
        values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]

    if mean is None:
        centred = values
        row_rstd = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / N + eps)
    else:
        source = x if residual is None else residual
        pivot = to_fp32(tl.load(source + row * N, mask=row < M, other=0.0))  # [ROWS, 1]
        centred, row_shift, row_rstd = centred_rows(values, pivot, inside, N, eps)
        tl.store(mean + row, pivot + row_shift, mask=row < M)
    tl.store(rstd + row, row_rstd, mask=row < M)

    scale = to_fp32(tl.load(weight + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    result = centred * row_rstd * scale
    if bias is not None:
        result += to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))
    tl.store(y + offsets, from_fp32(result, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_forward_two_pass_kernel(
    x, residual, seed, weight, bias, y, summed, mean, rstd, M, N, eps, threshold, keep_scale,
    VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns one row: Welford's update per lane and one merge (Chan et al. 1983), then a second pass."""
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
        if residual is not None:
            group = start // 8 + groups
            values = added(x, residual, seed, summed, offsets, inside, row, group, threshold, keep_scale)
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
    pivot = tl.sum(lane_mean, axis=1, keep_dims=True) / BLOCK_N  # near the mean; the correction follows
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

    tl.debug_barrier()  # the second pass reads elements of `summed` stored by other threads
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        offsets = row * N + columns
        source = x if summed is None else summed
        values = to_fp32(tl.load(source + offsets, mask=inside, other=0.0, eviction_policy="evict_first"))
        result = (values - pivot - row_shift) * row_rstd
        result *= to_fp32(tl.load(weight + columns, mask=inside, other=0.0))
        if bias is not None:
            result += to_fp32(tl.load(bias + columns, mask=inside, other=0.0))
        tl.store(y + offsets, from_fp32(result, y.dtype.element_ty), mask=inside)


@triton.jit
def store_gradients(
    gradient, dsummed, seed, dx, dresidual, offsets, inside, row, group, threshold, keep_scale
):  # fmt: skip
    """dresidual = gradient + dsummed; with dropout also dx = keep * dresidual / (1 - p), from the unrounded sum."""
    if dsummed is not None:
        gradient += to_fp32(tl.load(dsummed + offsets, mask=inside, other=0.0))
    tl.store(dresidual + offsets, from_fp32(gradient, dresidual.dtype.element_ty), mask=inside)
    if seed is not None:
        dropped = dropped_out(gradient, seed, row, group, threshold, keep_scale)
        tl.store(dx + offsets, from_fp32(dropped, dx.dtype.element_ty), mask=inside)


@triton.jit
def centred(values, mean, row, within):
    """values [R, C] minus the stored means of their rows; unchanged for RMSNorm."""
    if mean is not None:
        values -= tl.load(mean + row, mask=within, other=0.0)
    return values


@triton.jit
def normalised_gradient(gradient, normed, scale, row_rstd, N, CENTRED: tl.constexpr = True):
    """dx of whole rows [R, C]: rstd (g - mean(g) - normed mean(g normed)), g = gradient * scale, scale the weight."""
    scaled = gradient * scale
    mean_product = tl.sum(scaled * normed, axis=1, keep_dims=True) / N  # [R, 1]
    if CENTRED:
        scaled -= tl.sum(scaled, axis=1, keep_dims=True) / N
    return row_rstd * (scaled - normed * mean_product)


@triton.jit
def store_sums(partials, part, parts, columns, N, dweight, dbias, HAS_BIAS: tl.constexpr):
    """Store the column sums of dweight and dbias [R, C] as one of `parts` partial sums; partials (2, parts, N)."""
    pointers = partials + part.to(tl.int64) * N + columns  # [1, C]
    tl.store(pointers, tl.sum(dweight, axis=0, keep_dims=True), mask=columns < N)
    if HAS_BIAS:
        pointers += parts.to(tl.int64) * N
        tl.store(pointers, tl.sum(dbias, axis=0, keep_dims=True), mask=columns < N)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_backward_kernel(
    dy, dsummed, x, seed, weight, mean, rstd, dx, dresidual, partials, M, N, threshold, keep_scale,
    HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns every num_programs-th tile of ROWS rows: gradients, and partial sums of dweight and dbias.

    With xhat = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)).
    """
    N = N // VECTOR * VECTOR
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.arange(0, BLOCK_N // 8)[None, :]
    scale = to_fp32(tl.load(weight + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    dweight_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        offsets = row * N + columns
        gradient = to_fp32(tl.load(dy + offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))
        row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)  # [ROWS, 1]
        normed = tl.where(inside, centred(values, mean, row, row < M) * row_rstd, 0.0)
        dweight_sum += gradient * normed
        dbias_sum += gradient
        result = normalised_gradient(gradient, normed, scale, row_rstd, N, mean is not None)
        store_gradients(result, dsummed, seed, dx, dresidual, offsets, inside, row, groups, threshold, keep_scale)

    store_sums(partials, program, programs, columns, N, dweight_sum, dbias_sum, HAS_BIAS)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def layer_norm_backward_two_pass_kernel(
    dy, dsummed, x, seed, weight, mean, rstd, dx, dresidual, M, N, threshold, keep_scale,
    VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns one row too wide for registers: one pass for two sums, one for dx."""
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.arange(0, BLOCK_N // 8)[None, :]
    row_rstd = tl.load(rstd + row)
    lane_scaled = tl.zeros([1, BLOCK_N], tl.float32)
    lane_product = tl.zeros([1, BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        offsets = row * N + columns
        scaled = to_fp32(tl.load(dy + offsets, mask=inside, other=0.0, eviction_policy="evict_last"))
        scaled *= to_fp32(tl.load(weight + columns, mask=inside, other=0.0))
        values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0, eviction_policy="evict_last"))
        lane_scaled += scaled
        lane_product += scaled * (centred(values, mean, row, True) * row_rstd)
    mean_scaled = tl.sum(lane_scaled, axis=1, keep_dims=True) / N  # [1, 1]
    if mean is None:
        mean_scaled *= 0.0
    mean_product = tl.sum(lane_product, axis=1, keep_dims=True) / N

    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        offsets = row * N + columns
        scaled = to_fp32(tl.load(dy + offsets, mask=inside, other=0.0))
        scaled *= to_fp32(tl.load(weight + columns, mask=inside, other=0.0))
        values = to_fp32(tl.load(x + offsets, mask=inside, other=0.0))
        normed = centred(values, mean, row, True) * row_rstd
        result = row_rstd * (scaled - mean_scaled - normed * mean_product)
        group = start // 8 + groups
        store_gradients(result, dsummed, seed, dx, dresidual, offsets, inside, row, group, threshold, keep_scale)


@triton.jit(do_not_specialize=["M", "N"])
def layer_norm_backward_columns_kernel(
    dy, x, mean, rstd, partials, M, N, HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N columns of every num_programs(1)-th tile of rows: partial sums of dweight and dbias."""
    N = N // VECTOR * VECTOR
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    dweight_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in range(share, tl.cdiv(M, ROWS), shares):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        values = to_fp32(tl.load(x + row * N + columns, mask=inside, other=0.0))
        row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)  # [ROWS, 1]
        dweight_sum += gradient * (centred(values, mean, row, row < M) * row_rstd)
        dbias_sum += gradient
    store_sums(partials, share, shares, columns, N, dweight_sum, dbias_sum, HAS_BIAS)


class Kernels(_kernels.Kernels):
    """Norms by Triton for calls of one layout."""

    def __init__(self, call: NormCall) -> None:
        x = call.x
        tile, self._rows, N = FORWARD.of_rows(x)
        dropout, vector = dropout_numbers(call.dropout_p), _triton.vector_width(x.element_size(), N)
        kernels = layer_norm_forward_kernel, layer_norm_forward_two_pass_kernel
        self._forward = tile.launch_rows(kernels, (self._rows, N, call.eps, *dropout), (vector,))
        self._bind_backward(call, dropout, vector)

    def _bind_backward(self, call: NormCall, dropout: tuple[int, float], vector: int) -> None:
        """One launch, whose programs keep rows in registers and sum over them, or one for rows and one for the sums."""
        device, has_bias = call.x.device, call.bias is not None
        tile, M, N = BACKWARD.of_rows(call.x)
        self._columns: _triton.Launch | None = None
        if tile.columns >= N:
            programs, kind = tile.shares(M, device), (has_bias, vector, tile.num_stages)
            self._backward = tile.launch(layer_norm_backward_kernel, (programs,), (M, N, *dropout), kind)
        else:
            blocks = _triton.ceil_div(N, COLUMN_TILE.columns)
            programs, kernel = COLUMN_TILE.shares(M, device, blocks), layer_norm_backward_two_pass_kernel
            constants = (vector, tile.columns)
            self._backward = _triton.Launch(kernel, (M,), (M, N, *dropout), constants, tile.num_warps)
            kernel, grid = layer_norm_backward_columns_kernel, (blocks, programs)
            self._columns = COLUMN_TILE.launch(kernel, grid, (M, N), (has_bias, vector))
        self._partials = Partials(1 + has_bias, programs, N)

    def forward(self, call: NormCall) -> NormResult:
        """y, the sum if any, and fp32 statistics per row."""
        x = call.x
        y = torch.empty_like(x)
        summed = None if call.residual is None else torch.empty_like(x)
        mean = torch.empty(self._rows, dtype=torch.float32, device=x.device) if call.centred else None
        # separate buffers: the alignment of half a buffer, and so the compiled variant, would depend on M
        rstd = torch.empty(self._rows, dtype=torch.float32, device=x.device)
        self._forward(x, call.residual, call.seed, call.weight, call.bias, y, summed, mean, rstd)
        return NormResult(y, summed, mean, rstd)

    def backward(self, call: NormCall, result: NormResult, grads: Grads, wanted: Wanted) -> Gradients:
        """dx (dresidual itself without dropout), dresidual, dweight, dbias."""
        dy, *others = grads
        x, weight, seed = rows_of(call, result), call.weight, call.seed
        dresidual = torch.empty_like(x)
        dx = None if seed is None else torch.empty_like(x)
        partials = self._partials.empty(x.device)
        pointers = (dy, others[0] if others else None, x, seed, weight, result.mean, result.rstd, dx, dresidual)
        if self._columns is None:
            self._backward(*pointers, partials)
        else:
            self._backward(*pointers)
            self._columns(dy, x, result.mean, result.rstd, partials)
        sums = self._partials.sum(partials, weight.dtype)
        return dresidual if dx is None else dx, dresidual, sums[0], None if call.bias is None else sums[1]


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """The smallest 16-bit number that keeps an element, and the factor of kept elements."""
    return keep_threshold(dropout_p), keep_scale(dropout_p)
