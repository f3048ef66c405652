"""The calls and results of the losses, and how the loss of one row is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks
from transformer_kernels.ops._derivatives import Block, Parts, blockwise
from transformer_kernels.ops._kernels import Kernels, record
from transformer_kernels.ops._operation import without_autocast
from transformer_kernels.ops._softcap import capped

OP, LINEAR_OP = "cross_entropy", "linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")

MAX_SUMMED = 1 << 16
"""Maximum number of losses that one program or block adds up; PyTorch's several launches are faster for more."""

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
    counted = weights[targets.clamp(0, weights.shape[0] - 2)].masked_fill(ignored, 0.0).sum()
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

    def tangents(self, kernels: Kernels, result: CrossEntropyResult, given: Parts) -> tuple[Tensor]:
        """The gradient times the tangent, summed over each row, or over all."""
        dlogits = kernels.backward(self, result, (torch.ones_like(result.loss),), (True,))[0]
        assert dlogits is not None and given[0] is not None
        wide = result.loss.dtype
        if self.reduction == "none":
            return ((dlogits.to(wide) * given[0]).sum(dim=-1),)
        return (torch.dot(dlogits.view(-1).to(wide), given[0].reshape(-1).to(wide)),)

    def check_when_run(self) -> None:
        """All targets are classes or ignored."""
        if not self.targets.is_floating_point():
            _checks.classes_in_range(OP, "targets", self.targets, self.logits.shape[-1], self.ignore_index)

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        return (reduced(losses_of(self), self),)

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


def losses_of(call: CrossEntropyCall) -> Tensor:
    """The loss of each row, in the shape of class targets, by PyTorch's differentiable operators."""
    wide = torch.promote_types(call.logits.dtype, torch.float32)
    rows = _checks.as_rows(call.logits).to(wide)
    weight = None if call.weight is None else call.weight.to(wide)
    rows = capped(rows, call.softcap)
    if call.targets.is_floating_point():
        smoothed = _checks.as_rows(call.targets).to(wide) * (1.0 - call.label_smoothing)
        smoothed = smoothed + call.label_smoothing / rows.shape[1]
        smoothed = smoothed if weight is None else smoothed * weight
        log_p = torch.log_softmax(rows, dim=-1).masked_fill(smoothed == 0.0, 0.0)  # of a class with a logit of -inf
        losses, ignored = -(smoothed * log_p).sum(dim=-1), None
    else:
        targets = call.targets.reshape(-1)
        ignored = targets == call.ignore_index
        rows = rows.masked_fill(ignored.unsqueeze(1), 0.0)  # NaN there reaches no gradient
        losses = torch.nn.functional.cross_entropy(
            rows,
            targets,
            weight,
            ignore_index=call.ignore_index,
            label_smoothing=call.label_smoothing,
            reduction="none",
        )
    if call.z_loss > 0.0:
        z_losses = call.z_loss * torch.logsumexp(rows, dim=-1).square()
        losses = losses + (z_losses if ignored is None else z_losses.masked_fill(ignored, 0.0))
    return losses.reshape(call.logits.shape[:-1])


def reduced(losses: Tensor, call: CrossEntropyCall | LinearCrossEntropyCall) -> Tensor:
    """The losses, their sum or their mean."""
    if call.reduction == "none":
        return losses
    if call.reduction == "sum":
        return losses.sum()
    if call.targets.is_floating_point():
        return losses.mean()
    weights = call.row_loss().weights
    if weights is not None:
        return weighted_mean(losses, call.targets, call.ignore_index, weights)[0]
    return losses.sum() / call.targets.ne(call.ignore_index).sum()


def summed(
    kernel: Any,
    losses: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    weights: Tensor | None,
    kept: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The sum or mean of the losses by `LossKernels.summing` or PyTorch, and the denominator of the mean, if `kept`."""
    mean = reduction == "mean"
    if mean and weights is not None:
        return weighted_mean(losses, targets, ignore_index, weights)
    if kernel is None or losses.numel() > MAX_SUMMED:
        count = targets.ne(ignore_index).sum().to(losses.dtype) if mean else None
        return losses.sum() if count is None else losses.sum() / count, count
    loss = losses.new_empty_strided((), ())
    count = None
    if mean:  # where it is not kept the kernel of a CPU writes it, and then the loss over it
        count = torch.empty_like(loss) if kept else loss
    kernel(losses, targets, loss, count)
    return loss, count


class LossKernels(Kernels):
    """The interface of a backend's `cross_entropy` kernels for `linear_cross_entropy`, for chunks of rows."""

    makes_ahead = False
    """Whether `forward_with_gradient` computes the gradient of these calls."""

    @classmethod
    def row_losses(cls, logits: Tensor, targets: Tensor, options: RowLoss, *, in_place: bool = False) -> Tensor:
        """The loss of each row (M,); logits (M, V) with any row stride, targets (M,).

        `in_place`: the gradient of the sum of the losses overwrites the logits.
        """
        raise NotImplementedError

    @classmethod
    def summing(cls, losses: Tensor, ignore_index: int, reduction: str) -> Any:
        """A kernel for (losses, targets, loss, denominator of a mean or None); None: PyTorch's."""
        return None

    @classmethod
    def reduced(
        cls, losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum or mean of the losses, and the denominator of the mean."""
        return summed(cls.summing(losses, ignore_index, reduction), losses, targets, ignore_index, reduction, weights)


@record
class LinearCrossEntropyCall(NamedTuple):
    """Targets contiguous and int64; products in `dtype`; `wanted`: which gradients of x, weight and bias are required.

    `class_weight`, `z_loss` and `softcap` are passed to `cross_entropy`, where class weights are called `weight`.
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

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        """In chunks of rows, whose logits are not kept; their gradients are added up in float32."""
        wide, targets = torch.promote_types(self.dtype, torch.float32), self.targets.reshape(-1)
        step = rows_at_once(self.weight.shape[0], self.dtype, self.x.device)

        def losses(own: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Parts:
            dtype, bias = self.dtype, None if bias is None else bias.to(self.dtype)
            logits = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias)
            return (losses_of(self._replace(targets=own).loss_of(logits)),)

        def chunk(first: int) -> Block:
            count = min(step, len(targets) - first)
            own: Callable[[Any], Any] = lambda x: x if x is None else x.narrow(0, first, count)  # noqa: E731
            return Block(partial(losses, own(targets)), lambda x: (own(x[0]), *x[1:]), lambda y: (own(y[0]),))

        chunks = [chunk(first) for first in range(0, max(1, len(targets)), step)]
        given = (tensor if tensor is None else tensor.to(wide) for tensor in (self.weight, self.bias))
        with without_autocast(self.x):
            (rows,) = blockwise(chunks, 0, _checks.as_rows(self.x), *given)
        return (reduced(rows.view(self.targets.shape), self),)

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
