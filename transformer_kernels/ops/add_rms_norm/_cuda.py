"""Dropout, addition and RMSNorm in CUDA C++, on the kernels of add_layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.add_layer_norm._cuda import backward_rows, forward_rows
from transformer_kernels.ops.add_rms_norm import AddRMSNormCall, AddRMSNormResult


def forward(call: AddRMSNormCall) -> AddRMSNormResult:
    """normed, summed, and per row 1 / sqrt(mean(summed^2) + eps) in float32."""
    x, residual, weight, seed, eps, dropout_p = call
    return AddRMSNormResult(*forward_rows("add_rms_norm", x, residual, weight, None, seed, eps, dropout_p, None))


def backward(
    call: AddRMSNormCall, result: AddRMSNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (dresidual itself without dropout), dresidual, dweight."""
    (dy, dsummed), (_, summed, rstd) = grads, result
    given = dy, dsummed, summed, call.weight, None, None, rstd, call.seed, call.dropout_p
    return backward_rows("add_rms_norm", *given)[:3]
