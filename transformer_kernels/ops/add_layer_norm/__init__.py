"""Dropout, residual addition and LayerNorm in one pass: the seam between two sublayers of a transformer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dropout import draw_seed

OP = "add_layer_norm"


class AddLayerNormCall(NamedTuple):
    """All tensors are contiguous; the seed is None without dropout. Backward has the sum for x and residual."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    seed: Tensor | None
    eps: float
    dropout_p: float


class AddLayerNormResult(NamedTuple):
    """The two outputs, and per row (M,) the mean and 1 / sqrt(var + eps) in float32 (float64 for float64)."""

    y: Tensor
    summed: Tensor
    mean: Tensor
    rstd: Tensor


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = dropout(x) + residual, normalised over the last axis.

    Args:
        x: (..., N), what the sublayer made; float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        residual: what went into the sublayer, the shape and dtype of x.
        weight, bias: (N,), in the dtype of x or in float32; bias may be None.
        eps: added to the variance, positive.
        dropout_p: probability in [0, 1] with which an element of x is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed, row,
            column), the same in every backend; the seed is drawn from torch's generator.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (normed, summed), both of the shape and dtype of x; statistics in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4; Srivastava et al., "Dropout", 2014, section 4.
    """
    return OPERATION(prepare(x, residual, weight, bias, eps=eps, dropout_p=dropout_p), backend)


def prepare(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> AddLayerNormCall:
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
    if bias is not None:
        _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, residual=residual, weight=weight, bias=bias)
    _checks.positive(OP, "eps", eps)
    _checks.probability(OP, "dropout_p", dropout_p)
    _autograd.refuse_transforms(OP, x, residual, weight, bias)
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    bias = None if bias is None else bias.contiguous()
    return AddLayerNormCall(
        x.contiguous(), residual.contiguous(), weight.contiguous(), bias, seed, eps, float(dropout_p)
    )


def _fake(call: AddLayerNormCall) -> AddLayerNormResult:
    x = call.x
    statistics = x.new_empty((x.shape[:-1].numel(),), dtype=torch.promote_types(x.dtype, torch.float32))
    return AddLayerNormResult(torch.empty_like(x), torch.empty_like(x), statistics, torch.empty_like(statistics))


OPERATION = _autograd.Operation(
    OP,
    AddLayerNormCall,
    result=AddLayerNormResult,
    public=2,
    fake=_fake,
    differentiable=("x", "residual", "weight", "bias"),
    dropped=("x", "residual"),
    kept=("summed", "mean", "rstd"),
    like={"x": "summed", "residual": "summed"},
)
