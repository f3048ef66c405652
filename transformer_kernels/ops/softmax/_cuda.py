"""Softmax in CUDA C++: csrc/ops/softmax_forward.cuh and softmax_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
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
        x.data_ptr(),
        y.data_ptr(),
        *seen,
        x.shape[-2] if causal else 0,
        x.numel() // columns,
        columns,
        scale,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return y


def backward(call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    """scale * y * (dy - sum(dy * y))."""
    (dy,), scale = grads, call.scale
    columns = y.shape[-1]
    dx = torch.empty_like(y)
    load().softmax_backward(
        dy.data_ptr(),
        y.data_ptr(),
        dx.data_ptr(),
        y.numel() // columns,
        columns,
        scale,
        DTYPE_CODES[y.dtype],
        *stream_of(y),
    )
    return (dx,)
