"""Cross-entropy in CUDA C++: csrc/ops/cross_entropy_forward.cuh and cross_entropy_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.loss._calls import CrossEntropyCall, CrossEntropyResult, RowLoss, weighted_mean

ROWS_OF_ONE_BLOCK = 1 << 16
"""How many losses one block adds up; a sum over more is worth PyTorch's several launches."""


unsupported = CrossEntropyCall.beyond_classes


def forward(call: CrossEntropyCall) -> CrossEntropyResult:
    """The loss, (maximum, 1 / sum of exponentials) of each row as (2, M), and what a mean is over."""
    logits, targets, options = call.logits, call.targets, call.row_loss()
    statistics = logits.new_empty((2, targets.numel()), dtype=torch.float32)
    losses = _launch_rows(logits, logits.shape[-1], targets, statistics, options)
    if call.reduction == "none":
        return CrossEntropyResult(losses, statistics, None)
    loss, count = reduced(losses, targets, call.ignore_index, call.reduction, options.weights)
    return CrossEntropyResult(loss, statistics, count)


def row_losses(logits: Tensor, targets: Tensor, options: RowLoss) -> Tensor:
    """The loss of each row; logits (M, V) with any distance between rows, targets (M,)."""
    statistics = logits.new_empty((2, targets.numel()), dtype=torch.float32)
    return _launch_rows(logits, logits.stride(0), targets, statistics, options)


def row_losses_and_gradient(logits: Tensor, targets: Tensor, options: RowLoss) -> tuple[Tensor, Tensor]:
    """`row_losses`, and the gradient of their sum, which is written over the logits."""
    return _launch_rows(logits, logits.stride(0), targets, None, options), logits


def _launch_rows(logits: Tensor, stride: int, targets: Tensor, statistics: Tensor | None, options: RowLoss) -> Tensor:
    """The losses; without `statistics` the gradient is left in place of the logits."""
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    load().cross_entropy_forward(
        logits.data_ptr(),
        targets.data_ptr(),
        losses.data_ptr(),
        address(statistics),
        targets.numel(),
        logits.shape[-1],
        stride,
        *options.as_arguments(),
        DTYPE_CODES[logits.dtype],
        *stream_of(logits),
    )
    return losses


def reduced(
    losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sum or mean of the losses, and what the mean is over."""
    if weights is not None and reduction == "mean":
        return weighted_mean(losses, targets, ignore_index, weights)
    mean, rows = reduction == "mean", losses.numel()
    if rows > ROWS_OF_ONE_BLOCK:
        count = targets.ne(ignore_index).sum().float() if mean else None
        return losses.sum() if count is None else losses.sum() / count, count
    loss = losses.new_empty(())
    count = losses.new_empty(()) if mean else None
    load().cross_entropy_sum(
        losses.data_ptr(),
        targets.data_ptr(),
        loss.data_ptr(),
        address(count),
        rows,
        ignore_index,
        *stream_of(losses),
    )
    return loss, count


def backward(call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    """dloss * (softmax - the smoothed target), divided by what a mean is over."""
    (dloss,), logits, targets = grads, call.logits, call.targets
    reduction, options = call.reduction, call.row_loss()
    _, statistics, count = result
    assert statistics is not None
    dlogits = torch.empty_like(logits)
    load().cross_entropy_backward(
        dloss.data_ptr(),
        reduction == "none",
        logits.data_ptr(),
        targets.data_ptr(),
        statistics.data_ptr(),
        address(count) if reduction == "mean" else 0,
        dlogits.data_ptr(),
        targets.numel(),
        logits.shape[-1],
        *options.as_arguments(),
        DTYPE_CODES[logits.dtype],
        *stream_of(logits),
    )
    return (dlogits,)
