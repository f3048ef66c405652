"""Softmax over the last axis, with mask, causality and scale in the same pass."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._crossovers import Native
from transformer_kernels.ops._derivatives import Parts, contiguous
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted, record

OP = "softmax"


@record
class SoftmaxCall(NamedTuple):
    """x is contiguous, the mask seen as (d0, d1, d2, N) over its rows."""

    x: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    def fake(self) -> Tensor:
        return torch.empty_like(self.x)

    def native(self) -> Native | None:
        if self.mask is not None or self.causal or self.scale != 1.0:
            return None
        return Native("softmax", self.x.numel(), lambda x, mask, causal, scale: torch.softmax(x, -1))

    def in_pytorch(self, outputs: int = 1) -> tuple[Tensor]:
        """Scaled in float32: a large scale must not overflow float16."""
        x, mask, causal, scale = self
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = x if scale == 1.0 else x.to(wide) * scale
        if mask is None and not causal:
            return (torch.softmax(scores, dim=-1).to(x.dtype),)
        if mask is not None:
            scores = scores.masked_fill(~mask.reshape(x.shape), -math.inf)
        if causal:
            queries, keys = x.shape[-2:]
            visible = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril_(keys - queries)
            scores = scores.masked_fill(~visible, -math.inf)
        return (torch.ops.aten._safe_softmax.default(scores, -1).to(x.dtype),)

    def tangents(self, kernels: Kernels, y: Tensor, given: Parts) -> tuple[Tensor]:
        """Those of backward: the Jacobian is symmetric."""
        return kernels.backward(self, y, (contiguous(given[0]),), (True,))[:1]  # type: ignore[return-value]

    def second_order(self, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor | None]:
        """scale * y * (dy - sum(dy * y)), differentiable with respect to x through y."""
        wide = torch.promote_types(y.dtype, torch.float32)
        p, dy = y.to(wide), grads[0].to(wide)
        return ((p * (dy - (dy * p).sum(dim=-1, keepdim=True)) * self.scale).to(y.dtype),)


@_checks.spelled_unlike_torch("F.softmax(x, dim=-1)", "softmax(x), over the last axis: transpose x for another")
def softmax(
    x: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0, backend: str | None = None
) -> Tensor:
    """softmax(scale * x) over the last axis, of any width: y_j = exp(scale x_j) / sum_k exp(scale x_k).

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        mask: bool, broadcasts to x, True = keep; masked elements have weight 0.
        causal: x is (..., Lq, Lk) and query i attends to the keys j <= i + Lk - Lq.
        scale: multiplies x.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        the shape and dtype of x; the sum is accumulated in float32 (float64 for float64). A fully masked row is
        0; without mask and causal, a row of -inf is NaN, as in PyTorch.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> [round(weight, 3) for weight in softmax(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()]
        [0.006, 0.017, 0.046, 0.93]

    Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    return OPERATION.run(backend, x, mask, causal, scale)


def prepare(x: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0) -> SoftmaxCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    _checks.flag(OP, "causal", causal)
    _checks.finite(OP, "scale", scale)
    if causal and x.dim() < 2:
        raise ValueError(f"{OP}: causal needs x of shape (..., Lq, Lk); got {tuple(x.shape)}")
    if mask is not None:
        _checks.boolean_mask(OP, "mask", mask)
        _checks.broadcasts_to(OP, "mask", mask, tuple(x.shape))
        _checks.same_device(OP, x, mask=mask)
        mask = _over_rows(mask, x)
    return SoftmaxCall(x.contiguous(), mask, causal, 0.0 + float(scale))


def _over_rows(mask: Tensor, x: Tensor) -> Tensor:
    """The mask expanded to x and seen as (d0, d1, d2, N); it is copied only where x has more than four axes."""
    mask = mask.expand(x.shape)
    if x.dim() > 4:
        return mask.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    return mask[(None,) * (4 - x.dim())]


OPERATION = _operation.Operation(
    OP, SoftmaxCall, prepare, differentiable=("x",), kept=("",), dropped={"x": "", "mask": None}
)
