"""dropout(x) + residual and its LayerNorm in one pass, on the kernels of layer_norm."""

from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Configuration
from transformer_kernels.ops.layer_norm._triton_backward import backward_configurations, backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_configurations, forward_rows


def unsupported(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, summed, mean, rstd): summed = dropout(x) + residual in x's dtype, y its LayerNorm."""
    y, summed, mean, rstd = forward_rows(x, residual, seed, weight, bias, eps, dropout_p)
    assert summed is not None
    return y, summed, mean, rstd


def backward(
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """(dx, dresidual, dweight, dbias); dx is None without dropout, where it equals dresidual."""
    return backward_rows(dy, dsummed, summed, seed, weight, mean, rstd, dropout_p, has_bias)


def configurations() -> list[Configuration]:
    """Every compilation that the tables lead to, for the ahead-of-time report."""
    return forward_configurations(add=True) + backward_configurations(add=True)
