"""GELU in CUDA C++: csrc/ops/gelu_forward.cuh and gelu_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops.gelu import GeluCall


def forward(call: GeluCall) -> Tensor:
    x = call.x
    y = torch.empty_like(x)
    load().gelu_forward(
        x.data_ptr(), y.data_ptr(), x.numel(), call.approximate == "tanh", DTYPE_CODES[x.dtype], *stream_of(x)
    )
    return y


def backward(call: GeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    x, (dy,) = call.x, grads
    dx = torch.empty_like(x)
    load().gelu_backward(
        dy.data_ptr(),
        x.data_ptr(),
        dx.data_ptr(),
        x.numel(),
        call.approximate == "tanh",
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return (dx,)
