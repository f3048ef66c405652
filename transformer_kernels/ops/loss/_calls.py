"""The calls and results of the losses, and how the loss of one row is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops._operation import differentiated


class RowLoss(NamedTuple):
    """The options of a row's loss; see `cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    weights: Tensor | None = None
    """(V + 1,), the weight of each class, then their mean, in float32 or wider; None: ones."""
    z_loss: float = 0.0
    softcap: float | None = None

    def is_plain(self) -> bool:
        """Whether there is no option except smoothing, as the kernels' fastest paths require."""
        return self.weights is None and self.z_loss == 0.0 and self.softcap is None


def _row_loss(call: CrossEntropyCall | LinearCrossEntropyCall, weight: Tensor | None, dtype: torch.dtype) -> RowLoss:
    """The options of a call with weights (V,) of the classes, which are converted to at least float32."""
    if weight is not None:
        weight = weight.to(torch.promote_types(dtype, torch.float32))
        weight = torch.cat([weight, weight.mean(dim=0, keepdim=True)])
    return RowLoss(call.ignore_index, call.label_smoothing, weight, call.z_loss, call.softcap)


def weighted_mean(losses: Tensor, targets: Tensor, ignore_index: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses divided by the sum of the weights of their classes, and that sum."""
    ignored = targets == ignore_index
    counted = weights[targets.clamp(0, weights.shape[0] - 2)].masked_fill_(ignored, 0.0).sum()
    return losses.sum() / counted, counted


class CrossEntropyCall(NamedTuple):
    """The tensors are contiguous, the targets int64 classes or, of the shape of the logits, probabilities."""

    logits: Tensor
    targets: Tensor
    ignore_index: int
    label_smoothing: float
    reduction: str
    weight: Tensor | None = None
    z_loss: float = 0.0
    softcap: float | None = None

    def row_loss(self) -> RowLoss:
        """The options of each row."""
        return _row_loss(self, self.weight, self.logits.dtype)

    def beyond_classes(self) -> str | None:
        """Why kernels for class targets do not support the call, or None."""
        if not self.targets.is_floating_point():
            return None
        return "it does not support probabilities as targets; use backend='torch'"


class CrossEntropyResult(NamedTuple):
    """The loss, statistics (2, M) of the rows if stored for backward, and the denominator of a mean."""

    loss: Tensor
    statistics: Tensor | None
    counted: Tensor | None


def second_order(
    call: CrossEntropyCall, result: CrossEntropyResult, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradient of the loss of `cross_entropy`, computed in PyTorch: differentiable once more."""
    logits, targets, ignore_index, label_smoothing, reduction, weight, z_loss, softcap = call
    with torch.enable_grad():
        rows = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        rows = rows if softcap is None else softcap * torch.tanh(rows / softcap)
        kinds = targets.to(rows.dtype).view(rows.shape) if targets.is_floating_point() else targets.view(-1)
        losses = torch.nn.functional.cross_entropy(
            rows,
            kinds,
            weight if weight is None else weight.to(rows.dtype),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="none",
        )
        if z_loss > 0.0:
            seen = torch.ones_like(losses) if targets.is_floating_point() else (kinds != ignore_index).to(losses.dtype)
            losses = losses + z_loss * seen * torch.logsumexp(rows, dim=-1).square()
        loss = losses if reduction == "none" else losses.sum()
        if result.counted is not None and reduction == "mean":
            loss = loss / result.counted
    return differentiated(loss, [logits], grads[0].reshape(loss.shape), wanted)


class LinearCrossEntropyCall(NamedTuple):
    """Targets contiguous and int64; products in `dtype`; `wanted`: which gradients of x, weight and bias are required.

    `class_weight`, `z_loss` and `softcap` are those of `cross_entropy`, whose class weights are called `weight`.
    """

    x: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    dtype: torch.dtype
    wanted: list[bool]
    class_weight: Tensor | None = None
    z_loss: float = 0.0
    softcap: float | None = None

    def row_loss(self) -> RowLoss:
        """The options of each row."""
        return _row_loss(self, self.class_weight, self.dtype)


class LinearCrossEntropyResult(NamedTuple):
    """The loss, the denominator of a mean, and the gradients of the sum of losses (None where not required)."""

    loss: Tensor
    counted: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
