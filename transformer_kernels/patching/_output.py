"""The linear layer that gives a language model's logits, most of which may have no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from transformer_kernels.patching._swap import Mixin

FEW = 0.75  # of the rows; for more of them, gathering does not pay


class OutputLayer(Mixin):
    """x weight^T + bias, whose gradients on a CPU are computed from those rows that have one.

    The tokens that a loss ignores (85 % of them in masked language modelling, padding, prompts) have none, and two of
    the three products of the largest layer are over them. A GPU would have to tell the host how many there are.
    """

    answered = "products of rows with a gradient"

    def forward(self, input: Tensor) -> Tensor:
        plain = input.device.type == "cpu" and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        if not plain or transformed or torch.compiler.is_compiling() or input.dim() < 2:
            return super().forward(input)
        return _RowsWithGradient.apply(input, self.weight, self.bias)


class _RowsWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grads, places = x.flatten(0, -2), dy.flatten(0, -2), None
        if not torch.is_grad_enabled() and grads.numel():  # a second derivative is not zero where the gradient is
            least, most = grads.aminmax(dim=-1)
            kept = ((least != 0) | (most != 0)).nonzero().squeeze(1)  # NaN counts
            if len(kept) <= FEW * len(rows):
                rows, grads, places = rows[kept], grads[kept], kept
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        dx = grads @ weight if wanted_x else None
        if dx is not None and places is not None:
            dx = dx.new_zeros(dy[..., 0].numel(), dx.shape[1]).index_copy_(0, places, dx)
        return (
            None if dx is None else dx.view(x.shape),
            grads.t() @ rows if wanted_weight else None,
            grads.sum(0) if wanted_bias else None,
        )
