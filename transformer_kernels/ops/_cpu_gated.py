"""The kernels of swiglu and geglu in C++ for the CPU: csrc/cpu/rows/activation.cpp."""

from functools import partial

from torch import Tensor

from transformer_kernels.backends.cpu import DTYPE_CODES, load
from transformer_kernels.ops._gated import compiled_backward, compiled_forward

KINDS = {"silu": 0, "none": 1, "tanh": 2}


def forward(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """activation(gate) * up."""
    return compiled_forward(partial(load().gated_forward, KINDS[kind], DTYPE_CODES[gate.dtype]), gate, up)


def backward(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup); dup is None where gate holds both, and then so does dgate."""
    return compiled_backward(partial(load().gated_backward, KINDS[kind], DTYPE_CODES[gate.dtype]), dy, gate, up)
