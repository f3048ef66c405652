"""`padding_idx` of torch.nn.Embedding: a row of the table that has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.ops._derivatives import is_transformed


class _WithoutGradient(torch.autograd.Function):
    """The identity on a table; the gradient of one row is zero."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, row: int) -> Tensor:
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # create_graph: the incoming gradient may be needed unchanged
            return grad.index_fill(0, torch.tensor([ctx.row], device=grad.device), 0.0), None
        grad[ctx.row] = 0.0  # allocated for this table by the embedding; a copy would cost as much as the gather
        return grad, None


def without_gradient(table: Tensor, row: int | None) -> Tensor:
    """The table without a gradient for `row`: the meaning of `padding_idx` in torch.nn.Embedding."""
    if row is not None and is_transformed((table,)):  # as in PyTorch, the tangent of this row is not zeroed
        rows = torch.arange(len(table), device=table.device).unsqueeze(1)
        return torch.where(rows == row, table.detach(), table)
    return table if row is None else _WithoutGradient.apply(table, row)
