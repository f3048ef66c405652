"""LayerNorm through PyTorch's native kernel."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def unsupported(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> str | None:
    return None


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _operands(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Operands in dtypes whose native kernel keeps float32 statistics.

    On the CPU that is a low-precision x with float32 parameters; on a CUDA device, where the kernel takes one dtype only
    and always keeps float32 statistics, a mixture is computed in float32.
    """
    wide = _statistics_dtype(x)
    if x.device.type == "cpu":
        return x, *(None if parameter is None else parameter.to(wide) for parameter in parameters)
    if any(parameter is not None and parameter.dtype is not x.dtype for parameter in parameters):
        return x.to(wide), *(None if parameter is None else parameter.to(wide) for parameter in parameters)
    return x, *parameters


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, and per row the mean and 1 / sqrt(var + eps)."""
    operand, scale, shift = _operands(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(operand, x.shape[-1:], scale, shift, eps)
    return y.to(x.dtype), mean.view(-1), rstd.view(-1)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias."""
    operand, scale = _operands(x, weight)
    statistics = (*x.shape[:-1], 1)
    dx, dweight, dbias = aten.native_layer_norm_backward(
        dy.to(operand.dtype),
        operand,
        x.shape[-1:],
        mean.view(statistics),
        rstd.view(statistics),
        scale,
        scale if has_bias else None,
        [True, True, has_bias],
    )
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype) if has_bias else None
