"""Bias and ReLU in C++ for the CPU: csrc/cpu/rows/activation.cpp."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cpu import narrowed
from transformer_kernels.ops.bias_gelu._cpu import RELU, activated, gradients
from transformer_kernels.ops.bias_relu import BiasReluCall


def forward(call: BiasReluCall) -> Tensor:
    """relu(x + bias), the sum in float32."""
    return activated(RELU, call.x, call.bias)


def backward(call: BiasReluCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """dx, and dbias in float32 and in an order that depends on the shape alone."""
    dx, dbias = gradients(RELU, grads[0], y, None, wanted[1])
    return dx, narrowed(dbias, call.bias)
