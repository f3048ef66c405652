"""GELU in CUDA C++: csrc/ops/gelu_forward.cuh and gelu_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of


def unsupported(x: Tensor, approximate: str) -> str | None:
    return None


def forward(x: Tensor, approximate: str) -> Tensor:
    y = torch.empty_like(x)
    load().gelu_forward(
        x.data_ptr(), y.data_ptr(), x.numel(), approximate == "tanh", DTYPE_CODES[x.dtype], *stream_of(x)
    )
    return y


def backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx = torch.empty_like(x)
    load().gelu_backward(
        dy.data_ptr(),
        x.data_ptr(),
        dx.data_ptr(),
        x.numel(),
        approximate == "tanh",
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return dx
