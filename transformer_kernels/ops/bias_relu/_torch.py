"""Bias and ReLU through PyTorch's native kernels: an addition, then the activation in place."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.bias_relu import BiasReluCall

aten = torch.ops.aten


def forward(call: BiasReluCall) -> Tensor:
    """relu(x + bias); a bias wider than x is added before anything is rounded, so that no sign changes."""
    x, bias = call
    total = x + bias if bias.dtype is x.dtype else torch.add(x, bias, out=torch.empty_like(x))
    return total.relu_()


def backward(call: BiasReluCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx, and dbias as its sum over the rows in float32."""
    (dy,), dbias_dtype = grads, call.bias.dtype
    dx = aten.threshold_backward.default(dy, y, 0)
    rows = dx.view(-1, y.shape[-1])
    return dx, rows.sum(dim=0, dtype=torch.promote_types(y.dtype, torch.float32)).to(dbias_dtype)
