"""SwiGLU in Triton, on the kernels of `_triton_gated.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops import _triton_gated
from transformer_kernels.ops.swiglu import SwigluCall


def forward(call: SwigluCall) -> Tensor:
    return _triton_gated.forward(*call, "silu")


def backward(call: SwigluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    return _triton_gated.backward(grads[0], *call, "silu")
