"""Softmax over the last axis in Triton: rows in registers where they fit, else two passes with online softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import LOG2_E, from_fp32, to_fp32
from transformer_kernels.backends.triton_tiles import Tiles, whole_rows
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
    """Softmax by Triton for calls of one layout."""

    def __init__(self, call: SoftmaxCall) -> None:
        x, mask = call.x, call.mask
        tile, M, N = FORWARD.of_rows(x)
        itemsize = x.element_size()
        vector = _triton.vector_width(itemsize, N)
        sizes, kind = (1, 1, 0, 0, 0, 0), (call.causal, vector, False, 1)
        if mask is not None:
            strides = mask.stride()
            sizes, contiguous = (*mask.shape[1:3], *strides), strides[3] == 1
            mask_vector = _triton.vector_width(itemsize, *strides[:3]) if contiguous else 1
            kind = (call.causal, vector, contiguous, mask_vector)
        numbers = (M, N, x.shape[-2] if call.causal else 1, *sizes, call.scale)
        kernels = softmax_forward_kernel, softmax_forward_two_pass_kernel
        self._forward = tile.launch_rows(kernels, numbers, kind)
        kernels = softmax_backward_kernel, softmax_backward_two_pass_kernel
        self._backward = BACKWARD.of_rows(x)[0].launch_rows(kernels, (M, N, call.scale), (vector,))

    def forward(self, call: SoftmaxCall) -> Tensor:
        """softmax(scale * x) over the visible entries of the last axis; x contiguous (..., N)."""
        y = torch.empty_like(call.x)
        self._forward(call.x, call.mask, y)
        return y

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """dx from the saved output y."""
        dx = torch.empty_like(y)
        self._backward(grads[0], y, dx)
        return (dx,)
