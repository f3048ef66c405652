"""Activations: GELU, with a bias or alone, ReLU with a bias, and the gated SwiGLU and GEGLU: one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._crossovers import Native
from transformer_kernels.ops._derivatives import Parts, contiguous
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted, record

GELU_KINDS = {"none": "gelu", "tanh": "gelu_tanh"}
"""The kind of each `approximate`."""

APPROXIMATIONS = {kind: approximate for approximate, kind in GELU_KINDS.items()}


@record
class ActivationCall(NamedTuple):
    """f(x + bias), f(x) without a bias, or f(x) * up where `gated`. The tensors are contiguous.

    `kind` is "gelu", "gelu_tanh", "relu" or, only gated, "silu". Gated, and without `up`, x is the packed projection
    (..., 2 N) of both. ReLU's backward has the result instead of x.
    """

    x: Tensor
    bias: Tensor | None
    up: Tensor | None
    kind: str
    gated: bool

    def fake(self) -> Tensor:
        """An empty result (..., N)."""
        x = self.x
        if self.gated and self.up is None:
            return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        return torch.empty_like(x)

    def drops(self) -> bool:
        return self.kind == "relu"

    def described(self) -> tuple[str, ...]:
        return ("bias",) if self.kind == "relu" else ()

    def native(self) -> Native | None:
        if self.gated or self.bias is not None:
            return None
        gelu = torch.nn.functional.gelu
        return Native(self.kind, self.x.numel(), lambda x, approximate: gelu(x, approximate=approximate))

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        wide = torch.promote_types(self.x.dtype, torch.float32)
        x, up = halves(self.x, self.up) if self.gated else (self.x, None)
        x = x.to(wide) if self.bias is None else x.to(wide) + self.bias
        y = x * torch.sigmoid(x) if self.kind == "silu" else activated(x, self.kind)  # forward AD lacks silu_backward
        return ((y if up is None else y * up).to(self.x.dtype),)

    def tangents(self, kernels: Kernels, y: Tensor, given: Parts) -> tuple[Tensor]:
        """The tangents times what backward multiplies the incoming gradient by."""
        dx, dbias, dup = given
        result = y if self.drops() else None
        if not self.gated:
            dx = dx if dbias is None else dbias.expand(self.x.shape) if dx is None else dx + dbias.to(dx.dtype)
            dy = contiguous(dx if dx is None else dx.to(self.x.dtype))
            return kernels.backward(self, result, (dy,), (True, False, False))[:1]  # type: ignore[return-value]
        by_x, _, by_up = kernels.backward(self, None, (torch.ones_like(y),), (True, False, True))
        if self.up is None:
            assert by_x is not None and dx is not None
            return (by_x.mul_(dx).unflatten(-1, (2, -1)).sum(dim=-2),)
        (by, x), *others = ((by, x) for by, x in ((by_x, dx), (by_up, dup)) if by is not None and x is not None)
        tangent = by.mul_(x)
        for by, x in others:
            tangent.addcmul_(by, x)
        return (tangent,)

    def second_order(self, y: Tensor | None, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...] | None:
        """Those of ReLU, from y: linear in the incoming gradient and piecewise constant in x."""
        if y is None:
            return None
        assert self.bias is not None
        dx = grads[0].masked_fill(y <= 0, 0.0)
        rows = _checks.as_rows(dx).sum(dim=0, dtype=torch.promote_types(dx.dtype, torch.float32))
        return dx, rows.to(self.bias.dtype), None


def halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up (..., N): the tensors themselves, or views of the packed one."""
    if up is not None:
        return x, up
    first, second = x.chunk(2, dim=-1)
    return first, second


@_checks.spelled_unlike_torch("F.gelu(x, 'tanh')", "gelu(x, approximate='tanh')")
def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """GELU: x * Phi(x) with the normal distribution function Phi, or its tanh approximation.

    "none": x / 2 * (1 + erf(x / sqrt(2))). "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Args:
        x: any shape and strides, float32, float16, bfloat16 (float64 with backend="torch").
        approximate: "none" or "tanh".
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> y = gelu(torch.randn(4, 64), approximate="tanh")

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return GELU.run(backend, x, approximate)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """gelu(x + bias), which follows the first projection of a feed-forward layer, in one pass over memory.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        approximate: "none" (erf) or "tanh", as in `gelu`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        the shape and dtype of x, computed in float32 (float64 for float64); backend="torch" rounds x + bias to the
        dtype of x first.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> hidden = bias_gelu(torch.randn(4, 64) @ torch.randn(64, 256), torch.zeros(256))

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return BIAS_GELU.run(backend, x, bias, approximate)


def bias_relu(x: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """max(x + bias, 0), which follows the first projection of a feed-forward layer, in one pass over memory.

    Only the result is kept for the backward pass: dx = dy where it is positive, else 0.

    Args:
        x: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        bias: (N,), in the dtype of x or in float32.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        the shape and dtype of x, the sum computed in float32 (float64 for float64). NaN stays NaN.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> hidden = bias_relu(torch.randn(4, 64) @ torch.randn(64, 256), torch.zeros(256))

    Nair, Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, section 2.
    """
    return BIAS_RELU.run(backend, x, bias)


def swiglu(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """SwiGLU: silu(gate) * up with silu(x) = x / (1 + exp(-x)), the gated activation of a feed-forward network.

    Args:
        gate: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch"); without `up`,
            (..., 2 N): one packed projection, the gate's columns first.
        up: (..., N), the factor, in the dtype of gate.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (..., N) in the dtype of gate, computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> hidden = swiglu(torch.randn(4, 256), torch.randn(4, 256))
        >>> hidden = swiglu(torch.randn(4, 512))  # gate and up packed in one projection

    Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    return SWIGLU.run(backend, gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """GEGLU: gelu(gate) * up, the gated activation of a feed-forward network.

    Args:
        gate: (..., N), any strides, float32, float16, bfloat16 (float64 with backend="torch"); without `up`,
            (..., 2 N): one packed projection, the gate's columns first.
        up: (..., N), the factor, in the dtype of gate.
        approximate: "none" or "tanh", as in `gelu`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (..., N) in the dtype of gate, computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> hidden = geglu(torch.randn(4, 256), torch.randn(4, 256), approximate="tanh")

    Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    return GEGLU.run(backend, gate, up, approximate)


def _prepare_gelu(x: Tensor, *, approximate: str = "none") -> ActivationCall:
    _checks.tensor("gelu", "x", x)
    _checks.approximation("gelu", approximate)
    return ActivationCall(x.contiguous(), None, None, GELU_KINDS[approximate], False)


def _prepare_bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> ActivationCall:
    x, bias = _with_bias("bias_gelu", x, bias)
    _checks.approximation("bias_gelu", approximate)
    return ActivationCall(x, bias, None, GELU_KINDS[approximate], False)


def _prepare_bias_relu(x: Tensor, bias: Tensor) -> ActivationCall:
    return ActivationCall(*_with_bias("bias_relu", x, bias), None, "relu", False)


def _prepare_swiglu(gate: Tensor, up: Tensor | None = None) -> ActivationCall:
    gate, up = _gate_and_up("swiglu", gate, up)
    return ActivationCall(gate, None, up, "silu", True)


def _prepare_geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> ActivationCall:
    _checks.approximation("geglu", approximate)
    gate, up = _gate_and_up("geglu", gate, up)
    return ActivationCall(gate, None, up, GELU_KINDS[approximate], True)


def _with_bias(op: str, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x and the bias, validated and contiguous."""
    _checks.tensor(op, "x", x)
    _checks.at_least_1d(op, x)
    if _operation.autocast_dtype(x) is not None and isinstance(bias, Tensor) and bias.dtype is not torch.float32:
        x, bias = _operation.promoted(x, bias)
    _checks.row_parameter(op, "bias", bias, x)
    _checks.same_device(op, x, bias=bias)
    return x.contiguous(), bias.contiguous()


def _gate_and_up(op: str, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The two tensors, contiguous and of one shape and dtype; of the packed one the width is even."""
    _checks.tensor(op, "gate", gate)
    _checks.at_least_1d(op, gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"{op}: without up, the width of gate must be even; got {tuple(gate.shape)}")
    else:
        _checks.tensor(op, "up", up)
        if _operation.autocast_dtype(gate) is not None:
            gate, up = _operation.promoted(gate, up)
        if up.shape != gate.shape:
            raise ValueError(f"{op}: up must have the shape of gate {tuple(gate.shape)}; got {tuple(up.shape)}")
        if up.dtype is not gate.dtype:
            raise TypeError(f"{op}: gate and up must have one dtype; got {gate.dtype} and {up.dtype}")
        _checks.same_device(op, gate, up=up)
    return gate.contiguous(), None if up is None else up.contiguous()


def activated(x: Tensor, kind: str | None) -> Tensor:
    """f(x) in PyTorch's operators; x for None."""
    if kind is None:
        return x
    if kind == "relu":
        return torch.relu(x)
    if kind == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate=APPROXIMATIONS[kind])


def _operation_of(op: str, prepare: Callable[..., ActivationCall], **options: Any) -> _operation.Operation:
    return _operation.Operation(
        op, ActivationCall, prepare, differentiable=("x", "bias", "up"), kernels="activation", **options
    )


GELU = _operation_of("gelu", _prepare_gelu)
BIAS_GELU = _operation_of("bias_gelu", _prepare_bias_gelu)
BIAS_RELU = _operation_of("bias_relu", _prepare_bias_relu, kept=("",), dropped={"x": ""})
SWIGLU = _operation_of("swiglu", _prepare_swiglu)
GEGLU = _operation_of("geglu", _prepare_geglu)
