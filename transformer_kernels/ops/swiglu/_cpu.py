"""SwiGLU in C++ for the CPU, on the kernels of `_cpu_gated.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops import _cpu_gated
from transformer_kernels.ops.swiglu import SwigluCall


def forward(call: SwigluCall) -> Tensor:
    return _cpu_gated.forward(*call, "silu")


def backward(call: SwigluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    return _cpu_gated.backward(grads[0], *call, "silu")
