"""Masks as tensors, for the backend that needs them as such."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool (queries, keys), True where query i sees key j: j <= i + keys - queries."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def visible_mask(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    window: int | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Bool, broadcasts to (B, H, queries, keys), True where a query sees a key; None where every query sees all."""
    visible = None
    if causal:
        visible = causal_mask(queries, keys, device)
    if window is not None:
        band = torch.ones(queries, keys, dtype=torch.bool, device=device)
        band = band.triu_(keys - queries - window + 1).tril_(keys - queries + window - 1)
        visible = band if visible is None else visible & band
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        visible = padding if visible is None else visible & padding
    return visible
