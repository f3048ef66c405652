"""GELU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "gelu"


def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """GELU: x * Phi(x) with the normal distribution function Phi, or its tanh approximation.

    "none": x / 2 * (1 + erf(x / sqrt(2))). "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Args:
        x: any shape and strides, float32, float16, bfloat16 (float64 with backend="torch").
        approximate: "none" or "tanh".
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    arguments = prepare(x, approximate=approximate)
    if _autograd.is_traced(x):
        return _registered(*arguments, backend)
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(x):
        return _Gelu.apply(module, *arguments)
    return module.forward(*arguments)


def prepare(x: Tensor, *, approximate: str = "none") -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x, approximate), x contiguous."""
    _checks.tensor(OP, "x", x)
    _checks.approximation(OP, approximate)
    _autograd.refuse_transforms(OP, x)
    return x.contiguous(), approximate


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, approximate: str) -> Tensor:
        ctx.module, ctx.approximate = module, approximate
        ctx.save_for_backward(x)
        return module.forward(x, approximate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = ctx.module.backward(dy.contiguous(), *ctx.saved_tensors, ctx.approximate)
        return None, *_autograd.first_order_only(OP, (dx,)), None


def _run(x: Tensor, approximate: str, backend: str | None) -> Tensor:
    module = select(OP, backend, (x, approximate))
    return (_torch if is_empty(x) else module).forward(x, approximate)


def _run_backward(dy: Tensor, x: Tensor, approximate: str, backend: str | None) -> Tensor:
    module = _torch if is_empty(x) else select(OP, backend, (x, approximate))
    return module.backward(dy.contiguous(), x, approximate)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.approximate, ctx.backend = inputs
    ctx.save_for_backward(x)


def _registered_gradient(ctx: Any, dy: Tensor) -> Any:
    return _registered_backward(dy, *ctx.saved_tensors, ctx.approximate, ctx.backend), None, None


_registered = _autograd.register(
    "gelu(Tensor x, str approximate, str? backend) -> Tensor",
    _run,
    lambda x, approximate, backend: torch.empty_like(x),
)
_registered_backward = _autograd.register(
    "gelu_backward(Tensor dy, Tensor x, str approximate, str? backend) -> Tensor",
    _run_backward,
    lambda dy, x, approximate, backend: torch.empty_like(x),
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.gelu import _torch  # noqa: E402
