"""Token embedding, positions, LayerNorm and dropout in Triton: one pass; backward gathers the rows again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, to_fp32
from transformer_kernels.backends.triton_reduce import Partials
from transformer_kernels.backends.triton_tiles import Tiles, persistent_rows, whole_rows
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

MAX_NORMALISED_COLUMNS = 8192
"""Maximum width of a row in registers, forward and backward."""

FORWARD = Tiles("embedding forward", whole_rows, widest=MAX_NORMALISED_COLUMNS)
BACKWARD = Tiles("embedding backward", persistent_rows, widest=MAX_NORMALISED_COLUMNS)


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
    """Embedding by Triton for calls of one layout."""

    @classmethod
    def unsupported(cls, call: EmbeddingCall) -> str | None:
        """Why these kernels do not support the call, or None."""
        columns = call.weight.shape[1]
        if call.norm_weight is None or columns <= MAX_NORMALISED_COLUMNS:
            return None
        return f"rows of {columns} columns with LayerNorm; up to {MAX_NORMALISED_COLUMNS}, use backend='cuda'"

    def __init__(self, call: EmbeddingCall) -> None:
        weight, tokens, positions = call.weight, call.tokens, call.positions
        (V, N), M, itemsize = weight.shape, tokens.numel(), weight.element_size()
        sizes = (M, N, tokens.shape[1], V, 0 if positions is None else len(positions), call.scale)
        dropout, vector = dropout_numbers(call.dropout_p), (_triton.vector_width(itemsize, N),)
        tile, has_bias = FORWARD.of_rows(weight)[0], call.norm_bias is not None
        grid = tile.grid(M, N)
        self._forward = tile.launch(embedding_forward_kernel, grid, (*sizes, call.eps, *dropout), vector)
        self._undropped = tile.launch(embedding_dropout_kernel, grid, (M, N, *dropout), vector)
        if call.norm_weight is not None:
            tile = BACKWARD.of_rows(weight)[0]
            programs, kind = tile.shares(M, weight.device), (has_bias, *vector, tile.num_stages)
            self._backward = tile.launch(embedding_backward_kernel, (programs,), (*sizes, *dropout), kind)
            self._partials = Partials(1 + has_bias, programs, N)

    def forward(self, call: EmbeddingCall) -> EmbeddingResult:
        """(y, mean, rstd); mean and rstd fp32 (M,), None without LayerNorm."""
        weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, *_ = call
        y = torch.empty((*tokens.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        mean = None if norm_weight is None else torch.empty(tokens.numel(), dtype=torch.float32, device=weight.device)
        rstd = None if mean is None else torch.empty_like(mean)
        self._forward(weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, y, mean, rstd)
        return EmbeddingResult(y, mean, rstd)

    def backward(
        self, call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dweight, dpositions, dnorm_weight, dnorm_bias."""
        weight, tokens, positions, position_ids, norm_weight, _, seed, *_ = call
        (dy,), dnorm_weight, dnorm_bias = grads, None, None
        ds = dy if norm_weight is None and seed is None else torch.empty_like(dy)
        if norm_weight is not None:
            partials = self._partials.empty(weight.device)
            statistics = result.mean, result.rstd
            self._backward(dy, weight, tokens, positions, position_ids, norm_weight, *statistics, seed, ds, partials)
            dnorm_weight, *biases = self._partials.sum(partials, norm_weight.dtype)
            dnorm_bias = biases[0] if biases else None
        elif seed is not None:
            self._undropped(dy, seed, ds)
        return *table_gradients(call, ds, wanted), dnorm_weight, dnorm_bias
