"""SiLU of a gate times what it lets through, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd
from transformer_kernels.ops import _gated

OP = "swiglu"


class SwigluCall(NamedTuple):
    """Both tensors are contiguous; without `up`, gate holds both, side by side."""

    gate: Tensor
    up: Tensor | None


def swiglu(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up with silu(x) = x / (1 + exp(-x)), the gated activation of a feed-forward network, in one pass.

    Args:
        gate: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch"); without `up`,
            (..., 2 N): one packed projection, the gate's columns first.
        up: (..., N), what the gate lets through, in the dtype of gate.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (..., N) in the dtype of gate, computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    return OPERATION(prepare(gate, up), backend)


def prepare(gate: Tensor, up: Tensor | None = None) -> SwigluCall:
    """The checked arguments."""
    return SwigluCall(*_gated.checked(OP, gate, up))


def _second_order(
    call: SwigluCall, y: None, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(call.gate.dtype, torch.float32)
    with torch.enable_grad():
        gate, up = _gated.halves(*call[:2])
        y_again = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
    return _autograd.differentiated(y_again, call[:2], grads[0], wanted)


OPERATION = _autograd.Operation(
    OP,
    SwigluCall,
    fake=lambda call: _gated.output_like(*call[:2]),
    differentiable=("gate", "up"),
    second_order=_second_order,
)
