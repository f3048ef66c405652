"""Softmax in C++ for the CPU: csrc/cpu/rows/softmax.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends.cpu import DTYPE_CODES, load
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.softmax import SoftmaxCall

NO_MASK = (0, 1, 1, 1, 0, 0, 0, 0)  # address, sizes, strides


def forward(call: SoftmaxCall) -> Tensor:
    """softmax(scale * x) over the last axis; x contiguous."""
    x, mask, causal, scale = call
    columns = x.shape[-1]
    y = torch.empty_like(x)
    seen = NO_MASK if mask is None else (mask.data_ptr(), *mask.shape[:3], *mask.stride())
    load().softmax_forward(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        y.data_ptr(),
        *seen,
        x.shape[-2] if causal else 0,
        x.numel() // columns,
        columns,
        scale,
    )
    return y


def backward(call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    """scale * y * (dy - sum(dy * y))."""
    (dy,) = grads
    columns = y.shape[-1]
    dx = torch.empty_like(y)
    load().softmax_backward(
        DTYPE_CODES[y.dtype],
        dy.data_ptr(),
        y.data_ptr(),
        dx.data_ptr(),
        y.numel() // columns,
        columns,
        call.scale,
    )
    return (dx,)
