"""Attention in chunks of plain products, which bound the memory of scores, for calls without a fused kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_kernels.backends import cpu
from transformer_kernels.ops._dropout import drop, keep_scale
from transformer_kernels.ops._kernels import Grads
from transformer_kernels.ops._softcap import cap, cap_slope
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention._composed import repeat_heads
from transformer_kernels.ops.attention._torch_scores import added_bias

aten = torch.ops.aten

SCORES_AT_ONCE = 1 << 19  # on the CPU: a chunk of scores and its gradient stay in a second-level cache


def forward_in_chunks(call: AttentionCall, visible: Tensor | None, first: tuple[int, int]) -> AttentionResult:
    """out and lse; `first` is the position of the first query and key in dropout's counters."""
    q, k, v, seed, dropout_p, scale = call.q, call.k, call.v, call.seed, call.dropout_p, call.scores.scale
    softcap = call.scores.softcap
    heads = q.shape[1]
    out = like_output(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if q.numel() == 0 or k.numel() == 0:
        return AttentionResult(out.zero_(), lse, None)
    clean = call.scores.cu_seqlens is None  # else NaN in another sequence must not reach a result
    operand = _operand_dtype(q)
    for chunk in _chunks(q, k.shape[2]):
        seen = _seen(visible, chunk)
        key, value = (repeat_heads(x[chunk], heads).to(operand) for x in (k, v))
        query = q[chunk].to(operand) * scale
        scores = cap(torch.matmul(query, key.transpose(-2, -1)).to(lse.dtype), softcap)
        fully_masked = _add_masks(scores, seen, _bias(call, chunk), clean)
        highest = scores.amax(dim=-1, keepdim=True)
        weights = _weights(scores, fully_masked)
        lse_of_chunk = highest - weights.amax(dim=-1, keepdim=True).log()
        if fully_masked is not None:
            lse_of_chunk.masked_fill_(fully_masked, -math.inf)
        lse[chunk] = lse_of_chunk.squeeze(-1)
        if seed is not None:
            position = {"first_head": chunk.start * heads, "first": first[0], "first_column": first[1]}
            drop(weights, seed, dropout_p, scale=keep_scale(dropout_p), **position, in_place=True)
        out[chunk] = _weighted(weights.to(operand), value, seen, clean)
    return AttentionResult(out, lse, None)


def backward_in_chunks(
    call: AttentionCall, visible: Tensor | None, grads: Grads, needs_dbias: bool, into: Into, first: tuple[int, int]
) -> Tensor | None:
    """Fill dq, dk and dv; return dbias."""
    q, k, v, seed, dropout_p, scale = call.q, call.k, call.v, call.seed, call.dropout_p, call.scores.scale
    softcap = call.scores.softcap
    dout, dlse = grads
    heads = q.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = into
    bias = call.scores.bias if needs_dbias else None
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide, memory_format=torch.contiguous_format)
    if q.numel() == 0 or k.numel() == 0:
        for grad in into:
            grad.zero_()
        return as_dtype_of(bias, dbias)
    clean = call.scores.cu_seqlens is None  # else NaN in another sequence must not reach a result
    operand = _operand_dtype(q)
    for chunk in _chunks(q, k.shape[2]):
        seen = _seen(visible, chunk)
        key, value = (_hide(repeat_heads(x[chunk], heads), seen, clean).to(operand) for x in (k, v))
        query, gradient = q[chunk].to(operand) * scale, dout[chunk].to(operand)
        scores = cap(torch.matmul(query, key.transpose(-2, -1)).to(wide), softcap)
        slope = cap_slope(scores, softcap) if softcap > 0.0 else None
        fully_masked = _add_masks(scores, seen, _bias(call, chunk), clean)
        weights = used = _weights(scores, fully_masked, call.scores.sinks)  # P
        dweights = (gradient @ value.transpose(-2, -1)).to(wide)
        if seed is not None:
            position = {"first_head": chunk.start * heads, "first": first[0], "first_column": first[1]}
            used = drop(weights, seed, dropout_p, scale=keep_scale(dropout_p), **position)
            drop(dweights, seed, dropout_p, scale=keep_scale(dropout_p), **position, in_place=True)
        dscores = aten._softmax_backward_data.default(dweights, weights, -1, wide)
        if dlse is not None:
            dscores.addcmul_(weights, dlse[chunk].unsqueeze(-1))
        dproducts = (dscores if slope is None else slope.mul_(dscores)).to(operand)
        dv[chunk] = sum_heads(used.to(operand).transpose(-2, -1) @ gradient, k.shape[1])
        dk[chunk] = sum_heads(dproducts.transpose(-2, -1) @ query, k.shape[1])
        dq[chunk] = (dproducts @ key).mul_(scale)
        if (part := _part(dbias, chunk)) is not None:
            part.add_(dscores.sum_to_size(part.shape))
    return as_dtype_of(bias, dbias)


def _operand_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the products' operands: float32 for 16-bit tensors, unless bfloat16 products are much faster."""
    if q.dtype is torch.bfloat16 and q.device.type == "cpu" and cpu.has_bfloat16_products():
        return torch.bfloat16
    return torch.promote_types(q.dtype, torch.float32)


def _chunks(q: Tensor, keys: int) -> list[slice]:
    """Slices of the batch whose scores are computed together."""
    batch, heads, queries, _ = q.shape
    scores = max(heads * queries * keys, 1)
    step = max(1, SCORES_AT_ONCE // scores) if q.device.type == "cpu" else batch
    return [slice(first, first + step) for first in range(0, batch, max(step, 1))]


def _part(x: Tensor | None, chunk: slice) -> Tensor | None:
    """The chunk of a tensor whose first axis is the batch or 1."""
    return x if x is None or x.dim() < 4 or x.shape[0] == 1 else x[chunk]


def _bias(call: AttentionCall, chunk: slice) -> Tensor | None:
    """The bias of the chunk's scores, including ALiBi."""
    bias, slopes = _part(call.scores.bias, chunk), _part(call.scores.alibi_slopes, chunk)
    return added_bias(call.scores._replace(bias=bias, alibi_slopes=slopes), call.q.shape[2], call.k.shape[2])


def _seen(visible: Tensor | None, chunk: slice) -> Tensor | None:
    """The chunk of the mask; None, on the CPU, if it is a padding mask without padding."""
    seen = _part(visible, chunk)
    if seen is not None and seen.dim() == 4 and seen.shape[2] == 1 and seen.device.type == "cpu" and bool(seen.all()):
        return None
    return seen


def _add_masks(scores: Tensor, visible: Tensor | None, attn_bias: Tensor | None, clean: bool) -> Tensor | None:
    """Add the bias to scores (b, Hq, Lq, Lk) and -inf where masked; returns which rows are fully masked, or None.

    The mask is added if operands are `clean`; otherwise masked scores are overwritten, since NaN - inf is NaN.
    """
    if visible is None and attn_bias is None:
        return None
    added = attn_bias
    if visible is not None:
        bias = torch.zeros((), dtype=scores.dtype, device=scores.device) if attn_bias is None else attn_bias
        added = torch.where(visible, bias, -math.inf)
    assert added is not None
    fully_masked = added.amax(dim=-1, keepdim=True) == -math.inf
    if visible is None or clean:
        scores.add_(added)
    else:
        (scores if attn_bias is None else scores.add_(attn_bias)).masked_fill_(~visible, -math.inf)
    if scores.device.type == "cpu" and not bool(fully_masked.any()):
        return None
    return fully_masked.expand(*(1,) * (4 - fully_masked.dim()), *fully_masked.shape)


def _weights(scores: Tensor, fully_masked: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """softmax over the last axis and the sinks, 0 in fully masked rows."""
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, logits), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    weights = weights if sinks is None else weights[..., :-1].contiguous()
    return weights if fully_masked is None else weights.masked_fill_(fully_masked, 0.0)


def _weighted(weights: Tensor, v: Tensor, visible: Tensor | None, clean: bool) -> Tensor:
    """weights @ v; non-finite values reach only the rows that see them."""
    if visible is None or clean:
        return weights @ v
    non_finite = ~torch.isfinite(v)
    reached = visible.to(weights.dtype) @ non_finite.any(dim=-1, keepdim=True).to(weights.dtype)  # (b, H, Lq, 1)
    out = weights @ v.masked_fill(non_finite, 0.0)
    return out.masked_fill(reached > 0.0, math.nan)


def _hide(x: Tensor, visible: Tensor | None, clean: bool) -> Tensor:
    """Keys or values (b, H, Lk, D), zero if no query attends to them."""
    if visible is None or clean:
        return x
    seen = visible.any(dim=-2).unsqueeze(-1)  # (b or 1, 1, Lk, 1)
    return x.masked_fill(~seen, 0.0)


def sum_heads(x: Tensor, heads: int) -> Tensor:
    """(b, Hq, Lk, D) -> (b, Hk, Lk, D), summed over the query heads of each key head."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(dim=2)


def as_dtype_of(like: Tensor | None, x: Tensor | None) -> Tensor | None:
    """x in the dtype of `like`; None if either is None."""
    return None if x is None or like is None else x.to(like.dtype)
