"""The output layer of a language model, most of whose logits may have no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_kernels import ops
from transformer_kernels.graphs import in_one_piece
from transformer_kernels.ops._foreign import foreign
from transformer_kernels.ops.linear import LinearCall
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.patching._products import Linear, are_ours, is_eager_cpu

FEW = 0.75  # of the rows; for more of them, gathering does not pay
FIRST_COLUMNS = 64  # a softmax has a gradient for each class


class OutputLayer(Linear):
    """x weight^T + bias, whose gradients on a CPU are computed from those rows that have one.

    The tokens that a loss ignores (85 % of them in masked language modelling, padding, prompts) have none, and two of
    the three products of the largest layer are over them. A GPU would have to copy their number to the host.
    """

    operation = "products of rows with a gradient"

    def forward(self, input: Tensor) -> Tensor:
        recorded = torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if not recorded or not is_eager_cpu(input) or foreign(self.weight) is not None:
            return super().forward(input)
        return _RowsWithGradient.apply(input, self.weight, self.bias, are_ours(input, self.weight, self.backend))


class _RowsWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ours: bool) -> Tensor:
        ctx.ours = ours
        ctx.save_for_backward(x, weight)
        return ops.linear(x, weight, bias, backend="cpu") if ours else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grads = x.flatten(0, -2).contiguous(), dy.flatten(0, -2)
        wanted_x, wanted_weight, wanted_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative is not zero where the gradient is zero
            return (
                (grads @ weight).view(x.shape) if wanted_x else None,
                grads.t() @ rows if wanted_weight else None,
                grads.sum(0) if wanted_bias else None,
                None,
            )
        dx = torch.empty_like(rows) if wanted_x else None
        dweight = torch.empty_like(weight) if wanted_weight else None
        dbias = weight.new_empty(weight.shape[0]) if wanted_bias else None
        in_one_piece(_write_gradients, ctx.ours, grads, rows, weight, dx, dweight, dbias)
        return None if dx is None else dx.view(x.shape), dweight, dbias, None


def _with_gradient(grads: Tensor) -> Tensor:
    """Indices of the rows of (N, V) with a nonzero element; the first columns identify most of them."""
    found = _not_zero(grads[:, :FIRST_COLUMNS])
    rest = (~found).nonzero().squeeze(1)
    if len(rest) > (1 - FEW) * len(grads):
        found = _not_zero(grads)
    elif len(rest):
        found[rest] = _not_zero(grads[rest])
    return found.nonzero().squeeze(1)


def _not_zero(rows: Tensor) -> Tensor:
    least, most = rows.aminmax(dim=-1)
    return (least != 0) | (most != 0)  # NaN counts


def _write_gradients(
    ours: bool,
    grads: Tensor,
    rows: Tensor,
    weight: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """From the rows (N, E) with a gradient (N, V) to dx (N, E), dweight (V, E) and dbias (V)."""
    kept = _with_gradient(grads) if grads.numel() else None
    if kept is not None and len(kept) > FEW * len(rows):
        kept = None
    dx_kept = dx
    if kept is not None:
        rows, grads = rows[kept], grads.index_select(0, kept)
        dx_kept = None if dx is None else torch.empty_like(rows)
    if ours and linear_cpu.multiplies(rows, weight, recorded=True):
        call = LinearCall(rows, weight, None, None)
        linear_cpu.Products(call).write_gradients(call, grads.contiguous(), dx_kept, dweight)
    else:
        if dx_kept is not None:
            torch.mm(grads, weight, out=dx_kept)
        if dweight is not None:
            torch.mm(grads.t(), rows, out=dweight)
    if dbias is not None:
        torch.sum(grads, 0, out=dbias)
    if kept is not None and dx is not None and dx_kept is not None:
        dx.zero_().index_copy_(0, kept, dx_kept)
