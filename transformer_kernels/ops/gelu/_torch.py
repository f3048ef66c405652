"""GELU through PyTorch's native kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops.gelu import GeluCall

aten = torch.ops.aten


def forward(call: GeluCall) -> Tensor:
    return torch.nn.functional.gelu(call.x, approximate=call.approximate)


def backward(call: GeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    return (aten.gelu_backward.default(grads[0], call.x, approximate=call.approximate),)
