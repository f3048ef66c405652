"""Softmax with PyTorch's kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops._visible import causal_mask
from transformer_kernels.ops.softmax import SoftmaxCall

aten = torch.ops.aten


class Kernels(_kernels.Kernels):
    """Softmax through PyTorch's kernels."""

    def forward(self, call: SoftmaxCall) -> Tensor:
        x, mask, causal, scale = call
        wide = torch.promote_types(x.dtype, torch.float32)  # scaled in float32: a large scale must not overflow float16
        scores = x if scale == 1.0 else x.to(wide) * scale
        if mask is None and not causal:
            return torch.softmax(scores, dim=-1).to(x.dtype)
        if mask is not None:
            scores = scores.masked_fill(~mask.reshape(x.shape), -math.inf)
        if causal:
            scores = scores.masked_fill(~causal_mask(x.shape[-2], x.shape[-1], x.device), -math.inf)
        return aten._safe_softmax.default(scores, -1).to(x.dtype)

    def backward(self, call: SoftmaxCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
        """scale * y * (dy - sum(dy * y))."""
        (dy,), scale = grads, call.scale
        dx = aten._softmax_backward_data.default(dy, y, -1, y.dtype)
        return (dx if scale == 1.0 else dx.mul_(scale),)
