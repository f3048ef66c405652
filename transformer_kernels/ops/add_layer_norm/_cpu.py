"""Dropout, addition and LayerNorm in one pass in C++ for the CPU: csrc/cpu/rows/layer_norm.cpp."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.add_layer_norm import AddLayerNormCall, AddLayerNormResult
from transformer_kernels.ops.layer_norm._cpu import gradients, normalised


def forward(call: AddLayerNormCall) -> AddLayerNormResult:
    """normed, summed, and per row the mean and 1 / sqrt(var + eps) in float32."""
    x, residual, weight, bias, seed, eps, dropout_p = call
    y, summed, mean, rstd = normalised(x, residual, weight, bias, seed, eps, dropout_p)
    assert summed is not None and mean is not None
    return AddLayerNormResult(y, summed, mean, rstd)


def backward(
    call: AddLayerNormCall, result: AddLayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx, dresidual, dweight, dbias."""
    (dy, dsummed), (_, _, weight, bias, seed, _, dropout_p), (_, summed, mean, rstd) = grads, call, result
    dx, dresidual, dweight, dbias = gradients(dy, dsummed, summed, weight, bias, mean, rstd, seed, dropout_p, wanted)
    return dresidual if dx is None else dx, dresidual, dweight, dbias
