"""(x - mean) / (std + eps) * weight + bias: the norm of the Annotated Transformer, in few of PyTorch's operators.

With s the standard deviation and c = N / (N - correction) it is LayerNorm times r = 1 / (sqrt(c) + eps / sqrt(var)) per
row, so PyTorch's own LayerNorm kernel computes it, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TINY = 1e-30
"""Added to the variance, so that a constant row gives 0."""


class _StdNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, correction: int) -> Tensor:
        columns = x.shape[-1]
        y, mean, rstd = torch.native_layer_norm(x, (columns,), None, None, TINY)
        factor = (rstd * eps + math.sqrt(columns / (columns - correction))).reciprocal_()
        ctx.save_for_backward(x, weight, mean, rstd, factor)
        ctx.eps, ctx.has_bias = eps, bias is not None
        y *= factor
        if weight is None:
            return y if bias is None else y.add_(bias)
        return y.mul_(weight) if bias is None else torch.addcmul(bias, y, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, factor = ctx.saved_tensors
        wide = dy if weight is None else dy * weight
        # With n = (x - mean) rstd, R = rstd factor: dx = R (g - mean(g) - n mean(g n) sqrt(c) factor), g = dy * weight.
        normed = (x - mean) * rstd
        along = (wide * normed).mean(-1, keepdim=True)
        dweight = None if weight is None else (dy * normed).mul_(factor).flatten(0, -2).sum(0)
        dbias = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        scale = factor * rstd
        share = along * (1.0 - factor * rstd * ctx.eps)
        dx = (wide - wide.mean(-1, keepdim=True)).addcmul_(normed, share, value=-1.0).mul_(scale)
        return dx, dweight, dbias, None, None


def std_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, correction: int, backend: str | None = None
) -> Tensor:
    """(x - mean(x)) / (std(x) + eps) * weight + bias over the last axis.

    Args:
        x: (..., N), float32.
        weight, bias: (N,) or None.
        eps: added to the standard deviation.
        correction: the standard deviation divides by N - correction.
        backend: not used; PyTorch's kernel computes it in all of them.
    """
    result: Tensor = _StdNorm.apply(x, weight, bias, eps, correction)
    return result
