"""GEGLU through PyTorch's native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops._gated import gradients_like, halves
from transformer_kernels.ops.geglu import GegluCall

aten = torch.ops.aten


def forward(call: GegluCall) -> Tensor:
    gate, up = halves(*call[:2])
    return torch.nn.functional.gelu(gate, approximate=call.approximate).mul_(up)


def backward(call: GegluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """dgate = dy up gelu'(gate), dup = dy gelu(gate); of a packed projection both in one tensor."""
    gate, up = halves(*call[:2])
    dgate, dup, (gate_part, up_part) = gradients_like(*call[:2])
    aten.gelu_backward.grad_input(grads[0] * up, gate, approximate=call.approximate, grad_input=gate_part)
    torch.mul(torch.nn.functional.gelu(gate, approximate=call.approximate), grads[0], out=up_part)
    return dgate, dup
