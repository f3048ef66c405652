"""The output layer and its loss in chunks of rows, for every backend, on the backend's cross-entropy kernels.

A chunk's logits are computed, overwritten by their gradient, multiplied into dx and dweight, and discarded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import dispatch
from transformer_kernels.ops._derivatives import Outputs, Parts
from transformer_kernels.ops._kernels import Adapter, Grads, Kernels, Wanted
from transformer_kernels.ops._operation import is_traced, without_autocast
from transformer_kernels.ops._plan import Plan
from transformer_kernels.ops.linear import OPERATION as LINEAR
from transformer_kernels.ops.linear import LinearCall, LinearResult, linear
from transformer_kernels.ops.loss import _calls
from transformer_kernels.ops.loss._calls import (
    CrossEntropyCall,
    LinearCrossEntropyCall,
    LinearCrossEntropyResult,
    LossKernels,
)

ROW_ALIGNMENT = 16
"""Bytes: padded rows permit vector access with an odd vocabulary size."""


def _cross_entropy() -> Any:
    """The operation, which is defined above this file."""
    return dispatch.OPERATIONS["cross_entropy"]


class ChunkedCrossEntropy(Adapter):
    """`linear_cross_entropy` in chunks, on a backend's cross-entropy kernels."""

    @classmethod
    def unsupported(cls, call: LinearCrossEntropyCall) -> None:
        """None: targets are classes, which all kernels of the loss support."""

    @classmethod
    def of(cls, call: LinearCrossEntropyCall) -> Kernels:
        """One chunk where all rows fit: in one pass where compiled kernels of a CPU have both parts."""
        if call.targets is None or not call.is_one_chunk():  # backward of chunks has no targets
            return cls(call)
        given, layers = (call.x, call.weight, call.bias), dispatch.family(LINEAR.folder, cls.backend)
        if cls.backend == "cpu" and call.x.numel() and not is_traced(call.x):
            layer = LINEAR.prepare(*given)
            if layers.fuses(layer) and all(a is b for a, b in zip(layer, given, strict=False)):
                one: Any = OneChunk.on(cls.inner, cls.backend)
                kernels: OneChunk = one(layers.of(layer), call)
                if kernels.loss.makes_ahead:
                    return kernels
        return InOneChunk.on(cls.inner, cls.backend)(call)

    def forward(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
        """The loss, and the required gradients, each in the dtype of its tensor.

        Autocast is disabled: the products' dtypes are chosen here. Sums over chunks are in float32.
        """
        with without_autocast(call.x):
            return self._forward(call)

    def _forward(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
        targets, classes = call.targets, call.targets.view(-1)
        head = _Head(self.inner, call, [False] * 3 if call.reduction == "none" else call.wanted)
        losses = head.all_losses(classes)
        if call.reduction == "none":
            return LinearCrossEntropyResult(losses.view(targets.shape), None, None, None, None)
        weights = head.options.weights
        loss, count = self.inner.reduced(losses, classes, call.ignore_index, call.reduction, weights)
        return LinearCrossEntropyResult(loss, count, *head.gradients(call))

    def forward_tangent(
        self, call: LinearCrossEntropyCall, tangents: Parts
    ) -> tuple[LinearCrossEntropyResult, Outputs] | None:
        """Those of a linear layer and its loss, where all rows fit into one chunk and no gradients are required."""
        if any(call.wanted) or not call.is_one_chunk() or call.dtype is not call.x.dtype:
            return None
        layer = LINEAR.prepare(call.x, call.weight, call.bias)
        moved = LINEAR.kernels(layer, self.backend, of_primals=True).forward_tangent(layer, tangents)
        if moved is None:
            return None
        (logits, _), of_logits = moved
        inner = call.loss_of(logits)
        loss = _cross_entropy().kernels(inner, self.backend, of_primals=True)
        result = loss.forward(inner)
        done = LinearCrossEntropyResult(result.loss, result.counted, None, None, None)
        return done, inner.tangents(loss, result, of_logits)  # type: ignore[misc]

    def backward(
        self, call: LinearCrossEntropyCall, result: LinearCrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the sum of losses times the incoming scalar, divided by the denominator of a mean.

        For reduction "none" they are computed here, each row times its incoming gradient.
        """
        (dloss,), (_, counted, *sums) = grads, result
        if call.reduction == "none":
            with without_autocast(dloss):
                head = _Head(self.inner, call, list(wanted))
                scale = dloss.masked_fill(call.targets == call.ignore_index, 0.0)
                head.all_losses(call.targets.view(-1), scale.reshape(-1, 1))
                return head.gradients(call)
        in_mean = counted if call.reduction == "mean" else None
        scale = dloss if in_mean is None else dloss / in_mean.masked_fill(in_mean == 0.0, 1.0)
        scale = scale.view(1)  # a 0-d tensor would be multiplied in the gradient's dtype
        return tuple(grad if grad is None else torch.mul(grad, scale, out=torch.empty_like(grad)) for grad in sums)


class InOneChunk(ChunkedCrossEntropy):
    """Calls of one layout whose rows fit into one chunk: a linear layer, then its loss."""

    def __init__(self, call: LinearCrossEntropyCall) -> None:
        self._plans: tuple[Plan, ...] | None = ()  # of both; () until the first call, None where they are not reused

    def composed(self, call: LinearCrossEntropyCall, backend: str | None, recorded: bool) -> Tensor:
        """The loss. The layer is this package's also while a step is recorded, so that its bits are the same."""
        x, weight, bias = call.x, call.weight, call.bias
        if self._plans:
            layer, loss = self._plans
            logits = LINEAR.computed(layer, LinearCall(x, weight, bias, None), backend)
            return _cross_entropy().computed(loss, call.loss_of(logits), backend)  # type: ignore[no-any-return]
        inner = call.loss_of(linear(x, weight, bias, backend=backend))
        if self._plans is not None:
            prepared = LINEAR.prepare(x, weight, bias)
            copied = any(a is not b for a, b in zip(prepared, (x, weight, bias), strict=False))
            plans = LINEAR.planned(prepared, backend, 1), _cross_entropy().planned(inner, backend, 1)
            self._plans = None if copied else plans
        return _cross_entropy()(inner, backend)  # type: ignore[no-any-return]


class OneChunk(ChunkedCrossEntropy):
    """Calls of one layout whose rows fit into one chunk: a linear layer and its loss by compiled kernels of a CPU."""

    def __init__(self, layer: Any, call: LinearCrossEntropyCall) -> None:
        self.layer = layer
        self.loss = self.inner.of(call.loss_of(call.x.new_empty(*call.x.shape[:-1], len(call.weight))))

    def _logits(self, call: LinearCrossEntropyCall) -> CrossEntropyCall:
        return call.loss_of(self.layer.forward(LinearCall(call.x, call.weight, call.bias, None)).y)

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
        if any(gradient is not None for gradient in result[2:]):  # of the registered operator
            return super().backward(call, result, grads, wanted)
        _, dlogits = self.forward_with_gradient(call)
        self.scale_gradient(dlogits, *grads)
        return self.below(call, dlogits, wanted)


class _Head:
    """The linear layer, and its gradients accumulated over chunks."""

    def __init__(self, kernels: type[LossKernels], call: LinearCrossEntropyCall, wanted: list[bool]) -> None:
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
        step = _calls.rows_at_once(self.weight.shape[0], self.weight.dtype, self.x.device)
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
        losses = self.kernels.row_losses(logits, targets, self.options, in_place=any(self.wanted))
        if not any(self.wanted):
            return losses
        dlogits = logits
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
