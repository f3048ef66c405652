"""LayerNorm in C++ for the CPU: csrc/cpu/rows/layer_norm.cpp, which also adds and drops."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import address
from transformer_kernels.backends.cpu import DTYPE_CODES, load, narrowed, widened
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult


def forward(call: LayerNormCall) -> LayerNormResult:
    """y, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, weight, bias, eps = call
    y, _, mean, rstd = normalised(x, None, weight, bias, None, eps, 0.0)
    assert mean is not None
    return LayerNormResult(y, mean, rstd)


def backward(
    call: LayerNormCall, result: LayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight, dbias; the sums over rows are float32 and in an order that depends on the shape alone."""
    (dy,), (x, weight, bias, _), (_, mean, rstd) = grads, call, result
    _, dx, dweight, dbias = gradients(dy, None, x, weight, bias, mean, rstd, None, 0.0, wanted)
    return dx, dweight, dbias


def normalised(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    p: float,
    centre: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """LayerNorm of s, s, and its rows' mean and rstd; s is dropout(x) + residual, or x without residual.

    Without `centre` it is RMSNorm, and the mean is None.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    y, summed = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    mean = x.new_empty(rows, dtype=torch.float32) if centre else None
    rstd = x.new_empty(rows, dtype=torch.float32)
    wide_weight, wide_bias = widened(weight), widened(bias)
    load().layer_norm_forward(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        address(residual),
        address(wide_weight),
        address(wide_bias),
        address(seed),
        p,
        address(summed),
        y.data_ptr(),
        address(mean),
        rstd.data_ptr(),
        rows,
        columns,
        eps,
    )
    return y, summed, mean, rstd


def gradients(
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    seed: Tensor | None,
    p: float,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """dx (None without dropout), the gradient of s, dweight and dbias, the last two where `wanted` ends so.

    Without a mean they are RMSNorm's, and `wanted` ends with dweight.
    """
    columns = summed.shape[-1]
    dx, dresidual = None if seed is None else torch.empty_like(summed), torch.empty_like(summed)
    wanted = wanted[-2:] if mean is not None else (wanted[-1], False)
    # A view would cost more than a second tensor.
    dweight, dbias = (summed.new_empty(columns, dtype=torch.float32) if wanted[i] else None for i in range(2))
    wide_weight = widened(weight)
    load().layer_norm_backward(
        DTYPE_CODES[summed.dtype],
        dy.data_ptr(),
        address(dsummed),
        summed.data_ptr(),
        address(wide_weight),
        address(mean),
        rstd.data_ptr(),
        address(seed),
        p,
        address(dx),
        dresidual.data_ptr(),
        address(dweight),
        address(dbias),
        summed.numel() // columns,
        columns,
    )
    return dx, dresidual, narrowed(dweight, weight), narrowed(dbias, bias)
