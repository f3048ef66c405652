"""GELU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "gelu"


class GeluCall(NamedTuple):
    """x is contiguous."""

    x: Tensor
    approximate: str


def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """GELU: x * Phi(x) with the normal distribution function Phi, or its tanh approximation.

    "none": x / 2 * (1 + erf(x / sqrt(2))). "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Args:
        x: any shape and strides, float32, float16, bfloat16 (float64 with backend="torch").
        approximate: "none" or "tanh".
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return OPERATION(prepare(x, approximate=approximate), backend)


def prepare(x: Tensor, *, approximate: str = "none") -> GeluCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.approximation(OP, approximate)
    _autograd.refuse_transforms(OP, x)
    return GeluCall(x.contiguous(), approximate)


def _second_order(
    call: GeluCall, result: None, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        y = torch.nn.functional.gelu(call.x, approximate=call.approximate)
    return _autograd.differentiated(y, [call.x], grads[0], wanted)


OPERATION = _autograd.Operation(
    OP,
    GeluCall,
    fake=lambda call: torch.empty_like(call.x),
    differentiable=("x",),
    second_order=_second_order,
)
