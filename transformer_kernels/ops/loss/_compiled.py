"""Cross-entropy in C++: csrc/cpu/rows/cross_entropy.cpp and csrc/ops/cross_entropy.cu, which take csrc/calls/loss.h."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, address, cpu
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.loss._calls import CrossEntropyCall, CrossEntropyResult, RowLoss, weighted_mean

ROWS_OF_ONE_BLOCK = 1 << 16
"""How many losses one block of a GPU adds up; a sum over more is worth PyTorch's several launches."""


class Kernels:
    """Forward and backward by the compiled kernels of one machine, with `options` for calls of one layout."""

    def __init__(self, machine: Machine, options: RowLoss | None = None) -> None:
        self._machine, self._options = machine, options
        self._on_cpu = machine is cpu

    def bound(self, call: CrossEntropyCall) -> Kernels:
        """The kernels for calls of this layout."""
        return Kernels(self._machine, call.row_loss() if call.weight is None else None)

    def unsupported(self, call: CrossEntropyCall) -> str | None:
        """Why the kernels do not take the call; None if they do."""
        return call.beyond_classes()

    def forward(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """The loss, (maximum, 1 / sum of exponentials) of each row as (2, M), and what a mean is over."""
        return self._forward(call, call.logits.new_empty(2, call.targets.numel(), dtype=torch.float32))

    def forward_alone(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """`forward` without what backward needs of each row; kernels of a GPU write it nevertheless."""
        return self._forward(call, None) if self._on_cpu else self.forward(call)

    def _forward(self, call: CrossEntropyCall, statistics: Tensor | None) -> CrossEntropyResult:
        logits, targets, options = call.logits, call.targets, self._options or call.row_loss()
        losses = self._rows(logits, logits.shape[-1], targets, options, statistics)
        if call.reduction == "none":
            return CrossEntropyResult(losses, statistics, None)
        kept = statistics is not None
        loss, count = self.reduced(losses, targets, call.ignore_index, call.reduction, options.weights, kept)
        return CrossEntropyResult(loss, statistics, count)

    def forward_with_gradient(self, call: CrossEntropyCall) -> tuple[CrossEntropyResult, Tensor] | None:
        """`forward` and the gradient of the loss, computed while a row is cached; None where backward computes it."""
        logits, targets, options = call.logits, call.targets, self._options or call.row_loss()
        if not self._made_ahead(call, options):
            return None
        statistics = logits.new_empty(2, targets.numel(), dtype=torch.float32)
        dlogits, loss = torch.empty_like(logits), statistics.new_empty_strided((), ())
        count = torch.empty_like(loss) if call.reduction == "mean" else None
        losses = self._rows(logits, logits.shape[-1], targets, options, statistics, dlogits, count)
        self._sum(losses, targets, loss, count, call.ignore_index)
        return CrossEntropyResult(loss, statistics, count), dlogits

    def scale_gradient(self, dlogits: Tensor, dloss: Tensor) -> None:
        """Multiply the gradient from `forward_with_gradient`, in place, by the gradient of the loss."""
        machine = self._machine
        code, addresses = machine.DTYPE_CODES[dlogits.dtype], (dloss.data_ptr(), dlogits.data_ptr())
        machine.load().cross_entropy_scale(code, *addresses, dlogits.numel())

    def _made_ahead(self, call: CrossEntropyCall, options: RowLoss) -> bool:
        """Whether the gradient is made before that of the loss is known; in float16 it may only be in range with that.

        Only on a CPU: a GPU would have to wait for the number of rows that are not ignored.
        """
        if call.reduction == "none" or call.logits.dtype is torch.float16 or not options.is_plain():
            return False
        return self._on_cpu

    def row_losses(self, logits: Tensor, targets: Tensor, options: RowLoss) -> Tensor:
        """The loss of each row; logits (M, V) with any distance between rows, targets (M,)."""
        statistics = logits.new_empty(2, targets.numel(), dtype=torch.float32)
        return self._rows(logits, logits.stride(0), targets, options, statistics)

    def row_losses_and_gradient(self, logits: Tensor, targets: Tensor, options: RowLoss) -> tuple[Tensor, Tensor]:
        """`row_losses`, and the gradient of their sum, which is written over the logits."""
        return self._rows(logits, logits.stride(0), targets, options, None, logits), logits

    def _rows(
        self,
        logits: Tensor,
        stride: int,
        targets: Tensor,
        options: RowLoss,
        statistics: Tensor | None,
        dlogits: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """The losses, and where `dlogits` are given the gradient of their sum, or with `count` of their mean."""
        machine = self._machine
        losses = torch.empty_like(targets, dtype=torch.float32)
        device, stream = machine.stream_of(logits)
        machine.load().cross_entropy_forward(
            dtype=machine.DTYPE_CODES[logits.dtype],
            logits=logits.data_ptr(),
            targets=targets.data_ptr(),
            losses=losses.data_ptr(),
            statistics=address(statistics),
            dlogits=address(dlogits),
            count=address(count),
            rows=targets.numel(),
            classes=logits.shape[-1],
            stride=stride,
            ignore_index=options.ignore_index,
            smoothing=options.label_smoothing,
            weights=address(options.weights),
            z_loss=options.z_loss,
            softcap=options.softcap or 0.0,
            device=device,
            stream=stream,
        )
        return losses

    def reduced(
        self,
        losses: Tensor,
        targets: Tensor,
        ignore_index: int,
        reduction: str,
        weights: Tensor | None = None,
        kept: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The sum or mean of the losses, and what the mean is over; on a CPU only if that is kept."""
        mean = reduction == "mean"
        if mean and weights is not None:
            return weighted_mean(losses, targets, ignore_index, weights)
        if losses.numel() > ROWS_OF_ONE_BLOCK:
            count = targets.ne(ignore_index).sum().float() if mean else None
            return losses.sum() if count is None else losses.sum() / count, count
        loss = losses.new_empty_strided((), ())
        count = None
        if mean:  # where it is not kept the kernel of a CPU writes it, and then the loss over it
            count = torch.empty_like(loss) if kept else loss
        self._sum(losses, targets, loss, count, ignore_index)
        return loss, count

    def _sum(self, losses: Tensor, targets: Tensor, loss: Tensor, count: Tensor | None, ignore_index: int) -> None:
        device, stream = self._machine.stream_of(losses)
        self._machine.load().cross_entropy_sum(
            losses=losses.data_ptr(),
            targets=targets.data_ptr(),
            loss=loss.data_ptr(),
            count=address(count),
            rows=losses.numel(),
            ignore_index=ignore_index,
            device=device,
            stream=stream,
        )

    def backward(
        self, call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor]:
        """dloss * (softmax - the smoothed target), divided by what a mean is over."""
        (dloss,), logits, options, machine = grads, call.logits, self._options or call.row_loss(), self._machine
        _, statistics, count = result
        assert statistics is not None
        dlogits = torch.empty_like(logits)
        device, stream = machine.stream_of(logits)
        machine.load().cross_entropy_backward(
            dtype=machine.DTYPE_CODES[logits.dtype],
            dloss=dloss.data_ptr(),
            dloss_of_each_row=call.reduction == "none",
            scaled_afterwards=self._made_ahead(call, options),
            count=address(count) if call.reduction == "mean" else 0,
            logits=logits.data_ptr(),
            targets=call.targets.data_ptr(),
            statistics=statistics.data_ptr(),
            dlogits=dlogits.data_ptr(),
            rows=call.targets.numel(),
            classes=logits.shape[-1],
            ignore_index=options.ignore_index,
            smoothing=options.label_smoothing,
            weights=address(options.weights),
            z_loss=options.z_loss,
            softcap=options.softcap or 0.0,
            device=device,
            stream=stream,
        )
        return (dlogits,)
