"""Bias and GELU through PyTorch's native kernels: an addition, then the activation."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.bias_gelu import BiasGeluCall

aten = torch.ops.aten


def forward(call: BiasGeluCall) -> Tensor:
    return torch.nn.functional.gelu(call.x + call.bias.to(call.x.dtype), approximate=call.approximate)


def backward(call: BiasGeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """dx, and dbias as its sum over the rows in float32."""
    x, bias, approximate = call
    dx = aten.gelu_backward.default(grads[0], x + bias.to(x.dtype), approximate=approximate)
    rows = dx.view(-1, bias.shape[0])
    return dx, rows.sum(dim=0, dtype=torch.promote_types(x.dtype, torch.float32)).to(bias.dtype)
