"""Cross-entropy in csrc: cpu/rows/cross_entropy.cpp and cuda/launchers/cross_entropy.cu, which take calls/loss.h."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, contiguous_memory, cpu, memory_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.loss._calls import (
    CrossEntropyCall,
    CrossEntropyResult,
    LossKernels,
    RowLoss,
    summed,
)


class Kernels(LossKernels, Compiled):
    """Cross-entropy by the compiled kernels of one machine."""

    def __init__(self, call: CrossEntropyCall) -> None:
        super().__init__(call)
        machine, logits, self._reduction = self.machine, call.logits, call.reduction
        self._on_cpu, self._rows = machine is cpu, call.targets.numel()
        self._classes, self._like_logits = logits.shape[-1], memory_of(logits)
        shapes = tuple(call.targets.shape), (), (2, self._rows)
        memory = (contiguous_memory(shape) for shape in shapes)
        self._like_losses, self._scalar, self._statistics = memory
        options = call.row_loss()
        self._options = options._replace(weights=None)  # computed in each call
        # The gradient is computed before the incoming gradient is known; in float16 it may overflow or underflow
        # without that factor. A GPU would have to wait for the number of rows that are not ignored.
        ahead = call.reduction != "none" and logits.dtype is not torch.float16 and options.is_plain()
        self.makes_ahead = self._on_cpu and ahead
        self._losses = _losses(machine, logits, self._rows, self._classes, options)
        self._sum = _sum(machine, self._device, self._rows, call.ignore_index)

    def forward(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """The loss, (maximum, 1 / sum of exponentials) of each row as (2, M), and the divisor of a mean."""
        return self._forward(call, self._machine.allocator(self._device)(*self._statistics))

    def forward_alone(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """`forward` without what backward needs of each row; kernels of a GPU write it nevertheless."""
        return self._forward(call, None) if self._on_cpu else self.forward(call)

    def _forward(self, call: CrossEntropyCall, statistics: Tensor | None) -> CrossEntropyResult:
        weights, losses = self._weights(call), self._machine.allocator(self._device)(*self._like_losses)
        self._losses(call.logits, call.targets, losses, statistics, None, None, weights)
        if call.reduction == "none":
            return CrossEntropyResult(losses, statistics, None)
        kept = statistics is not None
        loss, count = summed(self._sum, losses, call.targets, call.ignore_index, call.reduction, weights, kept)
        return CrossEntropyResult(loss, statistics, count)

    def _weights(self, call: CrossEntropyCall) -> Tensor | None:
        return None if call.weight is None else call.row_loss().weights

    def forward_with_gradient(self, call: CrossEntropyCall) -> tuple[CrossEntropyResult, Tensor] | None:
        """`forward` and the gradient of the loss, computed while a row is cached; None where backward computes it."""
        if not self.makes_ahead:
            return None
        logits, targets = call.logits, call.targets
        empty = self._machine.allocator(self._device)
        losses, statistics = empty(*self._like_losses), empty(*self._statistics)
        dlogits, loss = empty(*self._like_logits), empty(*self._scalar)
        count = empty(*self._scalar) if call.reduction == "mean" else None
        self._losses(logits, targets, losses, statistics, dlogits, count, None)
        self._sum(losses, targets, loss, count)
        return CrossEntropyResult(loss, statistics, count), dlogits

    def scale_gradient(self, dlogits: Tensor, dloss: Tensor) -> None:
        """Multiply the gradient from `forward_with_gradient`, in place, by the gradient of the loss."""
        self._machine.load().cross_entropy_scale(self._dtype, dloss.data_ptr(), dlogits.data_ptr(), dlogits.numel())

    @cached_property
    def _backward(self) -> Any:
        options = self._options
        return self._bind(
            "cross_entropy_backward",
            dloss_of_each_row=self._reduction == "none",
            scaled_afterwards=self.makes_ahead,
            rows=self._rows,
            classes=self._classes,
            ignore_index=options.ignore_index,
            smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            softcap=options.softcap or 0.0,
        )

    def backward(
        self, call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor]:
        """dloss * (softmax - the smoothed target), divided by the divisor of a mean."""
        _, statistics, count = result
        assert statistics is not None
        dlogits = self._machine.allocator(self._device)(*self._like_logits)
        count = count if call.reduction == "mean" else None
        self._backward(grads[0], count, call.logits, call.targets, statistics, dlogits, self._weights(call))
        return (dlogits,)

    @classmethod
    def unsupported(cls, call: CrossEntropyCall) -> str | None:
        """Why the kernels do not take the call; None if they do."""
        return call.beyond_classes()

    @classmethod
    def row_losses(cls, logits: Tensor, targets: Tensor, options: RowLoss, *, in_place: bool = False) -> Tensor:
        losses = torch.empty_like(targets, dtype=torch.float32)
        statistics = None if in_place else logits.new_empty(2, targets.numel(), dtype=torch.float32)
        kernel = _losses(cls.machine, logits, targets.numel(), logits.stride(0), options)
        kernel(logits, targets, losses, statistics, logits if in_place else None, None, options.weights)
        return losses

    @classmethod
    def summing(cls, losses: Tensor, ignore_index: int, reduction: str) -> Any:
        """Bound to (losses, targets, loss, count)."""
        return _sum(cls.machine, losses.device, losses.numel(), ignore_index)


def _losses(machine: Machine, logits: Tensor, rows: int, stride: int, options: RowLoss) -> Any:
    """Bound to (logits, targets, losses, statistics, dlogits, count, weights): `dlogits`, where they are given, are the
    gradient of the sum of losses, or with `count` of their mean."""
    return machine.bind(
        "cross_entropy_forward",
        logits.device,
        dtype=machine.DTYPE_CODES[logits.dtype],
        rows=rows,
        classes=logits.shape[-1],
        stride=stride,
        ignore_index=options.ignore_index,
        smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        softcap=options.softcap or 0.0,
    )


def _sum(machine: Machine, device: torch.device, rows: int, ignore_index: int) -> Any:
    """Bound to (losses, targets, loss, count)."""
    return machine.bind("cross_entropy_sum", device, rows=rows, ignore_index=ignore_index)
