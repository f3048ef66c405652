"""Softmax in csrc: cpu/rows/softmax.cpp and cuda/launchers/softmax.cu, which take calls/softmax.h."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from transformer_kernels.backends import memory_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.softmax import SoftmaxCall


class Kernels(Compiled):
    """Softmax by the compiled kernels of one machine."""

    def __init__(self, call: SoftmaxCall) -> None:
        super().__init__(call)
        x, mask = call.x, call.mask
        self._like_x = memory_of(x)
        self._mask = ((1, 1, 1), (0, 0, 0, 0)) if mask is None else (mask.shape[:3], mask.stride())
        self._columns, self._scale = x.shape[-1], call.scale
        self._rows, self._causal_rows = x.numel() // self._columns, x.shape[-2] if call.causal else 0

    @cached_property
    def _forward(self) -> Any:
        return self._bind(
            "softmax_forward",
            mask_sizes=self._mask[0],
            mask_strides=self._mask[1],
            causal_rows=self._causal_rows,
            rows=self._rows,
            columns=self._columns,
            scale=self._scale,
        )

    def forward(self, call: SoftmaxCall) -> Tensor:
        """softmax(scale * x) over the last axis; x contiguous."""
        y = self._machine.allocator(self._device)(*self._like_x)
        self._forward(call.x, y, call.mask)
        return y

    @cached_property
    def _backward(self) -> Any:
        return self._bind("softmax_backward", rows=self._rows, columns=self._columns, scale=self._scale)

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """scale * y * (dy - sum(dy * y))."""
        dx = self._machine.allocator(self._device)(*self._like_x)
        self._backward(grads[0], y, dx)
        return (dx,)
