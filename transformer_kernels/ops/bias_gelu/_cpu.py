"""Bias and GELU, and activations in general, in C++ for the CPU: csrc/cpu/rows/activation.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import address
from transformer_kernels.backends.cpu import DTYPE_CODES, load, narrowed, widened
from transformer_kernels.ops.bias_gelu import BiasGeluCall

RELU, GELU = 0, {"none": 1, "tanh": 2}


def forward(call: BiasGeluCall) -> Tensor:
    """gelu(x + bias), the sum in float32."""
    return activated(GELU[call.approximate], call.x, call.bias)


def backward(call: BiasGeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
    """dx, and dbias in float32 and in an order that depends on the shape alone."""
    dx, dbias = gradients(GELU[call.approximate], grads[0], call.x, call.bias, wanted[1])
    return dx, narrowed(dbias, call.bias)


def activated(kind: int, x: Tensor, bias: Tensor | None, *, in_place: bool = False) -> Tensor:
    """activation(x + bias)."""
    y, wide = x if in_place else torch.empty_like(x), widened(bias)
    columns = x.shape[-1] if x.dim() else 1
    load().activation_forward(
        kind, DTYPE_CODES[x.dtype], x.data_ptr(), address(wide), y.data_ptr(), x.numel() // columns, columns
    )
    return y


def gradients(
    kind: int, dy: Tensor, saved: Tensor, bias: Tensor | None, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """dx, and dbias in float32 where it is wanted; `saved` is x, or y for ReLU, which then needs no bias."""
    dx, wide = torch.empty_like(saved), widened(bias)
    columns = saved.shape[-1] if saved.dim() else 1
    dbias = saved.new_empty((columns,), dtype=torch.float32) if wants_bias else None
    load().activation_backward(
        kind,
        DTYPE_CODES[saved.dtype],
        dy.data_ptr(),
        saved.data_ptr(),
        address(wide),
        dx.data_ptr(),
        address(dbias),
        saved.numel() // columns,
        columns,
    )
    return dx, dbias
