"""Bias and GELU in CUDA C++: csrc/ops/bias_activation_forward.cuh and bias_activation_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.bias_gelu import BiasGeluCall

ROWS_PER_BLOCK = 8  # csrc/ops/bias_activation_forward.cuh: the rows of one tile


def forward(call: BiasGeluCall) -> Tensor:
    """gelu(x + bias), the sum in float32."""
    x, bias, approximate = call
    columns = x.shape[-1]
    y = torch.empty_like(x)
    load().bias_gelu_forward(
        x.data_ptr(),
        bias.data_ptr(),
        y.data_ptr(),
        x.numel() // columns,
        columns,
        approximate == "tanh",
        bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return y


def backward(call: BiasGeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx, and dbias through float32 partial sums in a fixed order."""
    (dy,), (x, bias, approximate) = grads, call
    columns = x.shape[-1]
    rows = x.numel() // columns
    device, stream = stream_of(x)
    partials = partial_rows(device, rows, ROWS_PER_BLOCK)
    workspace = x.new_empty((partials, columns), dtype=torch.float32)
    dx, dbias = torch.empty_like(x), torch.empty_like(bias)
    load().bias_gelu_backward(
        dy.data_ptr(),
        x.data_ptr(),
        bias.data_ptr(),
        dx.data_ptr(),
        dbias.data_ptr(),
        workspace.data_ptr(),
        partials,
        rows,
        columns,
        approximate == "tanh",
        bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        device,
        stream,
    )
    return dx, dbias
