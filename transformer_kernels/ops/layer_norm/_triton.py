"""LayerNorm in Triton, on the kernels of `_triton_forward.py` and `_triton_backward.py`."""

from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends import triton_reduce
from transformer_kernels.backends.triton import Configuration
from transformer_kernels.ops.layer_norm._triton_backward import backward_configurations, backward_rows
from transformer_kernels.ops.layer_norm._triton_forward import forward_configurations, forward_rows


def unsupported(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd); mean and rstd fp32 (M,)."""
    y, _, mean, rstd = forward_rows(x, None, None, weight, bias, eps, 0.0)
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias); dbias is None without a bias."""
    _, dx, dweight, dbias = backward_rows(dy, None, x, None, weight, mean, rstd, 0.0, has_bias)
    return dx, dweight, dbias


def configurations() -> list[Configuration]:
    """Every compilation that the tables lead to, for the ahead-of-time report."""
    return forward_configurations(add=False) + backward_configurations(add=False) + triton_reduce.configurations()
