"""RMSNorm in C++ for the CPU, on the kernels of layer_norm without their centring."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.layer_norm._cpu import gradients, normalised
from transformer_kernels.ops.rms_norm import RMSNormCall, RMSNormResult


def forward(call: RMSNormCall) -> RMSNormResult:
    """y, and per row 1 / sqrt(mean(x^2) + eps) in float32."""
    x, weight, eps = call
    y, _, _, rstd = normalised(x, None, weight, None, None, eps, 0.0, centre=False)
    return RMSNormResult(y, rstd)


def backward(call: RMSNormCall, result: RMSNormResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """dx, dweight."""
    x, weight, _ = call
    _, dx, dweight, _ = gradients(grads[0], None, x, weight, None, None, result.rstd, None, 0.0, wanted)
    return dx, dweight
