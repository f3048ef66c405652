"""Dropout, addition and LayerNorm in CUDA C++: csrc/ops/add_layer_norm_forward.cuh and add_layer_norm_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import address
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.add_layer_norm import AddLayerNormCall, AddLayerNormResult
from transformer_kernels.ops.layer_norm._cuda import rows_per_block


def forward(call: AddLayerNormCall) -> AddLayerNormResult:
    """normed, summed, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, residual, weight, bias, seed, eps, dropout_p = call
    mean = x.new_empty((x.shape[:-1].numel(),), dtype=torch.float32)
    y, summed, rstd = forward_rows("add_layer_norm", x, residual, weight, bias, seed, eps, dropout_p, mean)
    return AddLayerNormResult(y, summed, mean, rstd)


def backward(
    call: AddLayerNormCall, result: AddLayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx (dresidual itself without dropout), dresidual, dweight, dbias."""
    (dy, dsummed), (_, summed, mean, rstd) = grads, result
    given = dy, dsummed, summed, call.weight, call.bias, mean, rstd, call.seed, call.dropout_p
    return backward_rows("add_layer_norm", *given)


def forward_rows(
    kernel: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, summed and rstd by the kernel "add_layer_norm" or, without bias and mean, "add_rms_norm"."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    y, summed, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty((rows,), dtype=torch.float32)
    getattr(load(), f"{kernel}_forward")(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        address(bias),
        address(seed),
        y.data_ptr(),
        summed.data_ptr(),
        address(mean),
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
    return y, summed, rstd


def backward_rows(
    kernel: str,
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx, dresidual, dweight and, where there is a bias, dbias; without dropout dx is dresidual."""
    columns = summed.shape[-1]
    rows = summed.numel() // columns
    device, stream = stream_of(summed)
    partials = partial_rows(device, rows, rows_per_block(columns))
    workspace = summed.new_empty((1 if mean is None else 2, partials, columns), dtype=torch.float32)
    dresidual, dweight = torch.empty_like(summed), torch.empty_like(weight)
    dx = None if seed is None else torch.empty_like(summed)
    dbias = None if bias is None else torch.empty_like(weight)
    getattr(load(), f"{kernel}_backward")(
        dy.data_ptr(),
        address(dsummed),
        summed.data_ptr(),
        weight.data_ptr(),
        address(mean),
        rstd.data_ptr(),
        address(seed),
        address(dx),
        dresidual.data_ptr(),
        dweight.data_ptr(),
        address(dbias),
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
