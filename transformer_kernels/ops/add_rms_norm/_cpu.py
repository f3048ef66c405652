"""Dropout, addition and RMSNorm in C++ for the CPU, on the kernels of layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.add_rms_norm import AddRMSNormCall, AddRMSNormResult
from transformer_kernels.ops.layer_norm._cpu import gradients, normalised


def forward(call: AddRMSNormCall) -> AddRMSNormResult:
    """normed, summed, and per row 1 / sqrt(mean(summed^2) + eps) in float32."""
    x, residual, weight, seed, eps, dropout_p = call
    y, summed, _, rstd = normalised(x, residual, weight, None, seed, eps, dropout_p, centre=False)
    assert summed is not None
    return AddRMSNormResult(y, summed, rstd)


def backward(
    call: AddRMSNormCall, result: AddRMSNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx (dresidual itself without dropout), dresidual, dweight."""
    (dy, dsummed), (_, summed, rstd) = grads, result
    given = dy, dsummed, summed, call.weight, None, None, rstd, call.seed, call.dropout_p
    dx, dresidual, dweight, _ = gradients(*given, wanted)
    return dresidual if dx is None else dx, dresidual, dweight
