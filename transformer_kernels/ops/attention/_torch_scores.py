"""Masks and distances of attention as tensors, for the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformer_kernels.ops.attention._call import Scores


def visible_mask(scores: Scores, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Bool, broadcasts to (B, H, queries, keys), True = visible; None if every query attends to every key."""
    starts, starts_k = scores.cu_seqlens, scores.cu_seqlens_k
    if starts is None or starts_k is None:
        visible = _window(scores, queries, keys, keys - queries, device)
        if starts is not None:
            same = _same_sequence(starts, starts, queries, keys)
            visible = same if visible is None else visible & same
    else:  # a window is aligned within each sequence
        away = _distances(scores, queries, keys, device)
        within = (away >= -scores.left) & (away <= scores.right)
        visible = _same_sequence(starts, starts_k, queries, keys) & within
    return _masked(scores, visible, slice(0, queries), slice(0, keys), device)


def visible_block(scores: Scores, rows: slice, keys: slice, shift: int, device: torch.device) -> Tensor | None:
    """`visible_mask` of some queries and keys of one sequence, in which query i is aligned to key i + shift."""
    count, first = (rows.stop - rows.start, keys.stop - keys.start), rows.start + shift - keys.start
    return _masked(scores, _window(scores, *count, first, device), rows, keys, device)


def _window(scores: Scores, queries: int, keys: int, first: int, device: torch.device) -> Tensor | None:
    """Bool (queries, keys) without what causality and windows hide; query i is aligned to column i + first."""
    left, right = scores.left, scores.right
    limited_left, limited_right = left < first + queries - 1, first + right < keys - 1
    if not (limited_left or limited_right):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    visible = visible.triu_(first - left) if limited_left else visible
    return visible.tril_(first + right) if limited_right else visible


def _masked(scores: Scores, visible: Tensor | None, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
    """`visible` without what padding, ranges of keys and a mask hide."""
    others = []
    if scores.key_padding_mask is not None:
        others.append(scores.key_padding_mask[:, None, None, keys])
    if scores.key_ranges is not None:
        ranges = scores.key_ranges if scores.key_ranges.shape[2] == 1 else scores.key_ranges[:, :, rows]
        key, (first, end) = torch.arange(keys.start, keys.stop, device=device), ranges.unsqueeze(-2).unbind(-1)
        others.append((key >= first) & (key < end))
    if scores.mask is not None:
        others.append(rows_and_keys(rows, keys, scores.mask))
    for mask in others:
        visible = mask if visible is None else visible & mask
    return visible


def rows_and_keys(rows: slice, keys: slice, x: Any) -> Any:
    """The part of a bias or mask with four axes, which broadcast, for these queries and keys; None of None."""
    if x is None:
        return None
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x if x.shape[3] == 1 else x[..., keys]


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


def _same_sequence(starts: Tensor, starts_k: Tensor, queries: int, keys: int) -> Tensor:
    """Bool (queries, keys), True where both tokens belong to the same packed sequence."""
    number = _sequence_numbers(starts, queries)
    key_number = number if starts_k is starts else _sequence_numbers(starts_k, keys)
    return (number[:, None] == key_number) & (number < len(starts))[:, None]


def _distances(scores: Scores, queries: int, keys: int, device: torch.device) -> Tensor:
    """int64 (queries, keys): key position minus query position; queries are aligned to the last key."""
    away = distances(slice(0, queries), slice(0, keys), keys - queries, device)
    if scores.cu_seqlens is None or scores.cu_seqlens_k is None:
        return away
    last = len(scores.cu_seqlens) - 1  # bottom-right alignment within each sequence
    own = _sequence_numbers(scores.cu_seqlens, queries).clamp(max=last)
    shift = scores.cu_seqlens_k[own] - scores.cu_seqlens[own]
    return away + (keys - queries - shift)[:, None]


def distances(rows: slice, keys: slice, shift: int, device: torch.device) -> Tensor:
    """int64 (queries, keys): key position minus the position to which the query is aligned."""
    position = torch.arange(rows.start + shift, rows.stop + shift, device=device)
    return torch.arange(keys.start, keys.stop, device=device) - position[:, None]
