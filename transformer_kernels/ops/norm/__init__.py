"""LayerNorm and RMSNorm over the last axis, alone or after dropout and a residual addition: one call, one result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._crossovers import Native
from transformer_kernels.ops._derivatives import Parts, contiguous, differentiated, is_reverse_once
from transformer_kernels.ops._dropout import draw_seed, dropped_rows
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted, record
from transformer_kernels.ops._plan import functorch_is_active


@record
class NormCall(NamedTuple):
    """The rows belong to s = dropout(x) + residual, or to x without a residual. All tensors are contiguous.

    `centred` is True for LayerNorm, False for RMSNorm, which has no bias. The seed is None without dropout. After an
    addition backward has neither x nor the residual, only the sum.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    seed: Tensor | None
    eps: float
    dropout_p: float
    centred: bool

    def fake(self) -> NormResult:
        x = self.x
        rstd = x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.promote_types(x.dtype, torch.float32))
        summed = None if self.residual is None else torch.empty_like(x)
        return NormResult(torch.empty_like(x), summed, torch.empty_like(rstd) if self.centred else None, rstd)

    def drops(self) -> bool:
        return self.residual is not None

    def native(self) -> Native | None:
        """PyTorch's norm, preceded by the addition if there is a residual."""
        if self.seed is not None:
            return None
        shape, elements = self.weight.shape, self.x.numel()
        if self.residual is not None:
            name, function = ("add_layer_norm", _add_layer_norm) if self.centred else ("add_rms_norm", _add_rms_norm)
            return Native(name, elements, partial(function, shape))
        if self.centred:
            norm = torch.layer_norm
            return Native("layer_norm", elements, lambda x, weight, bias, eps: norm(x, shape, weight, bias, eps))
        return Native("rms_norm", elements, lambda x, weight, eps: torch.rms_norm(x, shape, weight, eps))

    def in_pytorch(self, outputs: int) -> tuple[Tensor, ...]:
        summed = self.x if self.residual is None else self._dropped(self.x) + self.residual
        y = normed(summed, self.weight, self.bias, self.eps, self.centred)
        return y.to(self.x.dtype), summed

    def tangents(self, kernels: Kernels, result: NormResult, given: Parts) -> tuple[Tensor, ...]:
        """Those of a norm without parameters have a symmetric Jacobian: backward's, times the weight."""
        dx, dresidual, dweight, dbias = (value if value is None else contiguous(value) for value in given)
        alone = self._replace(residual=None, seed=None, x=self.x if result.summed is None else result.summed)
        terms = [x for x in (None if dx is None else self._dropped(dx), dresidual) if x is not None]
        dsummed = sum(terms[1:], terms[0]) if terms else torch.zeros_like(self.x)
        tangent = None
        if terms:
            dy = dsummed, *[None] * (self.residual is not None)
            kept = alone._replace(residual=self.residual, weight=torch.ones_like(self.weight))
            tangent = kernels.backward(kept, result, dy, (True, False, False, False))[0]
            assert tangent is not None
            tangent.mul_(self.weight)
        if dweight is not None or dbias is not None:  # dweight * the normalised rows + dbias
            weight = torch.zeros_like(self.weight) if dweight is None else dweight
            bias = torch.zeros_like(self.bias) if dbias is None and self.bias is not None else dbias
            moved = kernels.forward(alone._replace(weight=weight, bias=bias)).y
            tangent = moved if tangent is None else tangent.add_(moved)
        return torch.zeros_like(self.x) if tangent is None else tangent, dsummed

    def second_order(self, result: NormResult, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...] | None:
        """Those of a norm after an addition, from the sum."""
        if result.summed is None:
            return None

        def of_sum(summed: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return self._replace(x=summed, residual=None, weight=weight, bias=bias).in_pytorch(1)

        given = result.summed, self.weight, self.bias
        dsummed, *others = differentiated(of_sum, given, grads[:1], (True, *wanted[2:]))
        assert dsummed is not None
        dsummed = dsummed if len(grads) == 1 or grads[1] is None else dsummed + grads[1]
        return self._dropped(dsummed), dsummed, *others

    def _dropped(self, x: Tensor) -> Tensor:
        return x if self.seed is None else dropped_rows(x, self.seed, self.dropout_p)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """The norm of rows in float32 or wider, by differentiable operators.

    PyTorch's layer_norm is used under vmap and one reverse mode only: autograd takes its forward-mode derivative for a
    constant (torch 2.13).
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred and functorch_is_active() and not is_compiling() and is_reverse_once():
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return torch.layer_norm(x, weight.shape, weight, bias, eps)
    x = x - x.mean(dim=-1, keepdim=True) if centred else x
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


class NormResult(NamedTuple):
    """The normalised rows and the sum, and per row (M,) the mean and rstd in float32 (float64 for float64).

    rstd is 1 / sqrt(var + eps), or 1 / sqrt(mean(s^2) + eps) for RMSNorm, whose mean is None.
    """

    y: Tensor
    summed: Tensor | None
    mean: Tensor | None
    rstd: Tensor


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""dx, dresidual, dweight, dbias. Without dropout dx and dresidual are one tensor."""


def rows_of(call: NormCall, result: NormResult) -> Tensor:
    """The input of the norm, for backward."""
    return call.x if result.summed is None else result.summed


@_checks.spelled_unlike_torch(
    "F.layer_norm(x, (n,), weight, bias, eps)", "layer_norm(x, weight, bias, eps=eps), over the last axis"
)
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, backend: str | None = None
) -> Tensor:
    """LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, with the biased variance.

    Args:
        x: (..., N), float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        weight: (N,), in the dtype of x or in float32.
        bias: as weight, or None.
        eps: added to the variance, positive.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        the shape and dtype of x. Mean, variance and the normalisation are computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> y = layer_norm(torch.randn(2, 8, 64), torch.ones(64), torch.zeros(64))
        >>> y.shape
        torch.Size([2, 8, 64])

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4.
    """
    return LAYER_NORM.run(backend, x, weight, bias, eps)


@_checks.spelled_unlike_torch("F.rms_norm(x, (n,), weight, eps)", "rms_norm(x, weight, eps=eps), over the last axis")
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
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> y = rms_norm(torch.randn(2, 8, 64), torch.ones(64))

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    return RMS_NORM.run(backend, x, weight, eps)


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
        x: (..., N), the output of the sublayer; float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        residual: the input of the sublayer, in the shape and dtype of x.
        weight: (N,), in the dtype of x or in float32.
        bias: as weight, or None.
        eps: added to the variance, positive.
        dropout_p: probability in [0, 1] with which an element of x is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed, row,
            column), the same in every backend; the seed is drawn from torch's generator.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (normed, summed), both of the shape and dtype of x; statistics in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> x, residual = torch.randn(2, 8, 64), torch.randn(2, 8, 64)
        >>> normed, summed = add_layer_norm(x, residual, torch.ones(64), torch.zeros(64), dropout_p=0.1)

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4; Srivastava et al., "Dropout", 2014, section 4.
    """
    return ADD_LAYER_NORM.run(backend, x, residual, weight, bias, eps, dropout_p)


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
        x: (..., N), the output of the sublayer; float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        residual: the input of the sublayer, in the shape and dtype of x.
        weight: (N,), in the dtype of x or in float32.
        eps: added to the mean square, positive.
        dropout_p: probability in [0, 1] with which an element of x is dropped, as in `add_layer_norm`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (normed, summed), both of the shape and dtype of x; the mean square in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> normed, summed = add_rms_norm(torch.randn(2, 8, 64), torch.randn(2, 8, 64), torch.ones(64))

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; Srivastava et al., "Dropout", 2014,
    section 4.
    """
    return ADD_RMS_NORM.run(backend, x, residual, weight, eps, dropout_p)


def _prepare(
    op: str, centred: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> NormCall:
    """The validated arguments of a norm alone."""
    _checks.tensor(op, "x", x)
    _checks.at_least_1d(op, x)
    if x.device.type == "cuda" and _operation.autocast_dtype(x) is not None:  # on a CPU autocast leaves norms alone
        x = _operation.promoted(x, weight)[0]
    return _validated(op, centred, x, None, weight, bias, eps, 0.0)


def _prepare_added(
    op: str,
    centred: bool,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> NormCall:
    """The validated arguments of a norm after an addition."""
    _checks.tensor(op, "x", x)
    _checks.tensor(op, "residual", residual)
    _checks.at_least_1d(op, x)
    if _operation.autocast_dtype(x) is not None:
        x, residual = _operation.promoted(x, residual)
    if residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have the shape of x {tuple(x.shape)}; got {tuple(residual.shape)}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"{op}: x and residual must have one dtype; got {x.dtype} and {residual.dtype}")
    _checks.probability(op, "dropout_p", dropout_p)
    return _validated(op, centred, x, residual, weight, bias, eps, float(dropout_p))


def _validated(
    op: str,
    centred: bool,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
) -> NormCall:
    _checks.row_parameter(op, "weight", weight, x)
    if bias is not None:
        _checks.row_parameter(op, "bias", bias, x)
        bias = bias.contiguous()
    _checks.same_device(op, x, residual=residual, weight=weight, bias=bias)
    _checks.positive(op, "eps", eps)
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    residual = None if residual is None else residual.contiguous()
    return NormCall(x.contiguous(), residual, weight.contiguous(), bias, seed, float(eps), dropout_p, centred)


def _add_layer_norm(
    shape: torch.Size, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return torch.layer_norm(summed, shape, weight, bias, eps), summed


def _add_rms_norm(
    shape: torch.Size, x: Tensor, residual: Tensor, weight: Tensor, eps: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return torch.rms_norm(summed, shape, weight, eps), summed


def _operation_of(op: str, prepare: Callable[..., NormCall], centred: bool, public: int) -> _operation.Operation:
    statistics = ("mean", "rstd") if centred else ("rstd",)
    return _operation.Operation(
        op,
        NormCall,
        partial(prepare, op, True) if centred else partial(prepare, op, False, bias=None),
        kernels="norm",
        result=NormResult,
        public=public,
        differentiable=("x", "residual", "weight", "bias"),
        dropped={"x": "summed", "residual": "summed"},
        kept=("summed", *statistics) if public > 1 else statistics,
    )


LAYER_NORM = _operation_of("layer_norm", _prepare, True, 1)
RMS_NORM = _operation_of("rms_norm", _prepare, False, 1)
ADD_LAYER_NORM = _operation_of("add_layer_norm", _prepare_added, True, 2)
ADD_RMS_NORM = _operation_of("add_rms_norm", _prepare_added, False, 2)
