"""Masks as tensors, for the backend that needs them as such."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool (queries, keys), True where query i sees key j: j <= i + keys - queries."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def same_sequence(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Bool (tokens, tokens), True where both tokens are of one packed sequence."""
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, position, right=True)
    return (number[:, None] == number) & (position < cu_seqlens[-1])


def visible_mask(
    queries: int,
    keys: int,
    device: torch.device,
    causal: bool,
    window: int | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    right: int | None = None,
) -> Tensor | None:
    """Bool, broadcasts to (B, H, queries, keys), True where a query sees a key; None where every query sees all.

    `right` is how many keys after itself a query sees, where that is not as many as before it.
    """
    visible = None
    if causal:
        visible = causal_mask(queries, keys, device)
    if window is not None:
        band = torch.ones(queries, keys, dtype=torch.bool, device=device)
        band = band.triu_(keys - queries - window + 1).tril_(keys - queries + (window - 1 if right is None else right))
        visible = band if visible is None else visible & band
    if cu_seqlens is not None:
        own = same_sequence(cu_seqlens, keys)
        visible = own if visible is None else visible & own
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        visible = padding if visible is None else visible & padding
    return visible
