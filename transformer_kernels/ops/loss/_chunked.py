"""The output layer and its loss in chunks of rows, for every backend, on the backend's cross-entropy kernels.

A chunk's logits are computed, overwritten by their gradient, multiplied into dx and dweight, and discarded.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops._operation import Grads, Wanted, differentiated, without_autocast
from transformer_kernels.ops._plan import Plan
from transformer_kernels.ops.linear import OPERATION as LINEAR
from transformer_kernels.ops.linear import LinearCall, LinearResult
from transformer_kernels.ops.loss._calls import (
    CrossEntropyCall,
    CrossEntropyResult,
    LinearCrossEntropyCall,
    LinearCrossEntropyResult,
    second_order,
)

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Maximum bytes of a chunk's logits. CPU: about a last-level cache. GPU: small next to a model's other tensors, with
enough rows for products at full rate and a negligible cost of accumulating dweight."""

FEWEST_ROWS = 512
"""Minimum rows per chunk: each chunk reads the weight twice and accumulates dweight once."""


ROW_ALIGNMENT = 16
"""Bytes: padded rows permit vector access with an odd vocabulary size."""


def rows_at_once(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows per chunk."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    return max(CHUNK_BYTES[kind] // (classes * dtype.itemsize), FEWEST_ROWS)


def is_one(call: LinearCrossEntropyCall) -> bool:
    """Whether all rows fit into one chunk."""
    return call.targets.numel() <= rows_at_once(call.weight.shape[0], call.dtype, call.x.device)


class ChunkedCrossEntropy:
    """`linear_cross_entropy` in chunks, on a backend's cross-entropy kernels.

    For calls of one layout, `plans` are those of the linear layer and of its loss if one chunk has all rows; () until
    the first call, None where they are not reused.
    """

    def __init__(self, kernels: ModuleType, plans: tuple[Plan, ...] | None = None) -> None:
        self.kernels, self.plans = kernels, plans

    def bound(self, call: LinearCrossEntropyCall) -> ChunkedCrossEntropy | OneChunk:
        """The implementation for calls of one layout: one chunk where all rows fit, else chunks."""
        if getattr(self.kernels, "machine", None) is not cpu or not is_one(call):
            return ChunkedCrossEntropy(self.kernels, ())
        given, linear = (call.x, call.weight, call.bias), dispatch.family(LINEAR.folder, "cpu")
        layer = LINEAR.prepare(*given)
        if not linear.fuses(layer) or any(a is not b for a, b in zip(layer, given, strict=False)):
            return ChunkedCrossEntropy(self.kernels, ())
        one = OneChunk(linear.bound(layer), self.kernels, call)
        return one if one.loss.makes_ahead else ChunkedCrossEntropy(self.kernels, ())

    def forward(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
        """The loss, and the required gradients, each in the dtype of its tensor.

        Autocast is disabled: the products' dtypes are chosen here. Sums over chunks are in float32.
        """
        with without_autocast(call.x):
            return self._forward(call)

    def _forward(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
        targets, classes = call.targets, call.targets.view(-1)
        head = _Head(self.kernels, call, [False] * 3 if call.reduction == "none" else call.wanted)
        losses = head.all_losses(classes)
        if call.reduction == "none":
            return LinearCrossEntropyResult(losses.view(targets.shape), None, None, None, None)
        weights = head.options.weights
        loss, count = self.kernels.reduced(losses, classes, call.ignore_index, call.reduction, weights)
        return LinearCrossEntropyResult(loss, count, *head.gradients(call))

    def backward(
        self, call: LinearCrossEntropyCall, result: LinearCrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the sum of losses times the incoming scalar, divided by the denominator of a mean.

        For reduction "none" they are computed here, each row times its incoming gradient.
        """
        (dloss,), (_, counted, *sums) = grads, result
        if call.reduction == "none":
            with without_autocast(dloss):
                head = _Head(self.kernels, call, list(wanted))
                scale = dloss.masked_fill(call.targets == call.ignore_index, 0.0)
                head.all_losses(call.targets.view(-1), scale.reshape(-1, 1))
                return head.gradients(call)
        in_mean = counted if call.reduction == "mean" else None
        scale = dloss if in_mean is None else dloss / in_mean.masked_fill(in_mean == 0.0, 1.0)
        scale = scale.view(1)  # a 0-d tensor would be multiplied in the gradient's dtype
        return tuple(grad if grad is None else torch.mul(grad, scale, out=torch.empty_like(grad)) for grad in sums)


class OneChunk:
    """Calls of one layout whose rows fit into one chunk: a linear layer and its loss by compiled kernels of a CPU."""

    computes = True

    def __init__(self, layer: Any, kernels: Any, call: LinearCrossEntropyCall) -> None:
        self.layer = layer
        self.loss = kernels.bound(loss_of(call, call.x.new_empty(*call.x.shape[:-1], len(call.weight))))

    def _logits(self, call: LinearCrossEntropyCall) -> CrossEntropyCall:
        return loss_of(call, self.layer.forward(LinearCall(call.x, call.weight, call.bias, None)).y)

    def forward_alone(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
        """The loss."""
        return LinearCrossEntropyResult(self.loss.forward_alone(self._logits(call)).loss, None, None, None, None)

    def forward_with_gradient(self, call: LinearCrossEntropyCall) -> tuple[LinearCrossEntropyResult, Tensor]:
        """The loss and its gradient with respect to the logits."""
        (loss, _, counted), dlogits = self.loss.forward_with_gradient(self._logits(call))
        return LinearCrossEntropyResult(loss, counted, None, None, None), dlogits

    def scale_gradient(self, dlogits: Tensor, dloss: Tensor) -> None:
        """Multiply the gradient from `forward_with_gradient`, in place, by the gradient of the loss."""
        self.loss.scale_gradient(dlogits, dloss)

    def below(self, call: LinearCrossEntropyCall, dlogits: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """dx, dweight and dbias."""
        layer, result = LinearCall(call.x, call.weight, call.bias, None), LinearResult(dlogits, None)
        gradients: tuple[Tensor | None, ...] = self.layer.backward(layer, result, (dlogits,), wanted)
        return gradients

    def backward(
        self, call: LinearCrossEntropyCall, result: LinearCrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dx, dweight and dbias of a second backward pass, which recomputes the logits."""
        _, dlogits = self.forward_with_gradient(call)
        self.scale_gradient(dlogits, *grads)
        return self.below(call, dlogits, wanted)

    @staticmethod
    def second_order(
        call: LinearCrossEntropyCall, result: LinearCrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """The gradients, computed in PyTorch: differentiable once more."""
        with torch.enable_grad():
            inner = loss_of(call, torch.nn.functional.linear(call.x, call.weight, call.bias))
        (dlogits,) = second_order(inner, CrossEntropyResult(result.loss, None, result.counted), grads, (True,))
        assert dlogits is not None
        return differentiated(inner.logits, (call.x, call.weight, call.bias), dlogits, wanted)


def loss_of(call: LinearCrossEntropyCall, logits: Tensor) -> CrossEntropyCall:
    """The call of `cross_entropy` with these logits."""
    return CrossEntropyCall(
        logits, call.targets, call.ignore_index, call.label_smoothing, call.reduction, call.class_weight, call.z_loss,
        call.softcap,
    )  # fmt: skip


class _Head:
    """The linear layer, and its gradients accumulated over chunks."""

    def __init__(self, kernels: ModuleType, call: LinearCrossEntropyCall, wanted: list[bool]) -> None:
        self.kernels, self.weight = kernels, call.weight.to(call.dtype)
        self.x = call.x.reshape(-1, call.x.shape[-1])
        self.bias = None if call.bias is None else call.bias.to(call.dtype)
        self.options = call.row_loss()
        self.wanted = wanted
        self.dx = torch.empty_like(self.x) if wanted[0] else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def all_losses(self, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """The losses of all rows (M,), chunk by chunk; gradients, times `scale` (M, 1) if given, are accumulated."""
        count = self.x.shape[0]
        step = rows_at_once(self.weight.shape[0], self.weight.dtype, self.x.device)
        buffer = self.logits_buffer(min(step, count))
        chunks = [slice(start, start + step) for start in range(0, max(1, count), step)]
        return torch.cat([self.losses(rows, targets, buffer, scale) for rows in chunks])

    def gradients(self, call: LinearCrossEntropyCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx, dweight and dbias, each in the shape and dtype of its tensor, None where not required."""
        dx = None if self.dx is None else self.dx.view(call.x.shape)
        dweight = None if self.dweight is None else self.dweight.to(call.weight.dtype)
        dbias = None if self.dbias is None or call.bias is None else self.dbias.to(call.bias.dtype)
        return dx, dweight, dbias

    def logits_buffer(self, rows: int) -> Tensor:
        """Uninitialised (rows, V), every row at a multiple of ROW_ALIGNMENT."""
        classes, step = self.weight.shape[0], ROW_ALIGNMENT // self.weight.dtype.itemsize
        return self.weight.new_empty((rows, -(-classes // step) * step))[:, :classes]

    def losses(self, rows: slice, targets: Tensor, buffer: Tensor, scale: Tensor | None) -> Tensor:
        """The losses of a chunk of rows (R,); its gradients, times `scale`, are accumulated."""
        x, targets = self.x[rows].to(self.weight.dtype), targets[rows]  # (R, E), (R,)
        logits = self._logits(x, buffer[: x.shape[0]])
        if not any(self.wanted):
            return self.kernels.row_losses(logits, targets, self.options)
        losses, dlogits = self.kernels.row_losses_and_gradient(logits, targets, self.options)
        if scale is not None:
            dlogits.mul_(scale[rows])
        if self.dx is not None:
            _product(dlogits, self.weight, self.dx[rows])  # (R, V) (V, E) -> (R, E)
        if self.wanted[1]:
            self.dweight = _plus_product(self.dweight, dlogits.t(), x)  # (V, R) (R, E) -> (V, E)
        if self.wanted[2]:
            dbias = dlogits.sum(dim=0, dtype=_wide(dlogits.dtype))
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)
        return losses

    def _logits(self, x: Tensor, out: Tensor) -> Tensor:
        """x W^T + b, (R, E) -> (R, V)."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(first: Tensor, second: Tensor, out: Tensor) -> None:
    if out.dtype is first.dtype:
        torch.mm(first, second, out=out)
    else:
        out.copy_(first @ second)


def _plus_product(total: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """total + first @ second in float32 or wider; total None is 0."""
    if total is None:
        return (first @ second).to(_wide(first.dtype))
    if total.dtype is first.dtype:
        return total.addmm_(first, second)
    product = first @ second
    return total.add_(product.float() if total.device.type == "cpu" else product)  # adding two dtypes is slow there
