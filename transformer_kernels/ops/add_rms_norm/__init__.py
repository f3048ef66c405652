"""Dropout, residual addition and RMSNorm in one pass: the seam between two sublayers of a Llama."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dropout import draw_seed
from transformer_kernels.ops.rms_norm import statistics_like

OP = "add_rms_norm"


class AddRMSNormCall(NamedTuple):
    """All tensors are contiguous; the seed is None without dropout. Backward has the sum for x and residual."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    seed: Tensor | None
    eps: float
    dropout_p: float


class AddRMSNormResult(NamedTuple):
    """The two outputs, and per row (M,) 1 / sqrt(mean(summed^2) + eps) in float32 (float64 for float64)."""

    y: Tensor
    summed: Tensor
    rstd: Tensor


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = dropout(x) + residual, normalised over the last axis.

    Args:
        x: (..., N), what the sublayer made; float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        residual: what went into the sublayer, the shape and dtype of x.
        weight: (N,), in the dtype of x or in float32.
        eps: added to the mean square, positive.
        dropout_p: probability in [0, 1] with which an element of x is dropped, as in `add_layer_norm`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (normed, summed), both of the shape and dtype of x; the mean square in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; Srivastava et al., "Dropout", 2014,
    section 4.
    """
    return OPERATION(prepare(x, residual, weight, eps=eps, dropout_p=dropout_p), backend)


def prepare(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-5, dropout_p: float = 0.0
) -> AddRMSNormCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.tensor(OP, "residual", residual)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None:
        x, residual = _autograd.promoted(x, residual)
    if residual.shape != x.shape:
        raise ValueError(f"{OP}: residual must have the shape of x {tuple(x.shape)}; got {tuple(residual.shape)}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"{OP}: x and residual must have one dtype; got {x.dtype} and {residual.dtype}")
    _checks.row_parameter(OP, "weight", weight, x)
    _checks.same_device(OP, x, residual=residual, weight=weight)
    _checks.positive(OP, "eps", eps)
    _checks.probability(OP, "dropout_p", dropout_p)
    _autograd.refuse_transforms(OP, x, residual, weight)
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    return AddRMSNormCall(
        x.contiguous(), residual.contiguous(), weight.contiguous(), seed, float(eps), float(dropout_p)
    )


def _fake(call: AddRMSNormCall) -> AddRMSNormResult:
    return AddRMSNormResult(torch.empty_like(call.x), torch.empty_like(call.x), statistics_like(call.x))


OPERATION = _autograd.Operation(
    OP,
    AddRMSNormCall,
    result=AddRMSNormResult,
    public=2,
    fake=_fake,
    differentiable=("x", "residual", "weight"),
    dropped=("x", "residual"),
    kept=("summed", "rstd"),
    like={"x": "summed", "residual": "summed"},
)
