"""Gradients of embedding tables, with PyTorch's deterministic kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops._kernels import Wanted
from transformer_kernels.ops.embedding import EmbeddingCall

aten = torch.ops.aten

NO_ROW = -1
"""An id excluded from the sums."""


def scattered(ds: Tensor, ids: Tensor, count: int, scale: float = 1.0) -> Tensor:
    """For each id, scale times the sum of its rows of ds (B, L, E): (count, E) in the dtype of ds."""
    if ids.device.type != "cpu":  # an id may be out of range, and PyTorch's kernel would write out of bounds
        ids = torch.where((ids >= 0) & (ids < count), ids, NO_ROW)
    scale_after = count <= ids.numel()  # scale the smaller tensor
    if scale != 1.0 and not scale_after:
        ds = ds * scale
    # on a GPU PyTorch sums every dtype in float32 or wider
    summable = ds.to(torch.promote_types(ds.dtype, torch.float32)) if ds.device.type == "cpu" else ds
    total = aten.embedding_dense_backward.default(summable, ids, count, NO_ROW, False)
    if scale != 1.0 and scale_after:
        total = total.mul_(scale)
    return total.to(ds.dtype)


def table_gradients(call: EmbeddingCall, ds: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    """dweight and dpositions, if required, from the gradient ds (B, L, E) of the sum of embeddings."""
    dweight = scattered(ds, call.tokens, call.weight.shape[0], call.scale) if wanted[0] else None
    if call.positions is None or not wanted[1]:
        return dweight, None
    return dweight, _position_gradient(ds, call.position_ids, call.positions.shape[0])


def _position_gradient(ds: Tensor, position_ids: Tensor | None, count: int) -> Tensor:
    """The gradient (count, E) of the position table, from ds (B, L, E)."""
    if position_ids is not None:
        return scattered(ds, position_ids, count)
    rows = ds.sum(dim=0, dtype=torch.promote_types(ds.dtype, torch.float32)).to(ds.dtype)  # (L, E)
    if len(rows) == count:
        return rows
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.shape[1])))
