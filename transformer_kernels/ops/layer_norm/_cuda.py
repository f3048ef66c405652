"""LayerNorm in CUDA C++: csrc/ops/layer_norm_forward.cuh and layer_norm_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult

WIDEST_ROW_PER_WARP = 1024  # csrc/ops/row.cuh: up to here a block holds four rows, above it one


def rows_per_block(columns: int) -> int:
    return 4 if columns <= WIDEST_ROW_PER_WARP else 1


def forward(call: LayerNormCall) -> LayerNormResult:
    """y, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, weight, bias, eps = call
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x)
    mean, rstd = x.new_empty((2, rows), dtype=torch.float32).unbind()
    load().layer_norm_forward(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        rows,
        columns,
        eps,
        weight.dtype is torch.float32,
        bias is not None and bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return LayerNormResult(y, mean, rstd)


def backward(
    call: LayerNormCall, result: LayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias; the two sums over rows go through float32 partial sums in a fixed order."""
    (dy,), (x, weight, bias, _), (_, mean, rstd) = grads, call, result
    has_bias = bias is not None
    columns = x.shape[-1]
    rows = x.numel() // columns
    device, stream = stream_of(x)
    partials = partial_rows(device, rows, rows_per_block(columns))
    workspace = x.new_empty((2, partials, columns), dtype=torch.float32)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = torch.empty_like(weight) if has_bias else None
    load().layer_norm_backward(
        dy.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        dx.data_ptr(),
        dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        workspace.data_ptr(),
        partials,
        rows,
        columns,
        weight.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        device,
        stream,
    )
    return dx, dweight, dbias
