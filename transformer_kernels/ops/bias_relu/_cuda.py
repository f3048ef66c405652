"""Bias and ReLU in CUDA C++: csrc/ops/bias_activation_forward.cuh and bias_activation_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.bias_gelu._cuda import ROWS_PER_BLOCK
from transformer_kernels.ops.bias_relu import BiasReluCall


def forward(call: BiasReluCall) -> Tensor:
    """relu(x + bias), the sum in float32."""
    x, bias = call
    columns = x.shape[-1]
    y = torch.empty_like(x)
    load().bias_relu_forward(
        x.data_ptr(),
        bias.data_ptr(),
        y.data_ptr(),
        x.numel() // columns,
        columns,
        bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return y


def backward(call: BiasReluCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx, and dbias through float32 partial sums in a fixed order."""
    (dy,), dbias_dtype = grads, call.bias.dtype
    columns = y.shape[-1]
    rows = y.numel() // columns
    device, stream = stream_of(y)
    partials = partial_rows(device, rows, ROWS_PER_BLOCK)
    workspace = y.new_empty((partials, columns), dtype=torch.float32)
    dx, dbias = torch.empty_like(y), y.new_empty((columns,), dtype=dbias_dtype)
    load().bias_relu_backward(
        dy.data_ptr(),
        y.data_ptr(),
        dx.data_ptr(),
        dbias.data_ptr(),
        workspace.data_ptr(),
        partials,
        rows,
        columns,
        dbias_dtype is torch.float32,
        DTYPE_CODES[y.dtype],
        device,
        stream,
    )
    return dx, dbias
