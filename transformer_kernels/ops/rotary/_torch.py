"""Rotary positions with PyTorch's elementwise kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops.rotary import Heads, RotaryCall, RotaryKernels, pairs


class Kernels(RotaryKernels):
    """Rotary positions through PyTorch's elementwise kernels."""

    def rotate(self, call: RotaryCall, heads: Heads, out: Heads, *, inverse: bool) -> None:
        cos, sin = call.cos.unsqueeze(1), (-call.sin if inverse else call.sin).unsqueeze(1)  # one for all heads
        for x, rotated in zip(heads, out, strict=True):
            if x is not None and rotated is not None:
                _rotate(x, rotated, cos, sin, call.interleaved)


def _rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate x (B, H, L, D), computed in the wider dtype of x and the angles."""
    half = cos.shape[-1]
    (a, b), (a_out, b_out) = pairs(x, half, interleaved), pairs(out, half, interleaved)
    if x.dtype is cos.dtype:
        first = torch.mul(a, cos, out=None if x is out else a_out).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=b_out).addcmul_(a, sin)
    else:
        first = a * cos - b * sin
        b_out.copy_(b * cos + a * sin)
    if first is not a_out:
        a_out.copy_(first)
    if 2 * half < x.shape[-1] and x is not out:
        out[..., 2 * half :] = x[..., 2 * half :]
