"""Softmax in C++: csrc/cpu/rows/softmax.cpp and csrc/ops/softmax.cu, which take csrc/calls/softmax.h."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, address
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.softmax import SoftmaxCall


class Kernels:
    """Forward and backward by the compiled kernels of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def forward(self, call: SoftmaxCall) -> Tensor:
        """softmax(scale * x) over the last axis; x contiguous."""
        x, mask, machine = call.x, call.mask, self._machine
        columns = x.shape[-1]
        y = torch.empty_like(x)
        device, stream = machine.stream_of(x)
        machine.load().softmax_forward(
            dtype=machine.DTYPE_CODES[x.dtype],
            x=x.data_ptr(),
            y=y.data_ptr(),
            mask=address(mask),
            mask_sizes=(1, 1, 1) if mask is None else mask.shape[:3],
            mask_strides=(0, 0, 0, 0) if mask is None else mask.stride(),
            causal_rows=x.shape[-2] if call.causal else 0,
            rows=x.numel() // columns,
            columns=columns,
            scale=call.scale,
            device=device,
            stream=stream,
        )
        return y

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """scale * y * (dy - sum(dy * y))."""
        (dy,), machine = grads, self._machine
        columns = y.shape[-1]
        dx = torch.empty_like(y)
        device, stream = machine.stream_of(y)
        machine.load().softmax_backward(
            dtype=machine.DTYPE_CODES[y.dtype],
            dy=dy.data_ptr(),
            y=y.data_ptr(),
            dx=dx.data_ptr(),
            rows=y.numel() // columns,
            columns=columns,
            scale=call.scale,
            device=device,
            stream=stream,
        )
        return (dx,)
