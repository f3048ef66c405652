"""GELU in C++ for the CPU: csrc/cpu/rows/activation.cpp."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.bias_gelu._cpu import GELU, activated, gradients
from transformer_kernels.ops.gelu import GeluCall


def forward(call: GeluCall) -> Tensor:
    return activated(GELU[call.approximate], call.x, None)


def backward(call: GeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    return (gradients(GELU[call.approximate], grads[0], call.x, None, False)[0],)
