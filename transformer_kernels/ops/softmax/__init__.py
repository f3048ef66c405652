"""Softmax over the last axis, with mask, causality and scale in the same pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "softmax"


def softmax(
    x: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0, backend: str | None = None
) -> Tensor:
    """softmax(scale * x) over the last axis, of any width: y_j = exp(scale x_j) / sum_k exp(scale x_k).

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        mask: bool, broadcasts to x, True = keep; what is masked gets weight 0.
        causal: x is (..., Lq, Lk) and query i sees the keys j <= i + Lk - Lq.
        scale: multiplies x.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x; the sum is accumulated in float32 (float64 for float64). A row that may see nothing is
        0; without mask and causal, a row of -inf is NaN, as in PyTorch.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    arguments = prepare(x, mask=mask, causal=causal, scale=scale)
    if _autograd.is_traced(x):
        return _registered(*arguments, backend)
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(x):
        return _Softmax.apply(module, *arguments)
    return module.forward(*arguments)


def prepare(x: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x contiguous, mask 4-D over x's rows, causal, scale)."""
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
    _autograd.refuse_transforms(OP, x)
    return x.contiguous(), mask, causal, float(scale)


def _over_rows(mask: Tensor, x: Tensor) -> Tensor:
    """The mask expanded to x and seen as (d0, d1, d2, N); it is copied only where x has more than four axes."""
    mask = mask.expand(x.shape)
    if x.dim() > 4:
        return mask.reshape(-1, *x.shape[-3:])
    return mask[(None,) * (4 - x.dim())]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        y = module.forward(x, mask, causal, scale)
        ctx.module, ctx.scale = module, scale
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = ctx.module.backward(dy.contiguous(), *ctx.saved_tensors, ctx.scale)
        return None, *_autograd.first_order_only(OP, (dx,)), None, None, None


def _run(x: Tensor, mask: Tensor | None, causal: bool, scale: float, backend: str | None) -> Tensor:
    module = select(OP, backend, (x, mask, causal, scale))
    return (_torch if is_empty(x) else module).forward(x, mask, causal, scale)


def _run_backward(dy: Tensor, y: Tensor, scale: float, backend: str | None) -> Tensor:
    module = _torch if is_empty(y) else select(OP, backend, (y, None, False, scale))
    return module.backward(dy.contiguous(), y, scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(output)


def _registered_gradient(ctx: Any, dy: Tensor) -> Any:
    return _registered_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.backend), None, None, None, None


_registered = _autograd.register(
    "softmax(Tensor x, Tensor? mask, bool causal, float scale, str? backend) -> Tensor",
    _run,
    lambda x, mask, causal, scale, backend: torch.empty_like(x),
)
_registered_backward = _autograd.register(
    "softmax_backward(Tensor dy, Tensor y, float scale, str? backend) -> Tensor",
    _run_backward,
    lambda dy, y, scale, backend: torch.empty_like(y),
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.softmax import _torch  # noqa: E402
