"""Softmax in CUDA C++: csrc/ops/softmax_forward.cuh and softmax_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of

NO_MASK = (0, 1, 1, 1, 0, 0, 0, 0)  # address, sizes, strides


def unsupported(x: Tensor, mask: Tensor | None, causal: bool, scale: float) -> str | None:
    return None


def forward(x: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(scale * x) over the last axis; x contiguous."""
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


def backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """scale * y * (dy - sum(dy * y))."""
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
    return dx
