"""Dropout, addition and RMSNorm: one or two elementwise passes, then `rms_norm`."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels._dropout import drop, keep_scale
from transformer_kernels.ops.add_rms_norm import AddRMSNormCall, AddRMSNormResult
from transformer_kernels.ops.rms_norm import RMSNormCall, RMSNormResult
from transformer_kernels.ops.rms_norm import _torch as rms_norm


def forward(call: AddRMSNormCall) -> AddRMSNormResult:
    """normed, summed, and per row 1 / sqrt(mean(summed^2) + eps)."""
    x, residual, weight, seed, eps, dropout_p = call
    if seed is None:
        summed = x + residual
    else:
        rows, added = _rows(x), _rows(residual)
        summed = drop(rows, seed, dropout_p, scale=keep_scale(dropout_p), residual=added).view(x.shape)
    y, rstd = rms_norm.forward(RMSNormCall(summed, weight, eps))
    return AddRMSNormResult(y, summed, rstd)


def backward(
    call: AddRMSNormCall, result: AddRMSNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (dresidual itself without dropout), dresidual, dweight."""
    (dy, dsummed), (_, _, weight, seed, eps, dropout_p), (_, summed, rstd) = grads, call, result
    inner = RMSNormCall(summed, weight, eps), RMSNormResult(dy, rstd)
    dresidual, dweight = rms_norm.backward(*inner, (dy,), wanted[1:])
    if dsummed is not None:
        dresidual = dresidual.add_(dsummed)
    if seed is None:
        return dresidual, dresidual, dweight
    dx = drop(_rows(dresidual), seed, dropout_p, scale=keep_scale(dropout_p))
    return dx.view(summed.shape), dresidual, dweight


def _rows(x: Tensor) -> Tensor:
    """(M, N), the shape that dropout counts in."""
    return x.view(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 1)
