"""RMSNorm in PyTorch's elementwise kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.rms_norm import RMSNormCall, RMSNormResult


def forward(call: RMSNormCall) -> RMSNormResult:
    """y, and per row 1 / sqrt(mean(x^2) + eps)."""
    x, weight, eps = call
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    rstd = values.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return RMSNormResult((values * rstd).mul_(weight).to(x.dtype), rstd.view(-1))


def backward(call: RMSNormCall, result: RMSNormResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx = rstd (g - xhat mean(g xhat)) with g = dy weight and xhat = x rstd; dweight = sum over rows of dy xhat."""
    (dy,), (x, weight, _), rstd = grads, call, result.rstd
    rstd = rstd.view(*x.shape[:-1], 1)
    normed = x.to(rstd.dtype) * rstd
    gradient = dy.to(rstd.dtype)
    products = gradient * normed
    dweight = products.view(-1, x.shape[-1]).sum(dim=0).to(weight.dtype)
    mean_product = products.mul_(weight).mean(dim=-1, keepdim=True)
    dx = (gradient * weight).sub_(normed.mul_(mean_product)).mul_(rstd)
    return dx.to(x.dtype), dweight
