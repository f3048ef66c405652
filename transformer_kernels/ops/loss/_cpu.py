"""Cross-entropy in C++ for the CPU: csrc/cpu/rows/cross_entropy.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address
from transformer_kernels.backends.cpu import DTYPE_CODES, load
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.loss._calls import CrossEntropyCall, CrossEntropyResult, RowLoss, weighted_mean

unsupported = CrossEntropyCall.beyond_classes


def forward(call: CrossEntropyCall) -> CrossEntropyResult:
    """The loss, (maximum, 1 / sum of exponentials) of each row as (2, M), and what a mean is over."""
    logits, targets, options = call.logits, call.targets, call.row_loss()
    statistics = logits.new_empty((2, targets.numel()), dtype=torch.float32)
    losses = _rows(logits, logits.shape[-1], targets, statistics, options)
    if call.reduction == "none":
        return CrossEntropyResult(losses, statistics, None)
    loss, count = reduced(losses, targets, call.ignore_index, call.reduction, options.weights)
    return CrossEntropyResult(loss, statistics, count)


def forward_with_gradient(call: CrossEntropyCall) -> tuple[CrossEntropyResult, Tensor] | None:
    """`forward`, and the gradient of the loss, made while a row is in the cache; None where backward has to make it."""
    if not _made_ahead(call):
        return None
    logits, targets, options = call.logits, call.targets, call.row_loss()
    statistics = logits.new_empty((2, targets.numel()), dtype=torch.float32)
    dlogits, loss = torch.empty_like(logits), statistics.new_empty(())
    count = statistics.new_empty(()) if call.reduction == "mean" else None
    losses = _rows(logits, logits.shape[-1], targets, statistics, options, dlogits, count)
    _sum(losses, targets, loss, count, call.ignore_index)
    return CrossEntropyResult(loss, statistics, count), dlogits


def scale_gradient(dlogits: Tensor, dloss: Tensor) -> None:
    """Multiply, in its place, what `forward_with_gradient` made by the gradient of its loss."""
    load().cross_entropy_scale(DTYPE_CODES[dlogits.dtype], dloss.data_ptr(), dlogits.data_ptr(), dlogits.numel())


def _made_ahead(call: CrossEntropyCall) -> bool:
    """Whether the gradient is made before that of the loss is known; in float16 it may only be in range with that."""
    return call.reduction != "none" and call.logits.dtype is not torch.float16 and call.row_loss().is_plain()


def row_losses(logits: Tensor, targets: Tensor, options: RowLoss) -> Tensor:
    """The loss of each row; logits (M, V) with any distance between rows, targets (M,)."""
    return _rows(logits, logits.stride(0), targets, None, options)


def row_losses_and_gradient(logits: Tensor, targets: Tensor, options: RowLoss) -> tuple[Tensor, Tensor]:
    """`row_losses`, and the gradient of their sum, which is written over the logits."""
    return _rows(logits, logits.stride(0), targets, None, options, logits), logits


def _rows(
    logits: Tensor,
    stride: int,
    targets: Tensor,
    statistics: Tensor | None,
    options: RowLoss,
    dlogits: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """The losses, and where `dlogits` are given the gradient of their sum, or with `count` of their mean."""
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    load().cross_entropy_forward(
        DTYPE_CODES[logits.dtype],
        logits.data_ptr(),
        stride,
        targets.data_ptr(),
        losses.data_ptr(),
        address(statistics),
        address(dlogits),
        address(count),
        targets.numel(),
        logits.shape[-1],
        *options.as_arguments(),
    )
    return losses


def reduced(
    losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sum or mean of the losses, and what the mean is over."""
    if weights is not None and reduction == "mean":
        return weighted_mean(losses, targets, ignore_index, weights)
    loss = losses.new_empty(())
    count = losses.new_empty(()) if reduction == "mean" else None
    _sum(losses, targets, loss, count, ignore_index)
    return loss, count


def _sum(losses: Tensor, targets: Tensor, loss: Tensor, count: Tensor | None, ignore_index: int) -> None:
    load().cross_entropy_sum(
        losses.data_ptr(), targets.data_ptr(), loss.data_ptr(), address(count), losses.numel(), ignore_index
    )


def backward(call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    """dloss * (softmax - the smoothed target), divided by what a mean is over."""
    (dloss,), logits, options = grads, call.logits, call.row_loss()
    _, statistics, count = result
    assert statistics is not None
    dlogits = torch.empty_like(logits)
    load().cross_entropy_backward(
        DTYPE_CODES[logits.dtype],
        dloss.data_ptr(),
        call.reduction == "none",
        _made_ahead(call),
        address(count) if call.reduction == "mean" else 0,
        logits.data_ptr(),
        call.targets.data_ptr(),
        statistics.data_ptr(),
        dlogits.data_ptr(),
        call.targets.numel(),
        logits.shape[-1],
        *options.as_arguments(),
    )
    return (dlogits,)
