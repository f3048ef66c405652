"""Bias and ReLU in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "bias_relu"


class BiasReluCall(NamedTuple):
    """Both tensors are contiguous; backward has the result for x."""

    x: Tensor
    bias: Tensor


def bias_relu(x: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x + bias, 0): what follows the first projection of a feed-forward layer, in one pass over memory.

    Only the result is kept for the backward pass: dx = dy where it is positive, else 0.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, the sum computed in float32 (float64 for float64). NaN stays NaN.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Nair, Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, section 2.
    """
    return OPERATION(prepare(x, bias), backend)


def prepare(x: Tensor, bias: Tensor) -> BiasReluCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None and isinstance(bias, Tensor) and bias.dtype is not torch.float32:
        x, bias = _autograd.promoted(x, bias)
    _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, bias=bias)
    _autograd.refuse_transforms(OP, x, bias)
    return BiasReluCall(x.contiguous(), bias.contiguous())


def _second_order(
    call: BiasReluCall, y: Tensor, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """The gradients are linear in the incoming one and piecewise constant in x."""
    dx = grads[0].masked_fill(y <= 0, 0.0)
    rows = dx.reshape(-1, dx.shape[-1]).sum(dim=0, dtype=torch.promote_types(dx.dtype, torch.float32))
    return dx, rows.to(call.bias.dtype)


OPERATION = _autograd.Operation(
    OP,
    BiasReluCall,
    fake=lambda call: torch.empty_like(call.x),
    differentiable=("x", "bias"),
    dropped=("x",),
    described=("bias",),
    kept=("",),
    like={"x": ""},
    second_order=_second_order,
)
