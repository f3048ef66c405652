"""The calls and results of the losses, and how the loss of one row is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowLoss(NamedTuple):
    """How the loss of a row with a class is made; `cross_entropy` says what each option means."""

    ignore_index: int
    label_smoothing: float
    weights: Tensor | None = None
    """(V + 1,), the weight of each class and behind them their mean, float32 at least; None stands for ones."""
    z_loss: float = 0.0
    softcap: float | None = None

    def is_plain(self) -> bool:
        """Whether there is nothing but smoothing: what the kernels' fastest paths know."""
        return self.weights is None and self.z_loss == 0.0 and self.softcap is None


def row_loss(
    ignore_index: int,
    label_smoothing: float,
    weight: Tensor | None,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> RowLoss:
    """The options as kernels take them, from a call's; the weights in `dtype`."""
    weights = None
    if weight is not None:
        weight = weight.to(dtype)
        weights = torch.cat([weight, weight.mean(dim=0, keepdim=True)])
    return RowLoss(ignore_index, label_smoothing, weights, z_loss, softcap)


def weighted_mean(losses: Tensor, targets: Tensor, ignore_index: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses over that of the weights of their classes, and the latter sum."""
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
        if self.weight is None:
            return RowLoss(self.ignore_index, self.label_smoothing, None, self.z_loss, self.softcap)
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        return row_loss(self.ignore_index, self.label_smoothing, self.weight, self.z_loss, self.softcap, dtype)

    def beyond_classes(self) -> str | None:
        """Why kernels of rows with a class do not take the call; None if they do."""
        if not self.targets.is_floating_point():
            return None
        return "it does not know probabilities as targets, a second tensor of the logits' size; use backend='torch'"


class CrossEntropyResult(NamedTuple):
    """The loss, two numbers (2, M) for each row that a backend may leave for its backward, and what a mean is over."""

    loss: Tensor
    statistics: Tensor | None
    counted: Tensor | None


class LinearCrossEntropyCall(NamedTuple):
    """Targets contiguous and int64; the products are in `dtype`; `wanted` are the gradients of x, weight and bias.

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
        dtype = torch.promote_types(self.dtype, torch.float32)
        return row_loss(self.ignore_index, self.label_smoothing, self.class_weight, self.z_loss, self.softcap, dtype)


class LinearCrossEntropyResult(NamedTuple):
    """The loss, what a mean is over, and the gradients of the sum of losses (None where not wanted)."""

    loss: Tensor
    counted: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
