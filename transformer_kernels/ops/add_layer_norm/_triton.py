"""dropout(x) + residual and its LayerNorm in one pass, on the kernels of layer_norm."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.add_layer_norm import AddLayerNormCall, AddLayerNormResult
from transformer_kernels.ops.layer_norm._triton_backward import backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_rows


def forward(call: AddLayerNormCall) -> AddLayerNormResult:
    """(y, summed, mean, rstd): summed = dropout(x) + residual in x's dtype, y its LayerNorm."""
    x, residual, weight, bias, seed, eps, dropout_p = call
    y, summed, mean, rstd = forward_rows(x, residual, seed, weight, bias, eps, dropout_p)
    assert summed is not None and mean is not None
    return AddLayerNormResult(y, summed, mean, rstd)


def backward(
    call: AddLayerNormCall, result: AddLayerNormResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dx, dresidual, dweight, dbias); dx is None without dropout, where it equals dresidual."""
    (dy, dsummed), (_, _, weight, bias, seed, _, dropout_p), (_, summed, mean, rstd) = grads, call, result
    has_bias = bias is not None
    dx, dresidual, dweight, dbias = backward_rows(dy, dsummed, summed, seed, weight, mean, rstd, dropout_p, has_bias)
    return dresidual if dx is None else dx, dresidual, dweight, dbias
