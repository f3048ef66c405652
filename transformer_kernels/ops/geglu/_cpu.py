"""GEGLU in C++ for the CPU, on the kernels of `_cpu_gated.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops import _cpu_gated
from transformer_kernels.ops.geglu import GegluCall


def forward(call: GegluCall) -> Tensor:
    return _cpu_gated.forward(*call)


def backward(call: GegluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    return _cpu_gated.backward(grads[0], *call)
