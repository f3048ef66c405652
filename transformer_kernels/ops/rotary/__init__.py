"""Rotary positions: queries and keys rotated by the angles of their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._derivatives import Parts, contiguous
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted, record
from transformer_kernels.ops.attention._call import last_axis_contiguous

OP = "rotary"


@record
class RotaryCall(NamedTuple):
    """q and k with contiguous last axes, cos and sin contiguous (1 or B, L, R / 2)."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool

    def fake(self) -> RotaryResult:
        return RotaryResult(self.q.new_empty(self.q.shape), self.k.new_empty(self.k.shape))

    def in_pytorch(self, outputs: int) -> tuple[Tensor, Tensor]:
        return rotated(self, self.q), rotated(self, self.k)

    def tangents(self, kernels: Kernels, result: RotaryResult, given: Parts) -> tuple[Tensor, ...]:
        """The tangents rotated."""
        q, k = (torch.zeros_like(x) if dx is None else contiguous(dx) for x, dx in zip(self[:2], given, strict=True))
        tangents: RotaryResult = kernels.forward(self._replace(q=q, k=k))
        return tangents

    def is_empty(self) -> bool:
        return not self.q.numel()  # k may have no heads


class RotaryResult(NamedTuple):
    """Contiguous, in the shapes and dtypes of q and k."""

    q: Tensor
    k: Tensor


def rotated(call: Any, x: Tensor) -> Tensor:
    """x (B, H, L, D) rotated by the angles of a call, by PyTorch's differentiable operators."""
    wide = torch.promote_types(x.dtype, call.cos.dtype)
    cos, sin = (table.to(wide).unsqueeze(1) for table in (call.cos, call.sin))
    (a, b), half = pairs(x.to(wide), cos.shape[-1], call.interleaved), cos.shape[-1]
    columns = [a * cos - b * sin, b * cos + a * sin]
    y = torch.stack(columns, dim=-1).flatten(-2) if call.interleaved else torch.cat(columns, dim=-1)
    return torch.cat((y.to(x.dtype), x[..., 2 * half :]), dim=-1)


def pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second columns of the pairs, as views."""
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


class Heads(NamedTuple):
    """Queries and keys (B, heads, L, D) with contiguous last axes; the keys are None where only queries are rotated."""

    q: Tensor
    k: Tensor | None

    def empty(self) -> Heads:
        """Uninitialised, contiguous tensors of these shapes."""
        q, k = (x if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self)
        return Heads(q, k)  # type: ignore[arg-type]

    def strides(self) -> tuple[int, ...]:
        """Strides (batch, head, row) of q and k."""
        return (*self.q.stride()[:3], *((0, 0, 0) if self.k is None else self.k.stride()[:3]))


class RotaryKernels(Kernels):
    """Forward and backward of a backend, on its `rotate`."""

    def __init__(self, call: RotaryCall) -> None:
        super().__init__(call)
        self._bound: dict[tuple[int | bool, ...], Any] = {}

    def bound(self, call: RotaryCall, heads: Heads, out: Heads, inverse: bool) -> Any:
        """A kernel for the layout of these heads, to be called with (q, k, cos, sin, result of q, result of k)."""
        raise NotImplementedError

    def rotate(self, call: RotaryCall, heads: Heads, out: Heads, *, inverse: bool) -> None:
        """Rotate heads by the angles of the call, or by their negatives, into `out`, which may be the same heads."""
        layout = (*heads.strides(), *out.strides(), inverse)  # forward and backward have one each
        kernel = self._bound.get(layout)
        if kernel is None:
            kernel = self._bound[layout] = self.bound(call, heads, out, inverse)
        kernel(*heads, call.cos, call.sin, *out)

    def forward(self, call: RotaryCall) -> RotaryResult:
        return RotaryResult(*self._rotated(call, Heads(call.q, call.k), inverse=False))

    def backward(self, call: RotaryCall, result: RotaryResult, grads: Grads, wanted: Wanted) -> Any:
        return self._rotated(call, Heads(*grads), inverse=True)

    def _rotated(self, call: RotaryCall, heads: Heads, *, inverse: bool) -> Any:
        out = heads.empty()
        self.rotate(call, heads, out, inverse=inverse)
        return out


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate pairs (a, b) of columns by the angle of their token: (a cos - b sin, b cos + a sin).

    Args:
        q: (B, Hq, L, D), float32, float16, bfloat16 (float64 with backend="torch"). Any strides; with a contiguous last
            axis, such as a view of a packed (B, L, heads, D) projection, nothing is copied first.
        k: (B, Hk, L, D), the dtype of q; Hk may be 0.
        cos: (L, R / 2), or (B, L, R / 2) where each sequence has its own positions; float32 or the dtype of q. R <= D
            columns are rotated, the others are copied. `python_ref.ops.rotary_table` computes cos and sin; they have
            no gradient.
        sin: as cos.
        interleaved: pair i is the columns 2i and 2i + 1 (RoFormer); else i and i + R / 2 (GPT-NeoX, Llama).
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        q and k rotated, contiguous; computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> angles = torch.arange(128)[:, None] * 10000 ** (-torch.arange(16) / 16)
        >>> q, k = torch.randn(2, 4, 128, 32), torch.randn(2, 2, 128, 32)
        >>> q, k = rotary(q, k, angles.cos(), angles.sin())

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34.
    """
    return OPERATION.run(backend, q, k, cos, sin, interleaved)


def prepare(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> RotaryCall:
    """The checked arguments."""
    for name, value in (("q", q), ("k", k)):
        _checks.tensor(OP, name, value)
        if value.dim() != 4:
            raise ValueError(f"{OP}: {name} must have 4 dimensions (B, H, L, D); got {tuple(value.shape)}")
    if _operation.autocast_dtype(q) is not None:
        q, k = _operation.promoted(q, k)
    if q.dtype is not k.dtype:
        raise TypeError(f"{OP}: q and k must have one dtype; got {q.dtype} and {k.dtype}")
    if (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise ValueError(f"{OP}: k must have the shape of q but for its heads; got {tuple(q.shape)}, {tuple(k.shape)}")
    _checks.same_device(OP, q, k=k)
    cos, sin = angles(OP, q, cos, sin)
    _checks.flag(OP, "interleaved", interleaved)
    return RotaryCall(last_axis_contiguous(q), last_axis_contiguous(k), cos, sin, interleaved)


def angles(op: str, q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for queries (B, Hq, L, D), checked and contiguous (1 or B, L, R / 2)."""
    for name, value in (("cos", cos), ("sin", sin)):
        _check_table(op, name, value, q)
    if sin.shape != cos.shape or sin.dtype is not cos.dtype:
        raise ValueError(f"{op}: cos and sin must have one shape and dtype; got {tuple(cos.shape)}, {tuple(sin.shape)}")
    _checks.same_device(op, q, cos=cos, sin=sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    return (cos, sin) if cos.dim() == 3 else (cos.unsqueeze(0), sin.unsqueeze(0))


def _check_table(op: str, name: str, table: Tensor, q: Tensor) -> None:
    """cos or sin, a row for each token."""
    _checks.tensor(op, name, table)
    batch, _, length, width = q.shape
    half = table.shape[-1] if table.dim() else 0
    if tuple(table.shape) not in ((length, half), (batch, length, half)) or not 0 < 2 * half <= width:
        raise ValueError(
            f"{op}: {name} must have shape (L, R / 2) or (B, L, R / 2) with B = {batch}, L = {length} and R at most "
            f"{width}; got {tuple(table.shape)}"
        )
    if table.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{op}: {name} must have the dtype of q ({q.dtype}) or torch.float32; got {table.dtype}")
    if _operation.needs_grad(table):
        raise ValueError(f"{op}: {name} has no gradient; detach it")


OPERATION = _operation.Operation(
    OP,
    RotaryCall,
    prepare,
    result=RotaryResult,
    public=2,
    differentiable=("q", "k"),
    dropped={"q": "q", "k": "k"},
    kept=("q", "k"),
)
