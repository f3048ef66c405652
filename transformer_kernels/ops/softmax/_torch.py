"""Softmax with PyTorch's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.softmax import SoftmaxCall

aten = torch.ops.aten


class Kernels(_kernels.Kernels):
    """Softmax through PyTorch's kernels."""

    def forward(self, call: SoftmaxCall) -> Tensor:
        return call.in_pytorch()[0]

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """scale * y * (dy - sum(dy * y))."""
        (dy,), scale = grads, call.scale
        dx = aten._softmax_backward_data.default(dy, y, -1, y.dtype)
        return (dx if scale == 1.0 else dx.mul_(scale),)
