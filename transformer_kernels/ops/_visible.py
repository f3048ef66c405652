"""Masks and distances of attention as tensors, for the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformer_kernels.ops.attention.scores import Scores


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool (queries, keys), True where query i sees key j: j <= i + keys - queries."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def visible_mask(scores: Scores, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Bool, broadcasts to (B, H, queries, keys), True where a query sees a key; None where every query sees all."""
    visible = None
    limited_left, limited_right = scores.left < queries + keys, scores.right < queries + keys
    if scores.cu_seqlens_k is not None:
        visible = _same_sequence(scores, queries, keys)
        away = _distances(scores, queries, keys, device)
        visible = visible & (away >= -scores.left) & (away <= scores.right)
    elif limited_left or limited_right:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
        visible = visible.triu_(keys - queries - scores.left) if limited_left else visible
        visible = visible.tril_(keys - queries + scores.right) if limited_right else visible
    if scores.cu_seqlens is not None and scores.cu_seqlens_k is None:
        own = _same_sequence(scores, queries, keys)
        visible = own if visible is None else visible & own
    others = []
    if scores.key_padding_mask is not None:
        others.append(scores.key_padding_mask[:, None, None, :])
    if scores.key_ranges is not None:
        key, (first, end) = torch.arange(keys, device=device), scores.key_ranges.unsqueeze(-2).unbind(-1)
        others.append((key >= first) & (key < end))
    if scores.mask is not None:
        others.append(scores.mask)
    for mask in others:
        visible = mask if visible is None else visible & mask
    return visible


def added_bias(scores: Scores, queries: int, keys: int) -> Tensor | None:
    """bias - slope * distance, added to scores after the softcap; four axes that broadcast."""
    bias, slopes = scores.bias, scores.alibi_slopes
    if slopes is None:
        return bias
    away = _distances(scores, queries, keys, slopes.device).abs_()
    return -slopes * away if bias is None else torch.addcmul(bias.to(slopes.dtype), slopes, away, value=-1)


def _sequence_numbers(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int64 (tokens,): 1 + the index of each token's packed sequence; len(cu_seqlens) after the last sequence."""
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, position, right=True)


def _same_sequence(scores: Scores, queries: int, keys: int) -> Tensor:
    """Bool (queries, keys), True where both tokens belong to the same packed sequence."""
    starts = scores.cu_seqlens
    assert starts is not None
    number = _sequence_numbers(starts, queries)
    key_number = number if scores.cu_seqlens_k is None else _sequence_numbers(scores.cu_seqlens_k, keys)
    return (number[:, None] == key_number) & (number < len(starts))[:, None]


def _distances(scores: Scores, queries: int, keys: int, device: torch.device) -> Tensor:
    """int64 (queries, keys): key position minus query position; queries are aligned to the last key."""
    position = torch.arange(queries, device=device)
    if scores.cu_seqlens is None or scores.cu_seqlens_k is None:
        position = position + (keys - queries)
    else:  # bottom-right alignment within each sequence
        last = len(scores.cu_seqlens) - 1
        own = _sequence_numbers(scores.cu_seqlens, queries).clamp(max=last)
        position = position + (scores.cu_seqlens_k[own] - scores.cu_seqlens[own])
    return torch.arange(keys, device=device) - position[:, None]
