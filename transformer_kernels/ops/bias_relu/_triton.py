"""relu(x + bias) in Triton, on the kernels of `_triton_bias.py`."""

import torch
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Configuration
from transformer_kernels.ops import _triton_bias
from transformer_kernels.ops.bias_relu._triton_table import BACKWARD, FORWARD


def unsupported(x: Tensor, bias: Tensor) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """y = relu(x + bias), the sum in fp32."""
    return _triton_bias.forward(x, bias, "relu", FORWARD)


def backward(dy: Tensor, y: Tensor, dbias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dx, dbias) with dx = dy where y > 0, and dbias the sum of its rows."""
    return _triton_bias.backward(dy, y, None, dbias_dtype, "relu", BACKWARD)


def configurations() -> list[Configuration]:
    """Every compilation that the tables lead to for aligned rows, for the ahead-of-time report."""
    return _triton_bias.configurations("bias_relu", {"": "relu"}, FORWARD, BACKWARD)
