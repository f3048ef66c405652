"""dropout(x) + residual and its RMSNorm in one pass, on the kernels of layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.add_rms_norm import AddRMSNormCall, AddRMSNormResult
from transformer_kernels.ops.layer_norm._triton_backward import backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_rows


def forward(call: AddRMSNormCall) -> AddRMSNormResult:
    """(y, summed, rstd): summed = dropout(x) + residual in x's dtype, y its RMSNorm."""
    x, residual, weight, seed, eps, dropout_p = call
    y, summed, _, rstd = forward_rows(x, residual, seed, weight, None, eps, dropout_p, centre=False)
    assert summed is not None
    return AddRMSNormResult(y, summed, rstd)


def backward(
    call: AddRMSNormCall, result: AddRMSNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight); without dropout dx is dresidual."""
    (dy, dsummed), (_, summed, rstd) = grads, result
    given = dy, dsummed, summed, call.seed, call.weight, None, rstd, call.dropout_p, False
    dx, dresidual, dweight, _ = backward_rows(*given)
    return dresidual if dx is None else dx, dresidual, dweight
