"""gelu(x + bias) in Triton, on the kernels of `_triton_bias.py`."""

from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Configuration
from transformer_kernels.ops import _triton_bias
from transformer_kernels.ops.bias_gelu._triton_table import BACKWARD, FORWARD

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


def unsupported(x: Tensor, bias: Tensor, approximate: str) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)


def forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """y = gelu(x + bias), the sum in fp32."""
    return _triton_bias.forward(x, bias, ACTIVATIONS[approximate], FORWARD)


def backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(dx, dbias) with dx = dy * gelu'(x + bias) and dbias the sum of its unrounded rows."""
    return _triton_bias.backward(dy, x, bias, bias.dtype, ACTIVATIONS[approximate], BACKWARD)


def configurations() -> list[Configuration]:
    """Every compilation that the tables lead to for aligned rows, for the ahead-of-time report."""
    labels = {f" {name}": activation for name, activation in ACTIVATIONS.items()}
    return _triton_bias.configurations("bias_gelu", labels, FORWARD, BACKWARD)
