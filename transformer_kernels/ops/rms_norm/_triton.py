"""RMSNorm in Triton, on the kernels of layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.layer_norm._triton_backward import backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_rows
from transformer_kernels.ops.rms_norm import RMSNormCall, RMSNormResult


def forward(call: RMSNormCall) -> RMSNormResult:
    """(y, rstd); rstd fp32 (M,)."""
    x, weight, eps = call
    y, _, _, rstd = forward_rows(x, None, None, weight, None, eps, 0.0, centre=False)
    return RMSNormResult(y, rstd)


def backward(call: RMSNormCall, result: RMSNormResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    x, weight, _ = call
    _, dx, dweight, _ = backward_rows(grads[0], None, x, None, weight, None, result.rstd, 0.0, False)
    return dx, dweight
