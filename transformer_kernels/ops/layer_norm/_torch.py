"""LayerNorm through PyTorch's native kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult

aten = torch.ops.aten

_ONE_DTYPE = (torch.float32,)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in dtypes whose native kernel keeps float32 statistics.

    On the CPU that is a low-precision x with float32 parameters; on a CUDA device, where the kernel takes one dtype
    only and always keeps float32 statistics, a mixture is computed in float32.
    """
    wide = _statistics_dtype(x)
    if x.device.type == "cpu":
        return x, weight.to(wide), None if bias is None else bias.to(wide)
    if weight.dtype is not x.dtype or (bias is not None and bias.dtype is not x.dtype):
        return x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    return x, weight, bias


def forward(call: LayerNormCall) -> LayerNormResult:
    """y, and per row the mean and 1 / sqrt(var + eps), with a last axis of size 1."""
    x, weight, bias, eps = call
    if x.dtype in _ONE_DTYPE:  # then every operand has it: the common call pays for no conversion
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        return LayerNormResult(y, mean.view(-1), rstd.view(-1))
    operand, scale, shift = _operands(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(operand, weight.shape, scale, shift, eps)
    return LayerNormResult(y.to(x.dtype), mean.view(-1), rstd.view(-1))


def backward(
    call: LayerNormCall, result: LayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias."""
    (dy,), (x, weight, bias, _), (_, mean, rstd) = grads, call, result
    has_bias = bias is not None
    if x.dtype in _ONE_DTYPE:
        dx, dweight, dbias = _native_backward(dy, x, weight, mean, rstd, has_bias, True)
        return dx, dweight, dbias if has_bias else None
    if x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu":
        return _backward_low_precision(dy, x, weight, mean, rstd, has_bias)
    operand, scale, _ = _operands(x, weight, None)
    dx, dweight, dbias = _native_backward(dy.to(operand.dtype), operand, scale, mean, rstd, has_bias, True)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype) if has_bias else None


def _native_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, has_bias: bool, parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = (*x.shape[:-1], 1)
    mean, rstd = mean.view(statistics), rstd.view(statistics)
    bias = weight if has_bias else None
    wanted = [True, parameters, parameters and has_bias]
    return aten.native_layer_norm_backward.default(dy, x, x.shape[-1:], mean, rstd, weight, bias, wanted)


def _backward_low_precision(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx from the native kernel; the parameters' gradients summed in float32, where its own sums are in x's dtype."""
    dx, _, _ = _native_backward(dy, x, weight.to(mean.dtype), mean, rstd, has_bias, False)
    rows = (-1, x.shape[-1])
    normed = torch.sub(x.reshape(rows), mean.view(-1, 1)).mul_(rstd.view(-1, 1))
    dweight = normed.mul_(dy.reshape(rows)).sum(dim=0)
    dbias = dy.reshape(rows).sum(dim=0, dtype=mean.dtype).to(weight.dtype) if has_bias else None
    return dx, dweight.to(weight.dtype), dbias
