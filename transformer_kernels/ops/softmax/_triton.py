"""Softmax over the last axis in Triton: rows in registers where they fit, else two passes with online softmax."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import LOG2_E, from_fp32, to_fp32
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, whole_rows
from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.softmax import SoftmaxCall

FORWARD = Tiles("softmax forward", whole_rows, widest=32768)
BACKWARD = Tiles("softmax backward", whole_rows, widest=16384)

SIZES = ["M", "N", "Lq", "d1", "d2", "stride_0", "stride_1", "stride_2", "stride_column"]


@triton.jit
def mask_offsets(row, d1, d2, stride_0, stride_1, stride_2, VECTOR: tl.constexpr):
    """Offset of each row's mask: row = (i0 * d1 + i1) * d2 + i2. Strides are multiples of VECTOR."""
    i2 = row % d2
    i1 = (row // d2) % d1
    i0 = row // d2 // d1
    return (i0 * stride_0 + i1 * stride_1 + i2 * stride_2) // VECTOR * VECTOR


@triton.jit
def visible_columns(
    columns, inside, mask, mask_start, stride_column, last, CAUSAL: tl.constexpr, MASK_CONTIGUOUS: tl.constexpr
):  # fmt: skip
    """`inside` [ROWS, BLOCK_N] restricted to the mask and, if causal, column <= last."""
    visible = inside
    if CAUSAL:
        visible = visible & (columns <= last)
    if mask is not None:
        if MASK_CONTIGUOUS:
            keep = tl.load(mask + mask_start + columns, mask=inside, other=0)
        else:
            keep = tl.load(mask + mask_start + columns.to(tl.int64) * stride_column, mask=inside, other=0)
        visible = visible & (keep != 0)
    return visible


@triton.jit(do_not_specialize=SIZES)
def softmax_forward_kernel(
    x, mask, y, M, N, Lq, d1, d2, stride_0, stride_1, stride_2, stride_column, scale,
    CAUSAL: tl.constexpr, VECTOR: tl.constexpr, MASK_CONTIGUOUS: tl.constexpr,
    MASK_VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS whole rows in registers: x is read once."""
    N = N // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    offsets = row * N + columns

    last = row
    readable = inside
    if CAUSAL:
        last = row % Lq + (N - Lq)
        readable = inside & (columns < (last + VECTOR) // VECTOR * VECTOR)  # whole vectors up to the diagonal
    mask_start = row
    if mask is not None:
        mask_start = mask_offsets(row, d1, d2, stride_0, stride_1, stride_2, MASK_VECTOR)
    visible = visible_columns(columns, readable, mask, mask_start, stride_column, last, CAUSAL, MASK_CONTIGUOUS)

    scores = to_fp32(tl.load(x + offsets, mask=readable, other=0.0)) * scale
    scores = tl.where(visible, scores, float("-inf"))  # [ROWS, BLOCK_N]
    highest = tl.max(scores, axis=1, keep_dims=True)  # [ROWS, 1]
    if mask is not None or CAUSAL:
        highest = tl.where(highest == float("-inf"), 0.0, highest)
    exponentials = tl.exp2((scores - highest) * LOG2_E)  # subtracted before scaling, to avoid rounding a large product
    total = tl.sum(exponentials, axis=1, keep_dims=True)
    inverse = 1.0 / total
    if mask is not None or CAUSAL:
        inverse = tl.where(total == 0.0, 0.0, inverse)
    tl.store(y + offsets, from_fp32(exponentials * inverse, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def softmax_forward_two_pass_kernel(
    x, mask, y, M, N, Lq, d1, d2, stride_0, stride_1, stride_2, stride_column, scale,
    CAUSAL: tl.constexpr, VECTOR: tl.constexpr, MASK_CONTIGUOUS: tl.constexpr,
    MASK_VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns one row: one pass for maximum and sum (Milakov and Gimelshein 2018), one for the result.

    Each lane has its own running maximum and sum, reduced once after the pass.
    """
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    last = row
    end = N
    if CAUSAL:
        last = row % Lq + (N - Lq)
        end = tl.minimum(N, (last.to(tl.int32) + VECTOR) // VECTOR * VECTOR)
    mask_start = row
    if mask is not None:
        mask_start = mask_offsets(row, d1, d2, stride_0, stride_1, stride_2, MASK_VECTOR)

    lane_highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    lane_total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, end, BLOCK_N):
        columns = start + lanes
        readable = columns < end
        visible = visible_columns(columns, readable, mask, mask_start, stride_column, last, CAUSAL, MASK_CONTIGUOUS)
        scores = to_fp32(tl.load(x + row * N + columns, mask=readable, other=0.0, eviction_policy="evict_last")) * scale
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(lane_highest, scores)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        lane_total = lane_total * tl.exp2((lane_highest - reference) * LOG2_E)
        lane_total += tl.exp2((scores - reference) * LOG2_E)
        lane_highest = new_highest

    highest = tl.max(lane_highest, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(lane_total * tl.exp2((lane_highest - highest) * LOG2_E), axis=0)
    inverse = 1.0 / total
    if mask is not None or CAUSAL:
        inverse = tl.where(total == 0.0, 0.0, inverse)

    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        readable = columns < end
        visible = visible_columns(columns, readable, mask, mask_start, stride_column, last, CAUSAL, MASK_CONTIGUOUS)
        scores = (
            to_fp32(tl.load(x + row * N + columns, mask=readable, other=0.0, eviction_policy="evict_first")) * scale
        )
        scores = tl.where(visible, scores, float("-inf"))
        result = tl.exp2((scores - highest) * LOG2_E) * inverse
        tl.store(y + row * N + columns, from_fp32(result, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def softmax_backward_kernel(
    dy, y, dx, M, N, scale, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program owns ROWS whole rows: dx = scale * y * (dy - sum(dy * y)); dy is ignored where y is 0."""
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    offsets = row * N + columns
    weights = to_fp32(tl.load(y + offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
    gradient = to_fp32(tl.load(dy + offsets, mask=inside, other=0.0))
    gradient = tl.where(weights == 0.0, 0.0, gradient)
    inner = tl.sum(weights * gradient, axis=1, keep_dims=True)  # [ROWS, 1]
    result = scale * weights * (gradient - inner)  # 0 where y is 0
    tl.store(dx + offsets, from_fp32(result, dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def softmax_backward_two_pass_kernel(dy, y, dx, M, N, scale, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns one row: one pass for sum(dy * y), one for dx."""
    N = N // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    lane_inner = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        weights = to_fp32(tl.load(y + row * N + columns, mask=inside, other=0.0, eviction_policy="evict_last"))
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0, eviction_policy="evict_last"))
        lane_inner += tl.where(weights == 0.0, 0.0, weights * gradient)
    inner = tl.sum(lane_inner, axis=0)
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        inside = columns < N
        weights = to_fp32(tl.load(y + row * N + columns, mask=inside, other=0.0, eviction_policy="evict_first"))
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0, eviction_policy="evict_first"))
        result = tl.where(weights == 0.0, 0.0, scale * weights * (gradient - inner))
        tl.store(dx + row * N + columns, from_fp32(result, dx.dtype.element_ty), mask=inside)


class Kernels(_kernels.Kernels):
    """Softmax by Triton."""

    def forward(self, call: SoftmaxCall) -> Tensor:
        """softmax(scale * x) over the visible entries of the last axis; x contiguous (..., N)."""
        x, mask, causal, scale = call
        tile, M, N = FORWARD.of_rows(x)
        y = torch.empty_like(x)
        layout = None if mask is None else (mask.shape, mask.stride())
        queries = x.shape[-2] if causal else None
        _forward_launch(tile, M, N, x.element_size(), layout, queries, scale)(x, mask, y)
        return y

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """dx from the saved output y."""
        (dy,), scale = grads, call.scale
        tile, M, N = BACKWARD.of_rows(y)
        dx = torch.empty_like(y)
        _backward_launch(tile, M, N, y.element_size(), scale)(dy, y, dx)
        return (dx,)


@_triton.planned
def _forward_launch(
    tile: RowTile,
    M: int,
    N: int,
    itemsize: int,
    mask: tuple[torch.Size, tuple[int, ...]] | None,
    queries: int | None,
    scale: float,
) -> _triton.Launch:
    """The forward launch for a mask of this shape and strides; `queries` if causal."""
    vector, causal = _triton.vector_width(itemsize, N), queries is not None
    if mask is None:
        sizes: tuple[int, ...] = (1, 1, 0, 0, 0, 0)
        kind = (causal, vector, False, 1)
    else:
        shape, strides = mask
        sizes = (shape[1], shape[2], *strides)
        contiguous = strides[3] == 1
        mask_vector = _triton.vector_width(itemsize, *strides[:3]) if contiguous else 1
        kind = (causal, vector, contiguous, mask_vector)
    numbers = (M, N, queries or 1, *sizes, scale)
    kernels = (softmax_forward_kernel, softmax_forward_two_pass_kernel)
    return _rows_launch(kernels, tile, numbers, kind)


def _rows_launch(
    kernels: tuple[Any, Any], tile: RowTile, numbers: tuple[float, ...], kind: tuple[Any, ...]
) -> _triton.Launch:
    """A launch of the first kernel if a row fits into a tile, else of the second; M and N precede the numbers."""
    M, N = int(numbers[0]), numbers[1]
    if tile.columns < N:
        return _triton.Launch(kernels[1], (M,), numbers, (*kind, tile.columns), tile.num_warps)
    grid = (_triton.ceil_div(M, tile.rows),)
    return _triton.Launch(kernels[0], grid, numbers, (*kind, tile.rows, tile.columns), tile.num_warps)


@_triton.planned
def _backward_launch(tile: RowTile, M: int, N: int, itemsize: int, scale: float) -> _triton.Launch:
    kernels = (softmax_backward_kernel, softmax_backward_two_pass_kernel)
    return _rows_launch(kernels, tile, (M, N, scale), (_triton.vector_width(itemsize, N),))
