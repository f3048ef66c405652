"""Norms with PyTorch's kernels: native LayerNorm, and RMSNorm in elementwise kernels, optionally after an addition."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _kernels
from transformer_kernels.ops._dropout import drop, keep_scale
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.norm import Gradients, NormCall, NormResult, rows_of

aten = torch.ops.aten

_ONE_DTYPE = (torch.float32,)


class Kernels(_kernels.Kernels):
    """Norms through PyTorch's kernels."""

    def forward(self, call: NormCall) -> NormResult:
        """y, the sum if any, and the statistics per row."""
        summed = None if call.residual is None else _summed(call, call.residual)
        y, mean, rstd = normalised(
            call.x if summed is None else summed, call.weight, call.bias, call.eps, centred=call.centred
        )
        return NormResult(y, summed, mean, rstd)

    def backward(self, call: NormCall, result: NormResult, grads: Grads, wanted: Wanted) -> Gradients:
        """dx (dresidual itself without dropout), dresidual, dweight, dbias."""
        dy, *others = grads
        x, has_bias = rows_of(call, result), call.bias is not None
        dresidual, dweight, dbias = gradients(dy, x, call.weight, has_bias, result.mean, result.rstd)
        if others and others[0] is not None:
            dresidual = dresidual.add_(others[0])
        if call.seed is None:
            return dresidual, dresidual, dweight, dbias
        dx = drop(_rows(dresidual), call.seed, call.dropout_p, scale=keep_scale(call.dropout_p))
        return dx.view(x.shape), dresidual, dweight, dbias


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, and per row the mean (None for RMSNorm) and rstd."""
    if not centred:
        values = x.to(_statistics_dtype(x))
        rstd = values.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        return (values * rstd).mul_(weight).to(x.dtype), None, rstd.view(-1)
    if x.dtype in _ONE_DTYPE:  # no conversion in the common case
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        return y, mean.view(-1), rstd.view(-1)
    operand, scale, shift = _operands(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(operand, weight.shape, scale, shift, eps)
    return y.to(x.dtype), mean.view(-1), rstd.view(-1)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias; for RMSNorm if the mean is None."""
    if mean is None:
        return *_rms_gradients(dy, x, weight, rstd), None
    if x.dtype in _ONE_DTYPE:
        dx, dweight, dbias = _native_backward(dy, x, weight, mean, rstd, has_bias, True)
        return dx, dweight, dbias if has_bias else None
    if x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu":
        return _backward_low_precision(dy, x, weight, mean, rstd, has_bias)
    operand, scale, _ = _operands(x, weight, None)
    dx, dweight, dbias = _native_backward(dy.to(operand.dtype), operand, scale, mean, rstd, has_bias, True)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype) if has_bias else None


def _summed(call: NormCall, residual: Tensor) -> Tensor:
    """dropout(x) + residual."""
    if call.seed is None:
        return call.x + residual
    rows, added = _rows(call.x), _rows(residual)
    summed = drop(rows, call.seed, call.dropout_p, scale=keep_scale(call.dropout_p), residual=added)
    return summed.view(call.x.shape)


def _rows(x: Tensor) -> Tensor:
    """(M, N), the shape of dropout's counters."""
    return x.view(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 1)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in dtypes for which the native kernel has float32 statistics.

    On the CPU: a low-precision x with float32 parameters. On a CUDA device the kernel always has float32 statistics but
    supports a single dtype, so mixed dtypes are computed in float32.
    """
    wide = _statistics_dtype(x)
    if x.device.type == "cpu":
        return x, weight.to(wide), None if bias is None else bias.to(wide)
    if weight.dtype is not x.dtype or (bias is not None and bias.dtype is not x.dtype):
        return x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    return x, weight, bias


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
    """dx from the native kernel; dweight and dbias summed in float32, since the kernel sums them in the dtype of x."""
    dx, _, _ = _native_backward(dy, x, weight.to(mean.dtype), mean, rstd, has_bias, False)
    rows = _checks.as_rows(dy)
    normed = torch.sub(_checks.as_rows(x), mean.view(-1, 1)).mul_(rstd.view(-1, 1))
    dweight = normed.mul_(rows).sum(dim=0)
    dbias = rows.sum(dim=0, dtype=mean.dtype).to(weight.dtype) if has_bias else None
    return dx, dweight.to(weight.dtype), dbias


def _rms_gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx = rstd (g - xhat mean(g xhat)) with g = dy weight and xhat = x rstd; dweight = sum over rows of dy xhat."""
    rstd = rstd.view(*x.shape[:-1], 1)
    normed = x.to(rstd.dtype) * rstd
    gradient = dy.to(rstd.dtype)
    products = gradient * normed
    dweight = _checks.as_rows(products).sum(dim=0).to(weight.dtype)
    mean_product = products.mul_(weight).mean(dim=-1, keepdim=True)
    dx = (gradient * weight).sub_(normed.mul_(mean_product)).mul_(rstd)
    return dx.to(x.dtype), dweight
