"""The calls and results of the losses, and how the loss of one row is computed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted, record
from transformer_kernels.ops._operation import differentiated

OP, LINEAR_OP = "cross_entropy", "linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Maximum bytes of a chunk's logits. CPU: about a last-level cache. GPU: small next to a model's other tensors, with
enough rows for products at full rate and a negligible cost of accumulating dweight."""

MIN_ROWS = 512
"""Minimum rows per chunk: each chunk reads the weight twice and accumulates dweight once."""


def rows_at_once(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows per chunk."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    return max(CHUNK_BYTES[kind] // (classes * dtype.itemsize), MIN_ROWS)


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


@record
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

    def fake(self) -> CrossEntropyResult:
        logits = self.logits
        dtype = torch.promote_types(logits.dtype, torch.float32)
        loss = logits.new_empty(logits.shape[:-1] if self.reduction == "none" else (), dtype=dtype)
        statistics = logits.new_empty((2, math.prod(logits.shape[:-1])), dtype=dtype)
        return CrossEntropyResult(loss, statistics, logits.new_empty((), dtype=dtype))

    def check_when_run(self) -> None:
        """All targets are classes or ignored."""
        if not self.targets.is_floating_point():
            _checks.classes_in_range(OP, "targets", self.targets, self.logits.shape[-1], self.ignore_index)

    def second_order(self, result: CrossEntropyResult, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """The gradient, computed in PyTorch."""
        return second_order(self, result, grads, wanted)

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


class LossKernels(Kernels):
    """What `linear_cross_entropy` asks of a backend's kernels of `cross_entropy`, for chunks of rows."""

    makes_ahead = False
    """Whether `forward_with_gradient` computes the gradient of these calls."""

    @classmethod
    def row_losses(cls, logits: Tensor, targets: Tensor, options: RowLoss) -> Tensor:
        """The loss of each row; logits (M, V) with any row stride, targets (M,)."""
        raise NotImplementedError

    @classmethod
    def row_losses_and_gradient(cls, logits: Tensor, targets: Tensor, options: RowLoss) -> tuple[Tensor, Tensor]:
        """`row_losses`, and the gradient of their sum, which overwrites the logits."""
        raise NotImplementedError

    @classmethod
    def reduced(
        cls, losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum or mean of the losses, and the denominator of the mean."""
        raise NotImplementedError


@record
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

    def fake(self) -> LinearCrossEntropyResult:
        scalar = self.x.new_empty((), dtype=torch.promote_types(self.dtype, torch.float32))
        if self.reduction == "none":
            return LinearCrossEntropyResult(scalar.new_empty(self.targets.shape), scalar, None, None, None)
        likes = (self.x.contiguous(), self.weight, self.bias)
        grads = (
            torch.empty_like(like) if want and like is not None else None
            for like, want in zip(likes, self.wanted, strict=True)
        )
        return LinearCrossEntropyResult(scalar, torch.empty_like(scalar), *grads)

    def is_empty(self) -> bool:
        return False

    def may_be_composed(self) -> bool:
        return True

    def drops(self) -> bool:
        return self.reduction != "none" and not self.is_one_chunk()

    def check_when_run(self) -> None:
        """All targets are classes or ignored."""
        _checks.classes_in_range(LINEAR_OP, "targets", self.targets, self.weight.shape[0], self.ignore_index)

    def is_one_chunk(self) -> bool:
        """Whether all rows fit into one chunk."""
        return self.targets.numel() <= rows_at_once(self.weight.shape[0], self.dtype, self.x.device)

    def loss_of(self, logits: Tensor) -> CrossEntropyCall:
        """The call of `cross_entropy` with these logits."""
        return CrossEntropyCall(
            logits, self.targets, self.ignore_index, self.label_smoothing, self.reduction, self.class_weight,
            self.z_loss, self.softcap,
        )  # fmt: skip

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
