"""A linear layer with its bias and activation, fused."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._kernels import record
from transformer_kernels.ops.activation import activated

OP = "linear"
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")


@record
class LinearCall(NamedTuple):
    """All tensors are contiguous, but for a float32 weight whose transpose may be instead, without an activation; under
    autocast weight and bias may be float32 beside an x of 16 bits."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None

    def fake(self) -> LinearResult:
        y = self.x.new_empty((*self.x.shape[:-1], self.weight.shape[0]))
        return LinearResult(y, self.x.new_empty(0) if self.activation is None else torch.empty_like(y))

    def is_empty(self) -> bool:
        return not (self.x.numel() and self.weight.numel())

    def may_be_composed(self) -> bool:
        return True

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        dtype = self.x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return (activated(torch.nn.functional.linear(self.x, self.weight.to(dtype), bias), self.activation),)


class LinearResult(NamedTuple):
    """y (..., N), and what its gradient needs: y for ReLU, the sums before GELU, nothing without an activation."""

    y: Tensor
    saved: Tensor | None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, backend: str | None = None
) -> Tensor:
    """activation(x weight^T + bias): a linear layer; bias and activation are applied while the product is in a cache.

    Args:
        x: (..., K), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        weight: (N, K), in the dtype of x; any dtype under autocast.
        bias: (N,), as weight, or None.
        activation: None, "relu", "gelu" (erf) or "gelu_tanh".
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`). In "triton" and
            "cuda" it is PyTorch's product, which is the vendor's library on a GPU, then `bias_gelu`.

    Returns:
        (..., N), contiguous, in the dtype of x; accumulated in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> linear(torch.randn(4, 64), torch.randn(256, 64), torch.zeros(256), activation="gelu").shape
        torch.Size([4, 256])

    Vaswani et al., "Attention Is All You Need", 2017, equation 2.
    """
    return OPERATION.run(backend, x, weight, bias, activation)


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> LinearCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    autocast = _operation.autocast_dtype(x)
    _checks.linear_parameter(OP, "weight", weight, (None, x.shape[-1]), x, autocast is not None)
    if bias is not None:
        _checks.linear_parameter(OP, "bias", bias, (weight.shape[0],), x, autocast is not None)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation must be None, relu, gelu or gelu_tanh; got {activation!r}")
    _checks.same_device(OP, x, weight=weight, bias=bias)
    if autocast is not None:
        x = x if x.dtype is torch.float64 else x.to(autocast)
        weight, bias = _fitting(weight, x.dtype), None if bias is None else _fitting(bias, x.dtype)
    # a transposed view is read in place where nothing is traced
    by_columns = activation is None and x.dtype is torch.float32 and weight.stride() == (1, len(weight))
    if not by_columns or _operation.is_traced(x):
        weight = weight.contiguous()
    return LinearCall(x.contiguous(), weight, None if bias is None else bias.contiguous(), activation)


def _fitting(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    kept = parameter.dtype is torch.float32 and dtype is not torch.float64
    return parameter if kept else parameter.to(dtype)


OPERATION = _operation.Operation(
    OP, LinearCall, prepare, result=LinearResult, differentiable=("x", "weight", "bias"), kept=("saved",)
)
