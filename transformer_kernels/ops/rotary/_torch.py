"""Rotary positions in PyTorch's elementwise kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.rotary import RotaryCall, RotaryResult


def forward(call: RotaryCall) -> RotaryResult:
    q, k, cos, sin, interleaved = call
    return RotaryResult(_rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved))


def backward(
    call: RotaryCall, result: RotaryResult, grads: Grads, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Turned back by the same angles."""
    cos, sin = call.cos, -call.sin
    return tuple(None if grad is None else _rotated(grad, cos, sin, call.interleaved) for grad in grads)  # type: ignore[return-value]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, H, L, D) turned, in a new contiguous tensor; products and sums in the wider of both dtypes."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one for all heads
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (a_out, b_out) = _pairs(x, half, interleaved), _pairs(out, half, interleaved)
    if x.dtype is cos.dtype:
        torch.mul(a, cos, out=a_out).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=b_out).addcmul_(a, sin)
    else:
        a_out.copy_(a * cos - b * sin)
        b_out.copy_(b * cos + a * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second columns of the pairs, as views."""
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]
