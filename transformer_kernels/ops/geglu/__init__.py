"""GELU of a gate times what it lets through, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels.ops import _gated

OP = "geglu"


class GegluCall(NamedTuple):
    """Both tensors are contiguous; without `up`, gate holds both, side by side."""

    gate: Tensor
    up: Tensor | None
    approximate: str


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """gelu(gate) * up, the gated activation of a feed-forward network, in one pass.

    Args:
        gate: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch"); without `up`,
            (..., 2 N): one packed projection, the gate's columns first.
        up: (..., N), what the gate lets through, in the dtype of gate.
        approximate: "none" or "tanh", as in `gelu`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (..., N) in the dtype of gate, computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    return OPERATION(prepare(gate, up, approximate=approximate), backend)


def prepare(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> GegluCall:
    """The checked arguments."""
    _checks.approximation(OP, approximate)
    return GegluCall(*_gated.checked(OP, gate, up), approximate)


def _second_order(
    call: GegluCall, y: None, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(call.gate.dtype, torch.float32)
    with torch.enable_grad():
        gate, up = _gated.halves(*call[:2])
        y_again = torch.nn.functional.gelu(gate.to(wide), approximate=call.approximate) * up.to(wide)
    return _autograd.differentiated(y_again, call[:2], grads[0], wanted)


OPERATION = _autograd.Operation(
    OP,
    GegluCall,
    fake=lambda call: _gated.output_like(*call[:2]),
    differentiable=("gate", "up"),
    second_order=_second_order,
)
