"""Attention by PyTorch's differentiable operators, in blocks of queries; higher derivatives differentiate it.

The memory of every derivative that autograd computes is linear in the length: only the operands of a block are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops._derivatives import Block, Parts, blockwise
from transformer_kernels.ops._dropout import dropped_in, keep_scale
from transformer_kernels.ops._softcap import capped
from transformer_kernels.ops.attention._torch_scores import distances, rows_and_keys, visible_block

if TYPE_CHECKING:
    from transformer_kernels.ops.attention import AttentionCall
    from transformer_kernels.ops.attention._call import Scores

SCORES_AT_ONCE = 1 << 19
"""Of a block of queries."""

MIN_ROWS = 64
"""Queries of a block: fewer would read keys and values too often."""


def composed(call: AttentionCall, with_lse: bool) -> tuple[Tensor, ...]:
    """out (B, Hq, Lq, D), and lse (B, Hq, Lq) if required."""
    q, k, scores = call.q, call.k, call.scores
    wide = torch.promote_types(q.dtype, torch.float32)
    query = q.to(wide)
    key, value = _without_padding(call, k), _without_padding(call, call.v)
    bias, sinks = (x if x is None else x.to(wide) for x in (scores.bias, scores.sinks))
    blocks = [_block(call, block, with_lse) for block in _query_blocks(call)]
    out, *lse = blockwise(blocks, 2, query, key, value, bias, sinks)
    return out.to(q.dtype), *lse


def output_tangents(call: AttentionCall, out: Tensor, tangents: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse for tangents of q, k and v, without dropout and softcap.

    With P the weights and S' = scale (q' k^T + q k'^T): lse' = r = rowsum(P * S') and
    out' = (P * S') v - r * out + P v'.
    """
    scores, wide = call.scores, torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = call.q.to(wide), _without_padding(call, call.k), _without_padding(call, call.v)
    bias, sinks = (x if x is None else x.to(wide) for x in (scores.bias, scores.sinks))
    dq = torch.zeros_like(q) if tangents[0] is None else tangents[0].to(wide)
    dk, dv = (None if x is None else _without_padding(call, x) for x in tangents[1:3])
    both = dq if dk is None else torch.cat((dq, q), dim=-1)
    keys = k if dk is None else torch.cat((k, dk), dim=-1)
    dout, dlse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for block in _query_blocks(call):
        rows, own = block.rows, block.seen_keys
        if own.start == own.stop:
            dout[:, :, rows], dlse[:, :, rows] = 0.0, 0.0
            continue
        (weights,) = _weights(call, block, q[:, :, rows], k[:, :, own], rows_and_keys(rows, own, bias), sinks)
        changes = torch.matmul(both[:, :, rows], keys[:, :, own].mT).mul_(scores.scale).mul_(weights)
        change = torch.sum(changes, dim=-1, keepdim=True, out=dlse[:, :, rows].unsqueeze(-1))
        part = torch.matmul(changes, v[:, :, own]).addcmul_(change, out[:, :, rows].to(wide), value=-1)
        dout[:, :, rows] = part if dv is None else part.add_(weights @ dv[:, :, own])
    return dout.to(call.q.dtype), dlse


def _without_padding(call: AttentionCall, x: Tensor) -> Tensor:
    """Keys, values or tangents of these, in float32 or wider, for each query head; 0 where they are padding."""
    x, padding = x.to(torch.promote_types(x.dtype, torch.float32)), call.scores.key_padding_mask
    x = x if padding is None else x.masked_fill(~padding[:, None, :, None], 0.0)
    return repeat_heads(x, call.q.shape[1])


class _QueryBlock(NamedTuple):
    """Some queries and their visible keys; query i is aligned to key i + shift."""

    rows: slice
    seen_keys: slice
    shift: int
    may_be_hidden: bool  # by the limits of a window


def _query_blocks(call: AttentionCall) -> list[_QueryBlock]:
    """The blocks of queries of each sequence, and what follows them."""
    scores, (batch, heads, queries, _) = call.scores, call.q.shape
    found, end = [], 0
    for span, keys in spans(scores, queries, call.k.shape[2]):
        step = max(MIN_ROWS, SCORES_AT_ONCE // max(1, batch * heads * (keys.stop - keys.start)))
        shift, end = keys.stop - span.stop, span.stop
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            first, last = max(keys.start, start + shift - scores.left), min(keys.stop, stop + shift + scores.right)
            seen = slice(first, last) if first < last and call.q.numel() else slice(0, 0)
            found.append(_QueryBlock(slice(start, stop), seen, shift, start + shift < keys.start))
    if end < queries or not found:
        found.append(_QueryBlock(slice(end, queries), slice(0, 0), 0, False))
    return found


def spans(scores: Scores, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """The queries and the keys of each packed sequence that has some; of all, where nothing is packed."""
    if scores.cu_seqlens is None:
        return [(slice(0, queries), slice(0, keys))]
    starts = scores.cu_seqlens.tolist()
    key_starts = starts if scores.cu_seqlens_k is None else scores.cu_seqlens_k.tolist()
    own, other = ([slice(*ends) for ends in itertools.pairwise(offsets)] for offsets in (starts, key_starts))
    return [pair for pair in zip(own, other, strict=True) if any(part.start != part.stop for part in pair)]


def _block(call: AttentionCall, block: _QueryBlock, with_lse: bool) -> Block:
    """out and lse of some queries."""
    rows, keys, seed = block.rows, block.seen_keys, call.seed

    def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Parts:
        if keys.start == keys.stop:
            return _zeros(q, v, with_lse)
        weights, *lse = _weights(call, block, q, k, bias, sinks, with_lse)
        if seed is not None:
            region = 0, math.prod(q.shape[:2]), q.shape[2], k.shape[2], rows.start, keys.start
            dropped = dropped_in(seed, call.dropout_p, region).view(weights.shape)
            weights = weights.masked_fill(dropped, 0.0) * keep_scale(call.dropout_p)
        return weights @ v, *lse

    def take(tensors: Sequence[Any]) -> Parts:
        q, k, v, bias, sinks = tensors
        own = zip((q, k, v), (rows, keys, keys), strict=True)
        parts = (None if x is None else _narrowed(x, part) for x, part in own)
        return *parts, rows_and_keys(rows, keys, bias), sinks

    def give(outputs: Sequence[Any]) -> Parts:
        return tuple(None if x is None else _narrowed(x, rows) for x in outputs)

    return Block(attended, take, give)


def _weights(
    call: AttentionCall,
    block: _QueryBlock,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    with_lse: bool = False,
) -> tuple[Tensor, ...]:
    """The weights of a block, and lse."""
    scores, (rows, keys, shift, may_be_hidden) = call.scores, block
    products = capped((q * scores.scale) @ k.mT, scores.softcap)
    products = products if bias is None else products + bias
    if scores.alibi_slopes is not None:
        products = products - scores.alibi_slopes * distances(rows, keys, shift, q.device).abs()
    masks = bias, scores.mask, scores.key_ranges, scores.key_padding_mask
    may_be_hidden = may_be_hidden or any(mask is not None for mask in masks)
    return normalised(products, visible_block(scores, rows, keys, shift, q.device), may_be_hidden, sinks, with_lse)


def normalised(
    scores: Tensor, seen: Tensor | None, may_be_hidden: bool, sinks: Tensor | None, with_lse: bool = False
) -> tuple[Tensor, ...]:
    """The softmax of the visible scores (B, Hq, Lq, Lk) and the sinks, and its lse; 0 and -inf in fully masked rows."""
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
    """out and lse of queries without visible keys."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    return (out, q.new_full(q.shape[:3], -math.inf)) if with_lse else (out,)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hk, Lk, D) -> (B, Hq, Lk, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(x.shape[1], 1), dim=1)
