"""Bias and GELU in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "bias_gelu"


class BiasGeluCall(NamedTuple):
    """Both tensors are contiguous."""

    x: Tensor
    bias: Tensor
    approximate: str


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """gelu(x + bias): what follows the first projection of a feed-forward layer, in one pass over memory.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        approximate: "none" (erf) or "tanh", as in `gelu`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64); backend="torch" rounds x + bias to the
        dtype of x first.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return OPERATION(prepare(x, bias, approximate=approximate), backend)


def prepare(x: Tensor, bias: Tensor, *, approximate: str = "none") -> BiasGeluCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None and isinstance(bias, Tensor) and bias.dtype is not torch.float32:
        x, bias = _autograd.promoted(x, bias)
    _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, bias=bias)
    _checks.approximation(OP, approximate)
    _autograd.refuse_transforms(OP, x, bias)
    return BiasGeluCall(x.contiguous(), bias.contiguous(), approximate)


def _second_order(
    call: BiasGeluCall, result: None, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        y = torch.nn.functional.gelu(call.x + call.bias, approximate=call.approximate)
    return _autograd.differentiated(y, call[:2], grads[0], wanted)


OPERATION = _autograd.Operation(
    OP,
    BiasGeluCall,
    fake=lambda call: torch.empty_like(call.x),
    differentiable=("x", "bias"),
    second_order=_second_order,
)
