"""LayerNorm in Triton, on the kernels of `_triton_forward.py` and `_triton_backward.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.layer_norm import LayerNormCall, LayerNormResult
from transformer_kernels.ops.layer_norm._triton_backward import backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_rows


def forward(call: LayerNormCall) -> LayerNormResult:
    """(y, mean, rstd); mean and rstd fp32 (M,)."""
    x, weight, bias, eps = call
    y, _, mean, rstd = forward_rows(x, None, None, weight, bias, eps, 0.0)
    assert mean is not None
    return LayerNormResult(y, mean, rstd)


def backward(
    call: LayerNormCall, result: LayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias); dbias is None without a bias."""
    (dy,), (x, weight, bias, _), (_, mean, rstd) = grads, call, result
    has_bias = bias is not None
    _, dx, dweight, dbias = backward_rows(dy, None, x, None, weight, mean, rstd, 0.0, has_bias)
    return dx, dweight, dbias
