"""Dropout, addition and LayerNorm: one or two elementwise passes, then the native LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._dropout import dropped, keep_scale
from transformer_kernels.ops.layer_norm import _torch as layer_norm


def unsupported(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
) -> str | None:
    return None


def _dropped(seed: Tensor, x: Tensor, dropout_p: float) -> Tensor:
    """Where dropout drops, bool, the shape of x."""
    columns = x.shape[-1]
    return dropped(seed, 1, x.numel() // max(columns, 1), columns, dropout_p).reshape(x.shape)


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """normed, summed, and per row the mean and 1 / sqrt(var + eps)."""
    if seed is None:
        summed = x + residual
    else:
        kept = x.masked_fill(_dropped(seed, x, dropout_p), 0.0)
        summed = torch.add(residual, kept, alpha=keep_scale(dropout_p))
    y, mean, rstd = layer_norm.forward(summed, weight, bias, eps)
    return y, summed, mean, rstd


def backward(
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """dx (None where it equals dresidual), dresidual, dweight, dbias."""
    dresidual, dweight, dbias = layer_norm.backward(dy, summed, weight, mean, rstd, has_bias)
    if dsummed is not None:
        dresidual = dresidual.add_(dsummed)
    if seed is None:
        return None, dresidual, dweight, dbias
    dx = (dresidual * keep_scale(dropout_p)).masked_fill_(_dropped(seed, summed, dropout_p), 0.0)
    return dx, dresidual, dweight, dbias
