"""SwiGLU through PyTorch's native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops._gated import gradients_like, halves
from transformer_kernels.ops.swiglu import SwigluCall

aten = torch.ops.aten


def forward(call: SwigluCall) -> Tensor:
    gate, up = halves(*call)
    return torch.nn.functional.silu(gate).mul_(up)


def backward(call: SwigluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """dgate = dy up silu'(gate), dup = dy silu(gate); of a packed projection both in one tensor."""
    gate, up = halves(*call)
    dgate, dup, (gate_part, up_part) = gradients_like(*call)
    aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=gate_part)
    torch.mul(torch.nn.functional.silu(gate), grads[0], out=up_part)
    return dgate, dup
