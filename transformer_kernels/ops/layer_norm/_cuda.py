"""LayerNorm in CUDA C++: csrc/ops/layer_norm_forward.cuh and layer_norm_backward.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import address
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partial_rows, stream_of
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult

WIDEST_ROW_PER_WARP = 1024  # csrc/ops/row.cuh: up to here a block holds four rows, above it one


def rows_per_block(columns: int) -> int:
    return 4 if columns <= WIDEST_ROW_PER_WARP else 1


def forward(call: LayerNormCall) -> LayerNormResult:
    """y, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, weight, bias, eps = call
    mean = x.new_empty((x.shape[:-1].numel(),), dtype=torch.float32)
    y, rstd = forward_rows("layer_norm", x, weight, bias, eps, mean)
    return LayerNormResult(y, mean, rstd)


def backward(
    call: LayerNormCall, result: LayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias; the two sums over rows go through float32 partial sums in a fixed order."""
    x, weight, bias, _ = call
    return backward_rows("layer_norm", grads[0], x, weight, bias, result.mean, result.rstd)


def forward_rows(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, mean: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y and rstd by the kernel "layer_norm", which fills `mean` too, or, without bias and mean, "rms_norm"."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    y, rstd = torch.empty_like(x), x.new_empty((rows,), dtype=torch.float32)
    getattr(load(), f"{kernel}_forward")(
        x.data_ptr(),
        weight.data_ptr(),
        address(bias),
        y.data_ptr(),
        address(mean),
        rstd.data_ptr(),
        rows,
        columns,
        eps,
        weight.dtype is torch.float32,
        bias is not None and bias.dtype is torch.float32,
        DTYPE_CODES[x.dtype],
        *stream_of(x),
    )
    return y, rstd


def backward_rows(
    kernel: str, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight and, where there is a bias, dbias by the kernel "layer_norm" or, without mean, "rms_norm"."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    device, stream = stream_of(x)
    partials = partial_rows(device, rows, rows_per_block(columns))
    workspace = x.new_empty((1 if mean is None else 2, partials, columns), dtype=torch.float32)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(weight)
    getattr(load(), f"{kernel}_backward")(
        dy.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        address(mean),
        rstd.data_ptr(),
        dx.data_ptr(),
        dweight.data_ptr(),
        address(dbias),
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
