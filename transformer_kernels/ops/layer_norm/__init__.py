"""LayerNorm over the last axis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "layer_norm"


class LayerNormCall(NamedTuple):
    """All tensors are contiguous."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float


class LayerNormResult(NamedTuple):
    """y, and per row (M,) the mean and 1 / sqrt(var + eps) in float32 (float64 for float64)."""

    y: Tensor
    mean: Tensor
    rstd: Tensor


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, backend: str | None = None
) -> Tensor:
    """LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, with the biased variance.

    Args:
        x: (..., N), float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        weight, bias: (N,), in the dtype of x or in float32; bias may be None.
        eps: added to the variance, positive.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x. Mean, variance and the normalisation are computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4.
    """
    return OPERATION(prepare(x, weight, bias, eps=eps), backend)


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> LayerNormCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if x.device.type == "cuda" and _autograd.autocast_dtype(x) is not None:  # on a CPU autocast leaves LayerNorm alone
        x = _autograd.promoted(x, weight)[0]
    _checks.row_parameter(OP, "weight", weight, x)
    if bias is not None:
        _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, weight=weight, bias=bias)
    _checks.positive(OP, "eps", eps)
    _autograd.refuse_transforms(OP, x, weight, bias)
    return LayerNormCall(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), eps)


def _second_order(
    call: LayerNormCall, result: LayerNormResult, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(call.x.dtype, torch.float32)
    with torch.enable_grad():
        bias = None if call.bias is None else call.bias.to(wide)
        y = torch.nn.functional.layer_norm(call.x.to(wide), call.weight.shape, call.weight.to(wide), bias, call.eps)
    return _autograd.differentiated(y, call[:3], grads[0], wanted)


def _fake(call: LayerNormCall) -> LayerNormResult:
    statistics = call.x.new_empty((call.x.shape[:-1].numel(),), dtype=torch.promote_types(call.x.dtype, torch.float32))
    return LayerNormResult(torch.empty_like(call.x), statistics, torch.empty_like(statistics))


OPERATION = _autograd.Operation(
    OP,
    LayerNormCall,
    result=LayerNormResult,
    fake=_fake,
    differentiable=("x", "weight", "bias"),
    kept=("mean", "rstd"),
    second_order=_second_order,
)
