"""Cross-entropy in Triton: rows in registers where they fit, else two passes with online softmax.

Rows of logits have stride `S`. Whole rows of S are loaded, so S alone determines vector loads. Columns beyond the N
classes are ignored, and set to zero where the gradient overwrites the logits.

`weights`, `z_loss` and `softcap` may be None, which removes them at compile time. `weights` (N + 1,) has one per class,
then their mean.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import LOG2_E, from_fp32, tanh, to_fp32
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, column_blocks, whole_rows
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.loss._calls import (
    CrossEntropyCall,
    CrossEntropyResult,
    LossKernels,
    RowLoss,
    summed,
)

FORWARD = Tiles("cross_entropy forward", whole_rows, widest=16384, narrowest=16)
BACKWARD = Tiles("cross_entropy backward", column_blocks, widest=256, narrowest=16)

REDUCTION = RowTile(rows=1, columns=4096, num_warps=16, num_stages=3)


@triton.jit
def read_targets(targets, row, M, N, ignore_index):
    """The class of each row (-1 if none), whether the row is ignored, and whether its target is out of range."""
    target = tl.load(targets + row, mask=row < M, other=0)
    ignored = target == ignore_index
    stray = ((target < 0) | (target >= N)) & (target != ignore_index)
    return tl.where(ignored | stray, -1, target).to(tl.int32), ignored, stray


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    return scores if softcap is None else softcap * tanh(scores / softcap, True)


@triton.jit
def weighted_share(weights, target, N, smoothing, SMOOTH: tl.constexpr):
    """The weighted target of the row's class without smoothing, and the sum of the row's targets."""
    own = 1.0 - smoothing if SMOOTH else 1.0
    share = 1.0
    if weights is not None:
        own *= tl.load(weights + target, mask=target >= 0, other=0.0)
        share = own
        if SMOOTH:
            share += smoothing * tl.load(weights + N)
    return own, share


@triton.jit
def row_loss(
    highest, log_total, picked, mean, target, ignored, stray, weights, z_loss, N, smoothing, SMOOTH: tl.constexpr
):
    """The loss of rows: 0 where ignored, NaN if the target is out of range. `picked`, the score of the class, and the
    weighted `mean` of scores are relative to `highest`.
    """
    if weights is None:
        loss = log_total - picked
        if SMOOTH:
            loss = (1.0 - smoothing) * loss + smoothing * (log_total - mean)
    else:
        own, share = weighted_share(weights, target, N, smoothing, SMOOTH)
        loss = share * log_total - own * picked
        if SMOOTH:
            loss -= smoothing * mean
    if z_loss is not None:
        loss += z_loss * (highest + log_total) * (highest + log_total)
    return tl.where(ignored, 0.0, tl.where(stray, float("nan"), loss))


@triton.jit
def row_gradient(p, scores, columns, target, scale, lse, weights, z_loss, softcap, N, smoothing, SMOOTH: tl.constexpr):
    """scale * (p - smoothed target) with the factors of weights and z-loss; 0 where scale is 0, also if p is NaN.
    `scores` are read only with a soft cap, `lse` only with a z-loss.
    """
    if weights is not None:
        own, share = weighted_share(weights, target, N, smoothing, SMOOTH)
        if z_loss is not None:
            share += 2.0 * z_loss * lse
        p *= share
    elif z_loss is not None:
        p *= 1.0 + 2.0 * z_loss * lse
    if SMOOTH:
        even = smoothing / N
        if weights is not None:
            even *= tl.load(weights + columns, mask=columns < N, other=0.0)
        p -= even
    if weights is None:
        own = 1.0 - smoothing if SMOOTH else 1.0
    p -= tl.where(columns == target, own, 0.0)
    if softcap is not None:
        p *= 1.0 - (scores / softcap) * (scores / softcap)
    return tl.where(scale == 0.0, 0.0, scale * p)


@triton.jit(do_not_specialize=["M", "N", "S", "ignore_index"])
def cross_entropy_forward_kernel(
    logits, targets, weights, losses, statistics, M, N, S, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, PADDED: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS whole rows in registers: the logits are read once.

    With GRADIENT the gradient of the sum of losses overwrites them; else maximum and 1 / sum are stored for backward.
    PADDED: S > N. The target's logit is loaded separately, which is cheaper than selecting it from the row.
    """
    S = S // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    whole = (row < M) & (columns < S)
    target, ignored, stray = read_targets(targets, row, M, N, ignore_index)  # [ROWS, 1]

    chosen = to_fp32(tl.load(logits + row * S + target, mask=(row < M) & (target >= 0), other=0.0))  # [ROWS, 1]
    chosen = capped(chosen, softcap)
    scores = to_fp32(tl.load(logits + row * S + columns, mask=whole, other=float("-inf")))  # [ROWS, BLOCK_N]
    if softcap is not None:
        scores = tl.where(columns < N, capped(scores, softcap), float("-inf"))
    if PADDED:
        scores = tl.where(columns < N, scores, float("-inf"))
    highest = tl.max(scores, axis=1, keep_dims=True)  # [ROWS, 1]
    scores -= highest
    exponentials = tl.exp2(scores * LOG2_E)
    total = tl.sum(exponentials, axis=1, keep_dims=True)
    picked = chosen - highest
    mean = picked
    if SMOOTH:
        distances = tl.where(columns < N, scores, 0.0)
        if weights is not None:
            distances *= tl.load(weights + columns, mask=columns < N, other=0.0)
        mean = tl.sum(distances, axis=1, keep_dims=True) / N
    log_total = tl.log(total)
    loss = row_loss(highest, log_total, picked, mean, target, ignored, stray, weights, z_loss, N, smoothing, SMOOTH)
    tl.store(losses + row, loss, mask=row < M)
    if GRADIENT:
        scale = tl.where(ignored, 0.0, tl.where(stray, float("nan"), 1.0))
        gradient = row_gradient(
            exponentials * (1.0 / total), scores + highest, columns, target, scale, highest + log_total, weights,
            z_loss, softcap, N, smoothing, SMOOTH,
        )  # fmt: skip
        if PADDED:
            gradient = tl.where(columns < N, gradient, 0.0)
        tl.debug_barrier()  # every thread has read the target's logit before it is overwritten
        tl.store(logits + row * S + columns, from_fp32(gradient, logits.dtype.element_ty), mask=whole)
    else:
        tl.store(statistics + row, highest, mask=row < M)
        tl.store(statistics + M + row, 1.0 / total, mask=row < M)


@triton.jit(do_not_specialize=["M", "N", "S", "ignore_index"])
def cross_entropy_forward_two_pass_kernel(
    logits, targets, weights, losses, statistics, M, N, S, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns one row: one pass for maximum and sum (Milakov and Gimelshein 2018), one for the gradient.

    Each lane has its own running maximum and sum, reduced once after the pass. For smoothing it also sums differences
    to the row's first entry, which avoids cancellation of large logits.
    """
    S = S // VECTOR * VECTOR
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)
    target, ignored, stray = read_targets(targets, row, M, N, ignore_index)
    logits += row * S
    chosen = capped(to_fp32(tl.load(logits + target, mask=target >= 0, other=0.0)), softcap)
    anchor = 0.0
    if SMOOTH:
        anchor = capped(to_fp32(tl.load(logits)), softcap)
        anchor = tl.where(tl.abs(anchor) < float("inf"), anchor, 0.0)

    lane_highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    lane_total = tl.zeros([BLOCK_N], tl.float32)
    lane_distance = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + lanes
        scores = to_fp32(tl.load(logits + columns, mask=columns < S, other=0.0, eviction_policy="evict_last"))
        scores = tl.where(columns < N, capped(scores, softcap), float("-inf"))
        new_highest = tl.maximum(lane_highest, scores)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        lane_total = lane_total * tl.exp2((lane_highest - reference) * LOG2_E)
        lane_total += tl.exp2((scores - reference) * LOG2_E)
        lane_highest = new_highest
        if SMOOTH:
            distances = tl.where(columns < N, scores - anchor, 0.0)
            if weights is not None:
                distances *= tl.load(weights + columns, mask=columns < N, other=0.0)
            lane_distance += distances

    highest = tl.max(lane_highest, axis=0)
    total = tl.sum(lane_total * tl.exp2((lane_highest - highest) * LOG2_E), axis=0)
    picked = chosen - highest
    mean = picked
    if SMOOTH:
        apart = highest - anchor
        if weights is not None:
            apart *= tl.load(weights + N)
        mean = tl.sum(lane_distance, axis=0) / N - apart
    log_total = tl.log(total)
    loss = row_loss(highest, log_total, picked, mean, target, ignored, stray, weights, z_loss, N, smoothing, SMOOTH)
    tl.store(losses + row, loss)
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit before it is overwritten
        scale = tl.where(ignored, 0.0, tl.where(stray, float("nan"), 1.0))
        inverse = 1.0 / total
        for start in range(0, S, BLOCK_N):
            columns = start + lanes
            scores = to_fp32(tl.load(logits + columns, mask=columns < S, other=0.0, eviction_policy="evict_first"))
            scores = capped(scores, softcap)
            p = tl.exp2((scores - highest) * LOG2_E) * inverse
            gradient = row_gradient(
                p, scores, columns, target, scale, highest + log_total, weights, z_loss, softcap, N, smoothing, SMOOTH
            )  # fmt: skip
            gradient = tl.where(columns < N, gradient, 0.0)
            tl.store(logits + columns, from_fp32(gradient, logits.dtype.element_ty), mask=columns < S)
    else:
        tl.store(statistics + row, highest)
        tl.store(statistics + M + row, 1.0 / total)


@triton.jit(do_not_specialize=["M", "N", "ignore_index"])
def cross_entropy_backward_kernel(
    dloss, logits, targets, weights, statistics, count, dlogits, M, N, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, PER_ROW: tl.constexpr, MEAN: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of ROWS x BLOCK_N elements; adjacent programs own adjacent columns."""
    classes = N
    N = N // VECTOR * VECTOR
    column_blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = program % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    target, ignored, stray = read_targets(targets, row, M, classes, ignore_index)  # [ROWS, 1]
    highest = tl.load(statistics + row, mask=row < M, other=0.0)
    inverse = tl.load(statistics + M + row, mask=row < M, other=0.0)
    scale = tl.load(dloss + row, mask=row < M, other=0.0) if PER_ROW else tl.load(dloss)
    if MEAN:
        scale = scale / tl.load(count)
    scale = tl.where(ignored, 0.0, tl.where(stray, float("nan"), scale))  # [ROWS, 1]
    scores = capped(to_fp32(tl.load(logits + row * N + columns, mask=inside, other=0.0)), softcap)  # [ROWS, BLOCK_N]
    p = tl.exp2((scores - highest) * LOG2_E) * inverse
    lse = highest - tl.log(inverse)
    gradient = row_gradient(
        p, scores, columns, target, scale, lse, weights, z_loss, softcap, classes, smoothing, SMOOTH
    )  # fmt: skip
    tl.store(dlogits + row * N + columns, from_fp32(gradient, dlogits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def sum_losses_kernel(losses, targets, loss, count, M, ignore_index, MEAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns all losses (M,): their sum, or with MEAN their mean over rows that are not ignored."""
    lanes = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    counted = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, M, BLOCK_N):
        row = start + lanes
        total += tl.load(losses + row, mask=row < M, other=0.0)
        if MEAN:
            target = tl.load(targets + row, mask=row < M, other=0)
            counted += ((target != ignore_index) & (row < M)).to(tl.int32)
    result = tl.sum(total, axis=0)
    if MEAN:
        rows = tl.sum(counted, axis=0).to(tl.float32)
        tl.store(count, rows)
        result = result / rows
    tl.store(loss, result)


class Kernels(LossKernels):
    """Cross-entropy by Triton for calls of one layout."""

    def __init__(self, call: CrossEntropyCall) -> None:
        logits, options, reduction = call.logits, call.row_loss(), call.reduction
        rows = logits.view(-1, logits.shape[-1])
        self._losses = _losses(rows, options, in_place=False)
        self._sum = self.summing(rows[:, 0], call.ignore_index, reduction)
        tile, M, N = BACKWARD.of_rows(logits)
        constants = (options.label_smoothing > 0.0, reduction == "none", reduction == "mean", _vector(logits, N))
        numbers, grid = (M, N, *_numbers(options)), (math.prod(tile.grid(M, N)),)
        self._backward = tile.launch(cross_entropy_backward_kernel, grid, numbers, constants)

    @classmethod
    def unsupported(cls, call: CrossEntropyCall) -> str | None:
        """Why the kernels do not support the call; None if they do."""
        return call.beyond_classes()

    def forward(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """The loss, (maximum, 1 / sum of exponentials) per row as (2, M), and the denominator of a mean."""
        logits, targets, weights = call.logits, call.targets, call.row_loss().weights
        losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        statistics = losses.new_empty((2, targets.numel()))
        self._losses(logits, targets, weights, losses, statistics)
        if call.reduction == "none":
            return CrossEntropyResult(losses, statistics, None)
        loss, count = summed(self._sum, losses, targets, call.ignore_index, call.reduction, weights)
        return CrossEntropyResult(loss, statistics, count)

    @classmethod
    def row_losses(cls, logits: Tensor, targets: Tensor, options: RowLoss, *, in_place: bool = False) -> Tensor:
        losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        statistics = None if in_place else losses.new_empty((2, targets.numel()))
        _losses(logits, options, in_place)(logits, targets, options.weights, losses, statistics)
        return losses

    @classmethod
    def summing(cls, losses: Tensor, ignore_index: int, reduction: str) -> Any:
        """A launch over (losses, targets, loss, count), with a pointer that is not used in place of a count of None."""
        numbers, constants = (losses.numel(), ignore_index), (reduction == "mean", REDUCTION.columns)
        warps, stages = REDUCTION.num_warps, REDUCTION.num_stages
        launch = _triton.Launch(sum_losses_kernel, (1,), numbers, constants, warps, stages)
        return lambda losses, targets, loss, count: launch(losses, targets, loss, loss if count is None else count)

    def backward(
        self, call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor]:
        """dloss * (softmax - smoothed target), divided by the denominator of a mean."""
        logits, weights = call.logits, call.row_loss().weights
        dlogits = torch.empty_like(logits)
        self._backward(grads[0], logits, call.targets, weights, result.statistics, result.counted, dlogits)
        return (dlogits,)


def _numbers(options: RowLoss) -> tuple[int, float, float | None, float | None]:
    """ignore_index, smoothing, z_loss and softcap in the order of the kernels' arguments."""
    return options.ignore_index, options.label_smoothing, options.z_loss or None, options.softcap


def _vector(logits: Tensor, stride: int) -> int:
    return _triton.vector_width(logits.element_size(), stride)


def _losses(logits: Tensor, options: RowLoss, in_place: bool) -> _triton.Launch:
    """A launch over logits (M, V) with any row stride; `in_place`: their gradient overwrites them."""
    (M, N), S = logits.shape, logits.stride(0)
    tile = FORWARD.find(_triton.capability(logits.device), logits.element_size(), S)
    numbers, kind = (M, N, S, *_numbers(options)), (options.label_smoothing > 0.0, in_place)
    if tile.columns < S:
        constants = (*kind, _vector(logits, S), tile.columns)
        return _triton.Launch(cross_entropy_forward_two_pass_kernel, (M,), numbers, constants, tile.num_warps)
    kernel, grid = cross_entropy_forward_kernel, (_triton.ceil_div(M, tile.rows),)
    return tile.launch(kernel, grid, numbers, (*kind, S > N, _vector(logits, S)))
