"""LayerNorm over the last axis."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "layer_norm"


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5, backend: str | None = None
) -> Tensor:
    """LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, with the biased variance.

    Args:
        x: (..., N), float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        weight, bias: (N,), in the dtype of x or in float32; bias may be None.
        eps: added to the variance, positive.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x. Mean, variance and the normalisation are computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4.
    """
    arguments = prepare(x, weight, bias, eps=eps)
    if _autograd.is_traced(arguments[0]):
        return _registered(*arguments, backend)[0]
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(*arguments[:3]):
        return _LayerNorm.apply(module, *arguments)
    return module.forward(*arguments)[0]


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x, weight, bias, eps), x contiguous."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None:
        x = _autograd.promoted(x, weight)[0]
    _checks.row_parameter(OP, "weight", weight, x)
    if bias is not None:
        _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, weight=weight, bias=bias)
    _checks.positive(OP, "eps", eps)
    _autograd.refuse_transforms(OP, x, weight, bias)
    return x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), eps


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = module.forward(x, weight, bias, eps)
        ctx.module, ctx.has_bias = module, bias is not None
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        grads = ctx.module.backward(dy.contiguous(), *ctx.saved_tensors, ctx.has_bias)
        return None, *_autograd.first_order_only(OP, grads), None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str | None) -> tuple[Tensor, ...]:
    arguments = (x, weight, bias, eps)
    module = select(OP, backend, arguments)
    y, mean, rstd = (_torch if is_empty(x) else module).forward(*arguments)
    return _autograd.unaliased(y, mean.view(-1), rstd.view(-1))


def _run_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool, backend: str | None
) -> tuple[Tensor, ...]:
    module = _torch if is_empty(x) else select(OP, backend, (x, weight, None, 0.0))
    dx, dweight, dbias = module.backward(dy.contiguous(), x, weight, mean, rstd, has_bias)
    return _autograd.unaliased(dx, dweight, weight.new_empty(0) if dbias is None else dbias)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((x.shape[:-1].numel(),), dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, has_bias: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if has_bias else weight.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.backend = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _registered_gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> Any:
    dx, dweight, dbias = _registered_backward(dy, *ctx.saved_tensors, ctx.has_bias, ctx.backend)
    return dx, dweight, dbias if ctx.has_bias else None, None, None


_registered = _autograd.register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, str? backend) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_registered_backward = _autograd.register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool has_bias, str? backend)"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.layer_norm import _torch  # noqa: E402
