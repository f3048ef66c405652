"""Token embedding, positions, LayerNorm and dropout in Triton: one pass; backward gathers the rows again."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, to_fp32
from transformer_kernels.backends.triton_reduce import sum_partials
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, persistent_rows, whole_rows
from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult
from transformer_kernels.ops.embedding._scatter import table_gradients
from transformer_kernels.ops.norm._triton import (
    centred_rows,
    dropout_numbers,
    dropped_out,
    normalised_gradient,
    store_sums,
)

WIDEST_NORMALISED = 8192
"""Maximum width of a row in registers, forward and backward."""

FORWARD = Tiles("embedding forward", whole_rows, widest=WIDEST_NORMALISED)
BACKWARD = Tiles("embedding backward", persistent_rows, widest=WIDEST_NORMALISED)


@triton.jit
def gathered(weight, tokens, positions, position_ids, row, columns, M, N, L, V, P, scale):
    """scale * weight[token] + positions[position] for rows [R, 1] and columns [1, C], fp32; NaN for an unknown id."""
    token = tl.load(tokens + row, mask=row < M, other=0).to(tl.int64)  # [R, 1]
    known = (token >= 0) & (token < V)
    inside = (row < M) & (columns < N)
    values = to_fp32(tl.load(weight + token * N + columns, mask=inside & known, other=0.0)) * scale  # [R, C]
    if positions is not None:
        if position_ids is not None:
            position = tl.load(position_ids + row, mask=row < M, other=0).to(tl.int64)
            known &= (position >= 0) & (position < P)
        else:
            position = row % L
        values += to_fp32(tl.load(positions + position * N + columns, mask=inside & known, other=0.0))
    return tl.where(known, values, float("nan"))


@triton.jit(do_not_specialize=["M", "N", "L", "V", "P", "threshold"])
def embedding_forward_kernel(
    weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, y, mean, rstd, M, N, L, V, P, scale, eps,
    threshold, keep_scale, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N columns of ROWS rows in registers, all columns with LayerNorm."""
    N = N // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.program_id(1) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)[None, :]
    inside = (row < M) & (columns < N)
    values = gathered(weight, tokens, positions, position_ids, row, columns, M, N, L, V, P, scale)  # [ROWS, BLOCK_N]
    if norm_weight is not None:
        first = tl.zeros([1, 1], tl.int32)
        pivot = gathered(weight, tokens, positions, position_ids, row, first, M, N, L, V, P, scale)  # [ROWS, 1]
        values, row_shift, row_rstd = centred_rows(values, pivot, inside, N, eps)
        tl.store(mean + row, pivot + row_shift, mask=row < M)
        tl.store(rstd + row, row_rstd, mask=row < M)
        values *= row_rstd * to_fp32(tl.load(norm_weight + columns, mask=columns < N, other=0.0))
        if norm_bias is not None:
            values += to_fp32(tl.load(norm_bias + columns, mask=columns < N, other=0.0))
    if seed is not None:
        values = dropped_out(values, seed, row, groups, threshold, keep_scale)
    tl.store(y + row * N + columns, from_fp32(values, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N", "L", "V", "P", "threshold"])
def embedding_backward_kernel(
    dy, weight, tokens, positions, position_ids, norm_weight, mean, rstd, seed, ds, partials, M, N, L, V, P, scale,
    threshold, keep_scale, HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns every num_programs-th tile of ROWS rows: ds, and partial sums of dnorm_weight and dnorm_bias.

    The rows are gathered again, and dropout is applied to dy first.
    """
    N = N // VECTOR * VECTOR
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.arange(0, BLOCK_N // 8)[None, :]
    norm_scale = to_fp32(tl.load(norm_weight + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    dweight_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        if seed is not None:
            gradient = dropped_out(gradient, seed, row, groups, threshold, keep_scale)
        values = gathered(weight, tokens, positions, position_ids, row, columns, M, N, L, V, P, scale)
        row_mean = tl.load(mean + row, mask=row < M, other=0.0)  # [ROWS, 1]
        row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)
        normed = tl.where(inside, (values - row_mean) * row_rstd, 0.0)
        dweight_sum += gradient * normed
        dbias_sum += gradient
        result = normalised_gradient(gradient, normed, norm_scale, row_rstd, N)
        tl.store(ds + row * N + columns, from_fp32(result, ds.dtype.element_ty), mask=inside)

    store_sums(partials, program, programs, columns, N, dweight_sum, dbias_sum, HAS_BIAS)


@triton.jit(do_not_specialize=["M", "N", "threshold"])
def embedding_dropout_kernel(
    dy, seed, ds, M, N, threshold, keep_scale, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program owns BLOCK_N columns of ROWS rows: ds = dropout(dy), for calls without LayerNorm."""
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    groups = tl.program_id(1) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)[None, :]
    inside = (row < M) & (columns < N)
    gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
    gradient = dropped_out(gradient, seed, row, groups, threshold, keep_scale)
    tl.store(ds + row * N + columns, from_fp32(gradient, ds.dtype.element_ty), mask=inside)


class Kernels(_kernels.Kernels):
    """Embedding by Triton."""

    @classmethod
    def unsupported(cls, call: EmbeddingCall) -> str | None:
        """Why these kernels do not support the call, or None."""
        columns = call.weight.shape[1]
        if call.norm_weight is None or columns <= WIDEST_NORMALISED:
            return None
        return f"rows of {columns} columns with LayerNorm; up to {WIDEST_NORMALISED}, use backend='cuda'"

    def forward(self, call: EmbeddingCall) -> EmbeddingResult:
        """(y, mean, rstd); mean and rstd fp32 (M,), None without LayerNorm."""
        weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p = call
        tile, _, N = FORWARD.of_rows(weight)
        y = torch.empty((*tokens.shape, N), dtype=weight.dtype, device=weight.device)
        mean = None if norm_weight is None else torch.empty(tokens.numel(), dtype=torch.float32, device=weight.device)
        rstd = None if mean is None else torch.empty_like(mean)
        numbers = (*_sizes(weight, tokens, positions), scale, eps, *dropout_numbers(dropout_p))
        launch = _launch(embedding_forward_kernel, tile, numbers, weight.element_size())
        launch(weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, y, mean, rstd)
        return EmbeddingResult(y, mean, rstd)

    def backward(
        self, call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dweight, dpositions, dnorm_weight, dnorm_bias."""
        _, mean, rstd = result
        (dy,), (weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, _, dropout_p) = (
            grads,
            call,
        )
        has_bias = norm_bias is not None
        if norm_weight is None:
            ds = dy if seed is None else _undropped(dy, seed, dropout_p)
            return *table_gradients(call, ds, wanted), None, None
        tile, _, N = BACKWARD.of_rows(weight)
        programs = min(
            _triton.ceil_div(tokens.numel(), tile.rows), tile.programs * _triton.multiprocessors(weight.device)
        )
        ds = torch.empty_like(dy)
        partials = torch.empty((1 + has_bias, programs, N), dtype=torch.float32, device=weight.device)
        numbers = (*_sizes(weight, tokens, positions), scale, *dropout_numbers(dropout_p))
        launch = _backward_launch(tile, programs, numbers, has_bias, weight.element_size())
        launch(dy, weight, tokens, positions, position_ids, norm_weight, mean, rstd, seed, ds, partials)
        sums = sum_partials(partials, norm_weight.dtype)
        return *table_gradients(call, ds, wanted), sums[0], sums[1] if has_bias else None


def _sizes(weight: Tensor, tokens: Tensor, positions: Tensor | None) -> tuple[int, int, int, int, int]:
    """The kernels' sizes M, N, L, V, P."""
    return tokens.numel(), weight.shape[1], tokens.shape[1], weight.shape[0], 0 if positions is None else len(positions)


@_triton.planned
def _launch(kernel: Any, tile: RowTile, numbers: tuple[float, ...], itemsize: int) -> _triton.Launch:
    """A launch over tiles of rows and columns; M and N precede the numbers."""
    M, N = int(numbers[0]), int(numbers[1])
    grid = (_triton.ceil_div(M, tile.rows), _triton.ceil_div(N, tile.columns))
    constants = (_triton.vector_width(itemsize, N), tile.rows, tile.columns)
    return _triton.Launch(kernel, grid, numbers, constants, tile.num_warps)


@_triton.planned
def _backward_launch(
    tile: RowTile, programs: int, numbers: tuple[float, ...], has_bias: bool, itemsize: int
) -> _triton.Launch:
    vector = _triton.vector_width(itemsize, int(numbers[1]))
    constants = (has_bias, vector, tile.num_stages, tile.rows, tile.columns)
    return _triton.Launch(embedding_backward_kernel, (programs,), numbers, constants, tile.num_warps, tile.num_stages)


def _undropped(dy: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """The gradient of dropout's input."""
    tile, M, N = FORWARD.of_rows(dy)
    ds = torch.empty_like(dy)
    _launch(embedding_dropout_kernel, tile, (M, N, *dropout_numbers(dropout_p)), dy.element_size())(dy, seed, ds)
    return ds
