"""Dropout, addition and LayerNorm: one or two elementwise passes, then the native LayerNorm."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._dropout import drop, keep_scale
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
        rows, added = _rows(x), _rows(residual)
        summed = drop(rows, seed, dropout_p, scale=keep_scale(dropout_p), residual=added).view(x.shape)
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
    dx = drop(_rows(dresidual), seed, dropout_p, scale=keep_scale(dropout_p))
    return dx.view(summed.shape), dresidual, dweight, dbias


def _rows(x: Tensor) -> Tensor:
    """(M, N), the shape that dropout counts in."""
    return x.view(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 1)
