"""Activations with PyTorch's kernels: an addition if there is a bias, then the activation."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.activation import APPROXIMATIONS, ActivationCall, activated, halves

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor | None, Tensor | None]


class Kernels(_kernels.Kernels):
    """Activations through PyTorch's kernels."""

    def forward(self, call: ActivationCall) -> Tensor:
        """f(x + bias), or f(gate) * up."""
        if call.gated:
            gate, up = halves(call.x, call.up)
            return activated(gate, call.kind).mul_(up)
        x, bias = call.x, call.bias
        if bias is None:
            return activated(x, call.kind)
        if call.kind == "relu":  # a bias wider than x is added before rounding, which preserves the sign
            total = x + bias if bias.dtype is x.dtype else torch.add(x, bias, out=torch.empty_like(x))
            return total.relu_()
        return activated(x + bias.to(x.dtype), call.kind)

    def backward(self, call: ActivationCall, result: Tensor | None, grads: Grads, wanted: Wanted) -> Gradients:
        """dx, dbias summed over rows in float32, and dup; for a packed projection dx contains both gradients."""
        (dy,) = grads
        if call.gated:
            return _gated_gradients(call, dy)
        bias = call.bias
        if result is not None:
            dx = aten.threshold_backward.default(dy, result, 0)
        else:
            x = call.x if bias is None else call.x + bias.to(call.x.dtype)
            dx = aten.gelu_backward.default(dy, x, approximate=APPROXIMATIONS[call.kind])
        if bias is None:
            return dx, None, None
        return (
            dx,
            _checks.as_rows(dx).sum(dim=0, dtype=torch.promote_types(dx.dtype, torch.float32)).to(bias.dtype),
            None,
        )


def _gated_gradients(call: ActivationCall, dy: Tensor) -> Gradients:
    """dgate = dy up f'(gate), dup = dy f(gate)."""
    gate, up = halves(call.x, call.up)
    dx, dup = torch.empty_like(call.x), None if call.up is None else torch.empty_like(call.up)
    gate_part, up_part = halves(dx, dup)
    if call.kind == "silu":
        aten.silu_backward.grad_input(dy * up, gate, grad_input=gate_part)
    else:
        approximate = APPROXIMATIONS[call.kind]
        aten.gelu_backward.grad_input(dy * up, gate, approximate=approximate, grad_input=gate_part)
    torch.mul(activated(gate, call.kind), dy, out=up_part)
    return dx, None, dup
