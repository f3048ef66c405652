"""Dropout, addition and LayerNorm: one or two elementwise passes, then the native LayerNorm."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels._dropout import drop, keep_scale
from transformer_kernels.ops.add_layer_norm import AddLayerNormCall, AddLayerNormResult
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult
from transformer_kernels.ops.layer_norm import _torch as layer_norm


def forward(call: AddLayerNormCall) -> AddLayerNormResult:
    """normed, summed, and per row the mean and 1 / sqrt(var + eps)."""
    x, residual, weight, bias, seed, eps, dropout_p = call
    if seed is None:
        summed = x + residual
    else:
        rows, added = _rows(x), _rows(residual)
        summed = drop(rows, seed, dropout_p, scale=keep_scale(dropout_p), residual=added).view(x.shape)
    y, mean, rstd = layer_norm.forward(LayerNormCall(summed, weight, bias, eps))
    return AddLayerNormResult(y, summed, mean, rstd)


def backward(
    call: AddLayerNormCall, result: AddLayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx (dresidual itself without dropout), dresidual, dweight, dbias."""
    (dy, dsummed), (_, _, weight, bias, seed, _, dropout_p), (_, summed, mean, rstd) = grads, call, result
    inner = LayerNormCall(summed, weight, bias, call.eps), LayerNormResult(dy, mean, rstd)
    dresidual, dweight, dbias = layer_norm.backward(*inner, (dy,), wanted[1:])
    if dsummed is not None:
        dresidual = dresidual.add_(dsummed)
    if seed is None:
        return dresidual, dresidual, dweight, dbias
    dx = drop(_rows(dresidual), seed, dropout_p, scale=keep_scale(dropout_p))
    return dx.view(summed.shape), dresidual, dweight, dbias


def _rows(x: Tensor) -> Tensor:
    """(M, N), the shape that dropout counts in."""
    return x.view(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 1)
