"""Attention by PyTorch's differentiable operators, in blocks of queries: what its higher derivatives are those of.

The memory of every derivative that autograd computes is linear in the length: of a block only the operands are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.ops._derivatives import Block, Parts, blockwise
from transformer_kernels.ops._dropout import dropped_in, keep_scale
from transformer_kernels.ops._softcap import capped

if TYPE_CHECKING:
    from transformer_kernels.ops.attention import AttentionCall
    from transformer_kernels.ops.attention.scores import Scores

SCORES_AT_ONCE = 1 << 19
"""Of a block of queries."""

MIN_ROWS = 32
"""Queries of a block: fewer would read keys and values too often."""


def composed(call: AttentionCall, with_lse: bool) -> tuple[Tensor, ...]:
    """out (B, Hq, Lq, D), and lse (B, Hq, Lq) if required."""
    q, k, scores = call.q, call.k, call.scores
    heads, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    padding = scores.key_padding_mask
    query, key, value = (x.to(wide) for x in (q, k, call.v))
    bias, sinks = (x if x is None else x.to(wide) for x in (scores.bias, scores.sinks))
    if padding is not None:  # NaN there reaches no result
        key, value = (x.masked_fill(~padding[:, None, :, None], 0.0) for x in (key, value))
    key, value = (repeat_heads(x, heads) for x in (key, value))
    blocks, end = [], 0
    for span, keys in spans(scores, q.shape[2], k.shape[2]):
        rows = max(MIN_ROWS, SCORES_AT_ONCE // max(1, q.shape[0] * heads * (keys.stop - keys.start)))
        for first in range(span.start, span.stop, rows):
            own = slice(first, min(first + rows, span.stop))
            blocks.append(_block(call, own, keys, keys.stop - span.stop, with_lse))
        end = span.stop
    if end < q.shape[2] or not blocks:
        blocks.append(_block(call, slice(end, q.shape[2]), slice(0, 0), 0, with_lse))
    out, *lse = blockwise(blocks, 2, query, key, value, bias, sinks)
    return out.to(q.dtype), *lse


def spans(scores: Scores, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """The queries and the keys of each packed sequence that has some; of all, where nothing is packed."""
    if scores.cu_seqlens is None:
        return [(slice(0, queries), slice(0, keys))]
    starts = scores.cu_seqlens.tolist()
    key_starts = starts if scores.cu_seqlens_k is None else scores.cu_seqlens_k.tolist()
    own, other = ([slice(*ends) for ends in itertools.pairwise(offsets)] for offsets in (starts, key_starts))
    return [pair for pair in zip(own, other, strict=True) if any(part.start != part.stop for part in pair)]


def rows_and_keys(rows: slice, keys: slice, x: Tensor) -> Tensor:
    """The part of a bias or mask with four axes, which broadcast, for these queries and keys."""
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x if x.shape[3] == 1 else x[..., keys]


def _block(call: AttentionCall, rows: slice, keys: slice, shift: int, with_lse: bool) -> Block:
    """out and lse of some queries, of which query i is aligned to key i + shift, for these keys."""
    scores, device, seed = call.scores, call.q.device, call.seed
    first, end = max(keys.start, rows.start + shift - scores.left), min(keys.stop, rows.stop + shift + scores.right)
    seen_keys = slice(first, end) if first < end else slice(0, 0)

    def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Parts:
        if first >= end or not q.numel():
            return _zeros(q, v, with_lse)
        seen = _visible(scores, rows, seen_keys, shift, device)
        products = capped((q @ k.transpose(-2, -1)) * scores.scale, scores.softcap)
        products = products if bias is None else products + bias
        if scores.alibi_slopes is not None:
            products = products - scores.alibi_slopes * _distances(rows, seen_keys, shift, device).abs()
        weights, *lse = normalised(products, seen, seen is not None or bias is not None, sinks, with_lse)
        if seed is not None:
            region = 0, math.prod(q.shape[:2]), rows.stop - rows.start, end - first, rows.start, first
            dropped = dropped_in(seed, call.dropout_p, region).view(weights.shape)
            weights = weights.masked_fill(dropped, 0.0) * keep_scale(call.dropout_p)
        return weights @ v, *lse

    def take(tensors: Sequence[Any]) -> Parts:
        q, k, v, bias, sinks = tensors
        own = zip((q, k, v), (rows, seen_keys, seen_keys), strict=True)
        bias = None if bias is None else rows_and_keys(rows, seen_keys, bias)
        return *(None if x is None else _narrowed(x, part) for x, part in own), bias, sinks

    def give(outputs: Sequence[Any]) -> Parts:
        return tuple(None if x is None else _narrowed(x, rows) for x in outputs)

    return Block(attended, take, give)


def normalised(
    scores: Tensor, seen: Tensor | None, may_be_hidden: bool, sinks: Tensor | None, with_lse: bool = False
) -> tuple[Tensor, ...]:
    """The softmax of the scores (B, Hq, Lq, Lk) that are seen and the sinks, and its lse; 0 and -inf in hidden rows."""
    hidden = None
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if may_be_hidden:
        hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
        scores = scores.masked_fill(hidden, 0.0)
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, logits), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    weights = weights if sinks is None else weights[..., :-1]
    weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
    if not with_lse:
        return (weights,)
    lse = torch.logsumexp(scores, dim=-1)
    return weights, lse if hidden is None else lse.masked_fill(hidden.squeeze(-1), -math.inf)


def _narrowed(x: Tensor, part: slice) -> Tensor:
    """A part of the positions of x (B, H, L, ...); batches of gradients have no rule for `x[:, :, part]`."""
    return x.narrow(2, part.start, part.stop - part.start)


def _zeros(q: Tensor, v: Tensor, with_lse: bool) -> Parts:
    """out and lse of queries that see no key."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    return (out, q.new_full(q.shape[:3], -math.inf)) if with_lse else (out,)


def _distances(rows: slice, keys: slice, shift: int, device: torch.device) -> Tensor:
    """Key position minus aligned query position, int64 (queries, keys)."""
    position = torch.arange(rows.start + shift, rows.stop + shift, device=device)
    return torch.arange(keys.start, keys.stop, device=device) - position[:, None]


def _visible(scores: Scores, rows: slice, keys: slice, shift: int, device: torch.device) -> Tensor | None:
    """Bool, broadcasts to the scores of these queries and keys, True = visible; None: all."""
    masks = []
    if keys.stop - 1 > rows.start + shift + scores.right or keys.start < rows.stop - 1 + shift - scores.left:
        away = _distances(rows, keys, shift, device)
        masks.append((away >= -scores.left) & (away <= scores.right))
    if scores.key_padding_mask is not None:
        masks.append(scores.key_padding_mask[:, None, None, keys])
    if scores.key_ranges is not None:
        ranges = scores.key_ranges if scores.key_ranges.shape[2] == 1 else scores.key_ranges[:, :, rows]
        key, (first, end) = torch.arange(keys.start, keys.stop, device=device), ranges.unsqueeze(-2).unbind(-1)
        masks.append((key >= first) & (key < end))
    if scores.mask is not None:
        masks.append(rows_and_keys(rows, keys, scores.mask))
    seen = None
    for mask in masks:
        seen = mask if seen is None else seen & mask
    return seen


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hk, Lk, D) -> (B, Hq, Lk, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(x.shape[1], 1), dim=1)
