"""Masks and distances of attention as tensors, for the torch backend."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformer_kernels.ops.attention.scores import Scores


def visible_mask(scores: Scores, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Bool, broadcasts to (B, H, queries, keys), True where a query sees a key; None where every query sees all."""
    sequences = _same_sequence(scores, queries, keys)
    if scores.cu_seqlens_k is not None:  # a window is aligned within each sequence
        away = _distances(scores, queries, keys, device)
        within = (away >= -scores.left) & (away <= scores.right)
        sequences = within if sequences is None else within & sequences
        scores = scores._replace(left=queries + keys, right=queries + keys)
    visible = visible_block(scores, slice(0, queries), slice(0, keys), keys - queries, device)
    return sequences if visible is None else visible if sequences is None else visible & sequences


def visible_block(scores: Scores, rows: slice, keys: slice, shift: int, device: torch.device) -> Tensor | None:
    """`visible_mask` of some queries and keys of one sequence, in which query i is aligned to key i + shift."""
    masks, count = [], (rows.stop - rows.start, keys.stop - keys.start)
    first = rows.start + shift - keys.start  # the column to which the first query is aligned
    limited_left, limited_right = scores.left < first + count[0] - 1, first + scores.right < count[1] - 1
    if limited_left or limited_right:
        window = torch.ones(count, dtype=torch.bool, device=device)
        window = window.triu_(first - scores.left) if limited_left else window
        masks.append(window.tril_(first + scores.right) if limited_right else window)
    if scores.key_padding_mask is not None:
        masks.append(scores.key_padding_mask[:, None, None, keys])
    if scores.key_ranges is not None:
        ranges = scores.key_ranges if scores.key_ranges.shape[2] == 1 else scores.key_ranges[:, :, rows]
        key, (start, end) = torch.arange(keys.start, keys.stop, device=device), ranges.unsqueeze(-2).unbind(-1)
        masks.append((key >= start) & (key < end))
    if scores.mask is not None:
        masks.append(rows_and_keys(rows, keys, scores.mask))
    return functools.reduce(operator.and_, masks) if masks else None


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


def _same_sequence(scores: Scores, queries: int, keys: int) -> Tensor | None:
    """Bool (queries, keys), True where both tokens belong to the same packed sequence; None: nothing is packed."""
    starts = scores.cu_seqlens
    if starts is None:
        return None
    number = _sequence_numbers(starts, queries)
    key_number = number if scores.cu_seqlens_k is None else _sequence_numbers(scores.cu_seqlens_k, keys)
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
