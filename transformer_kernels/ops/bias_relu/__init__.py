"""Bias and ReLU in one pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "bias_relu"


def bias_relu(x: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x + bias, 0): what follows the first projection of a feed-forward layer, in one pass over memory.

    Only the result is kept for the backward pass: dx = dy where it is positive, else 0.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        the shape and dtype of x, the sum computed in float32 (float64 for float64). NaN stays NaN.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Nair, Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, section 2.
    """
    arguments = prepare(x, bias)
    if _autograd.is_traced(arguments[0]):
        return _registered(*arguments, backend)
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(*arguments):
        return _BiasRelu.apply(module, *arguments)
    return module.forward(*arguments)


def prepare(x: Tensor, bias: Tensor) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x, bias), both contiguous."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None and isinstance(bias, Tensor) and bias.dtype is not torch.float32:
        x, bias = _autograd.promoted(x, bias)
    _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, bias=bias)
    _autograd.refuse_transforms(OP, x, bias)
    return x.contiguous(), bias.contiguous()


class _BiasRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, bias: Tensor) -> Tensor:
        y = module.forward(x, bias)
        ctx.module, ctx.dbias_dtype = module, bias.dtype
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        grads = ctx.module.backward(dy.contiguous(), *ctx.saved_tensors, ctx.dbias_dtype)
        return None, *_autograd.first_order_only(OP, grads)


def _run(x: Tensor, bias: Tensor, backend: str | None) -> Tensor:
    module = select(OP, backend, (x, bias))
    return (_torch if is_empty(x) else module).forward(x, bias)


def _run_backward(dy: Tensor, y: Tensor, dbias_dtype: torch.dtype, backend: str | None) -> tuple[Tensor, ...]:
    module = _torch if is_empty(y) else select(OP, backend, (y, y))
    return _autograd.unaliased(*module.backward(dy.contiguous(), y, dbias_dtype))


def _fake_backward(dy: Tensor, y: Tensor, dbias_dtype: torch.dtype, backend: str | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(y.shape[-1:], dtype=dbias_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, ctx.backend = inputs
    ctx.dbias_dtype = bias.dtype
    ctx.save_for_backward(output)


def _registered_gradient(ctx: Any, dy: Tensor) -> Any:
    return *_registered_backward(dy, *ctx.saved_tensors, ctx.dbias_dtype, ctx.backend), None


_registered = _autograd.register(
    "bias_relu(Tensor x, Tensor bias, str? backend) -> Tensor",
    _run,
    lambda x, bias, backend: torch.empty_like(x),
)
_registered_backward = _autograd.register(
    "bias_relu_backward(Tensor dy, Tensor y, ScalarType dbias_dtype, str? backend) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.bias_relu import _torch  # noqa: E402
