"""RMSNorm in CUDA C++, on the kernels of layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.layer_norm._cuda import backward_rows, forward_rows
from transformer_kernels.ops.rms_norm import RMSNormCall, RMSNormResult


def forward(call: RMSNormCall) -> RMSNormResult:
    """y, and per row 1 / sqrt(mean(x^2) + eps) in float32."""
    x, weight, eps = call
    return RMSNormResult(*forward_rows("rms_norm", x, weight, None, eps, None))


def backward(call: RMSNormCall, result: RMSNormResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx, dweight."""
    x, weight, _ = call
    dx, dweight, _ = backward_rows("rms_norm", grads[0], x, weight, None, None, result.rstd)
    return dx, dweight
