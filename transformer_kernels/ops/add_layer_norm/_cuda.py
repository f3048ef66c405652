"""Dropout, addition and LayerNorm in CUDA C++: csrc/ops/add_layer_norm_forward.cuh and add_layer_norm_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.add_layer_norm import AddLayerNormCall, AddLayerNormResult
from transformer_kernels.ops.layer_norm._cuda import rows_per_block


def forward(call: AddLayerNormCall) -> AddLayerNormResult:
    """normed, summed, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, residual, weight, bias, seed, eps, dropout_p = call
    columns = x.shape[-1]
    rows = x.numel() // columns
    y, summed = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = x.new_empty((2, rows), dtype=torch.float32).unbind()
    load().add_layer_norm_forward(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if seed is None else seed.data_ptr(),
        y.data_ptr(),
        summed.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        rows,
        columns,
        eps,
        dropout_p,
        weight.dtype is torch.float32,
        bias is not None and bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return AddLayerNormResult(y, summed, mean, rstd)


def backward(
    call: AddLayerNormCall, result: AddLayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx (None where it equals dresidual), dresidual, dweight, dbias."""
    (dy, dsummed), (_, _, weight, bias, seed, _, dropout_p), (_, summed, mean, rstd) = grads, call, result
    has_bias = bias is not None
    columns = summed.shape[-1]
    rows = summed.numel() // columns
    device, stream = stream_of(summed)
    partials = partial_rows(device, rows, rows_per_block(columns))
    workspace = summed.new_empty((2, partials, columns), dtype=torch.float32)
    dresidual, dweight = torch.empty_like(summed), torch.empty_like(weight)
    dx = None if seed is None else torch.empty_like(summed)
    dbias = torch.empty_like(weight) if has_bias else None
    load().add_layer_norm_backward(
        dy.data_ptr(),
        0 if dsummed is None else dsummed.data_ptr(),
        summed.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        0 if seed is None else seed.data_ptr(),
        0 if dx is None else dx.data_ptr(),
        dresidual.data_ptr(),
        dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        workspace.data_ptr(),
        partials,
        rows,
        columns,
        dropout_p,
        weight.dtype is torch.float32,
        DTYPE_CODES[summed.dtype],
        device,
        stream,
    )
    return dresidual if dx is None else dx, dresidual, dweight, dbias
