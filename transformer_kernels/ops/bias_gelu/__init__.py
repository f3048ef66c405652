"""Bias and GELU in one pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "bias_gelu"


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """gelu(x + bias): what follows the first projection of a feed-forward layer, in one pass over memory.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        approximate: "none" (erf) or "tanh", as in `gelu`.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    arguments = prepare(x, bias, approximate=approximate)
    if _autograd.is_traced(arguments[0]):
        return _registered(*arguments, backend)
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(*arguments[:2]):
        return _BiasGelu.apply(module, *arguments)
    return module.forward(*arguments)


def prepare(x: Tensor, bias: Tensor, *, approximate: str = "none") -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x, bias, approximate), both contiguous."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None and isinstance(bias, Tensor) and bias.dtype is not torch.float32:
        x, bias = _autograd.promoted(x, bias)
    _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, bias=bias)
    _checks.approximation(OP, approximate)
    _autograd.refuse_transforms(OP, x, bias)
    return x.contiguous(), bias.contiguous(), approximate


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        ctx.module, ctx.approximate = module, approximate
        ctx.save_for_backward(x, bias)
        return module.forward(x, bias, approximate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        grads = ctx.module.backward(dy.contiguous(), *ctx.saved_tensors, ctx.approximate)
        return None, *_autograd.first_order_only(OP, grads), None


def _run(x: Tensor, bias: Tensor, approximate: str, backend: str | None) -> Tensor:
    module = select(OP, backend, (x, bias, approximate))
    return (_torch if is_empty(x) else module).forward(x, bias, approximate)


def _run_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str, backend: str | None) -> tuple[Tensor, ...]:
    module = _torch if is_empty(x) else select(OP, backend, (x, bias, approximate))
    return _autograd.unaliased(*module.backward(dy.contiguous(), x, bias, approximate))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.approximate, ctx.backend = inputs
    ctx.save_for_backward(x, bias)


def _registered_gradient(ctx: Any, dy: Tensor) -> Any:
    return *_registered_backward(dy, *ctx.saved_tensors, ctx.approximate, ctx.backend), None, None


_registered = _autograd.register(
    "bias_gelu(Tensor x, Tensor bias, str approximate, str? backend) -> Tensor",
    _run,
    lambda x, bias, approximate, backend: torch.empty_like(x),
)
_registered_backward = _autograd.register(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate, str? backend) -> (Tensor, Tensor)",
    _run_backward,
    lambda dy, x, bias, approximate, backend: (torch.empty_like(x), torch.empty_like(bias)),
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.bias_gelu import _torch  # noqa: E402
