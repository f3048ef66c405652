"""x * sigmoid(factor * x), GELU's approximation by one sigmoid, by PyTorch's SiLU: silu(factor * x) / factor.

Rows are computed a block at a time, so that its two or three passes read a cache and not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 16
"""Elements of a block."""


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of contiguous tensors, a block each."""
    return zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)


class _QuickGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.factor = factor
        out = torch.empty_like(x)
        for given, y in _blocks(x, out):
            F.silu(torch.mul(given, factor, out=y), inplace=True).mul_(1.0 / factor)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again
            s = torch.sigmoid(ctx.factor * x)
            return dy * (s + ctx.factor * x * s * (1.0 - s)), None
        dy, dx = dy.contiguous(), torch.empty_like(x)
        for given, grad, out in _blocks(x, dy, dx):
            torch.ops.aten.silu_backward.grad_input(grad, given * ctx.factor, grad_input=out)
        return dx, None


def quick_gelu(x: Tensor, factor: float, backend: str | None = None) -> Tensor:
    """x * sigmoid(factor * x).

    Args:
        x: any shape, float32.
        factor: positive.
        backend: not used; PyTorch's kernels compute it in all of them.
    """
    result: Tensor = _QuickGELU.apply(x, factor)
    return result
