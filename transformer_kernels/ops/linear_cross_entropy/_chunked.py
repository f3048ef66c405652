"""The head and its loss in chunks of rows, the same in every backend: only the rows of logits are the backend's.

A chunk's logits are made, replaced by their gradient, multiplied into dx and dweight, and forgotten.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
"""What a chunk's logits may fill. On a CPU about a last-level cache. On a GPU little beside a model's other tensors,
and yet so many rows that the products run at full rate and adding up dweight costs a fraction of them."""

FEWEST_ROWS = {"cpu": 256, "cuda": 512}
"""For the widest vocabularies: each chunk reads the weight twice and adds to dweight once; rows must be worth that."""


ROW_ALIGNMENT = 16
"""Bytes: with an odd vocabulary, rows without gaps would keep kernels and products from vector access."""


class Result(NamedTuple):
    """The loss, the number of rows in a mean, and the gradients of the sum of losses (None where not wanted)."""

    loss: Tensor
    counted: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


def rows_at_once(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows a chunk has."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    return max(CHUNK_BYTES[kind] // (classes * dtype.itemsize), FEWEST_ROWS[kind])


def forward(
    kernels: ModuleType,
    wanted: tuple[bool, bool, bool],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
) -> Result:
    """The loss, and those gradients of x (..., E), weight (V, E) and bias (V,) that are `wanted`; targets (...).

    The products are in `dtype`. A gradient has the dtype of what it belongs to; across chunks it is summed in float32.
    """
    flat, classes = x.reshape(-1, x.shape[-1]), targets.view(-1)
    head = _Head(flat, weight.to(dtype), None if bias is None else bias.to(dtype), wanted, x.dtype)
    rows = rows_at_once(weight.shape[0], dtype, x.device)
    buffer = head.logits_buffer(min(rows, flat.shape[0]))
    losses = [
        head.losses(kernels, slice(start, start + rows), classes, buffer, ignore_index, label_smoothing)
        for start in range(0, max(1, flat.shape[0]), rows)
    ]
    loss, counted = kernels.reduced(torch.cat(losses), classes, ignore_index, reduction)
    dx = None if head.dx is None else head.dx.view(x.shape)
    dweight = None if head.dweight is None else head.dweight.to(weight.dtype)
    dbias = None if head.dbias is None or bias is None else head.dbias.to(bias.dtype)
    return Result(loss, counted, dx, dweight, dbias)


class _Head:
    """The linear layer, and the sums of its gradients over the chunks so far."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool], dtype: torch.dtype
    ) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.wanted = wanted
        self.dx = torch.empty_like(x, dtype=dtype) if wanted[0] else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def logits_buffer(self, rows: int) -> Tensor:
        """Uninitialised (rows, V), every row at a multiple of ROW_ALIGNMENT."""
        classes, step = self.weight.shape[0], ROW_ALIGNMENT // self.weight.dtype.itemsize
        return self.weight.new_empty((rows, -(-classes // step) * step))[:, :classes]

    def losses(
        self,
        kernels: ModuleType,
        rows: slice,
        targets: Tensor,
        buffer: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        """The losses of a chunk of rows (R,); its gradients are added to the sums."""
        x, targets = self.x[rows].to(self.weight.dtype), targets[rows]  # (R, E), (R,)
        logits = self._logits(x, buffer[: x.shape[0]])
        if not any(self.wanted):
            return kernels.row_losses(logits, targets, ignore_index, label_smoothing)
        losses, dlogits = kernels.row_losses_and_gradient(logits, targets, ignore_index, label_smoothing)
        if self.dx is not None:
            _product(dlogits, self.weight, self.dx[rows])  # (R, V) (V, E) -> (R, E)
        if self.wanted[1]:
            self.dweight = _plus_product(self.dweight, dlogits.t(), x)  # (V, R) (R, E) -> (V, E)
        if self.wanted[2]:
            dbias = dlogits.sum(dim=0, dtype=_wide(dlogits.dtype))
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)
        return losses

    def _logits(self, x: Tensor, out: Tensor) -> Tensor:
        """x W^T + b, (R, E) -> (R, V)."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(first: Tensor, second: Tensor, out: Tensor) -> None:
    if out.dtype is first.dtype:
        torch.mm(first, second, out=out)
    else:
        out.copy_(first @ second)


def _plus_product(total: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """total + first @ second in float32 at least; None stands for nothing yet."""
    if total is None:
        return (first @ second).to(_wide(first.dtype))
    if total.dtype is first.dtype:
        return total.addmm_(first, second)
    return total.add_(first @ second)
