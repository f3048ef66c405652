"""RMSNorm over the last axis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "rms_norm"


class RMSNormCall(NamedTuple):
    """Both tensors are contiguous."""

    x: Tensor
    weight: Tensor
    eps: float


class RMSNormResult(NamedTuple):
    """y, and per row (M,) 1 / sqrt(mean(x^2) + eps) in float32 (float64 for float64)."""

    y: Tensor
    rstd: Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5, backend: str | None = None) -> Tensor:
    """RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        x: (..., N), float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        weight: (N,), in the dtype of x or in float32.
        eps: added to the mean square, positive.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x. The mean square and the product are computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    return OPERATION(prepare(x, weight, eps=eps), backend)


def prepare(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> RMSNormCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if x.device.type == "cuda" and _autograd.autocast_dtype(x) is not None:  # as LayerNorm
        x = _autograd.promoted(x, weight)[0]
    _checks.row_parameter(OP, "weight", weight, x)
    _checks.same_device(OP, x, weight=weight)
    _checks.positive(OP, "eps", eps)
    _autograd.refuse_transforms(OP, x, weight)
    return RMSNormCall(x.contiguous(), weight.contiguous(), float(eps))


def _second_order(
    call: RMSNormCall, result: RMSNormResult, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    with torch.enable_grad():
        x = call.x.to(wide)
        y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + call.eps) * call.weight.to(wide)
    return _autograd.differentiated(y, call[:2], grads[0], wanted)


def statistics_like(x: Tensor) -> Tensor:
    """An empty number for each row of x, in float32 (float64 for float64)."""
    return x.new_empty((x.shape[:-1].numel(),), dtype=torch.promote_types(x.dtype, torch.float32))


OPERATION = _autograd.Operation(
    OP,
    RMSNormCall,
    result=RMSNormResult,
    fake=lambda call: RMSNormResult(torch.empty_like(call.x), statistics_like(call.x)),
    differentiable=("x", "weight"),
    kept=("rstd",),
    second_order=_second_order,
)
