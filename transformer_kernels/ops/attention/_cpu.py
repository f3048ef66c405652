"""Attention on the CPU: csrc/cpu/products, one call for each pass."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from transformer_kernels.backends import address, cpu
from transformer_kernels.backends.cpu import DTYPE_CODES
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention._common import Angles, broadcast_strides, shift_gradient

NO_HEADS = (0, 0, 0, 0, 0)
NO_ANGLES = (0, 0, 0, 0, 0)


def forward(call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
    """out (B, Hq, Lq, D), in memory (B, Lq, Hq, D), and lse (B, Hq, Lq)."""
    out = like_output(call.q)
    batch, heads, queries, _ = call.q.shape
    lse = call.q.new_empty((batch, heads, queries), dtype=torch.float32)
    statistics = call.q.new_empty((batch, heads, 2, queries), dtype=torch.float32)
    result = AttentionResult(out, lse, statistics)
    if _without_sequences(call):
        out.zero_(), lse.fill_(-torch.inf), statistics.fill_(-torch.inf)
    else:
        cpu.load().attention_forward(_packed(call, angles, result), *_numbers(call))
    return result


def backward(
    call: AttentionCall,
    result: AttentionResult,
    grads: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    into: Into | None = None,
    angles: Angles | None = None,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv (written into `into` where that is given) and dbias, None where not wanted."""
    dout, dlse = grads
    dout = torch.zeros_like(result.out) if dout is None else dout
    bias = call.scores.bias
    if into is None:
        heads = zip((call.q, call.k, call.v), wanted[:3], strict=True)
        gradients = tuple(like_output(x) if needed else None for x, needed in heads)
    else:
        gradients = into
    if _without_sequences(call):
        zeros = (None if each is None else each.zero_() for each in gradients)
        return *zeros, torch.zeros_like(bias) if bias is not None and wanted[3] else None
    computed = None
    if bias is not None and wanted[3] and bias.shape[3] > 1:
        computed = bias.new_zeros(bias.shape, dtype=torch.float32)
    packed = _packed(call, angles, result, (dout, *gradients), dlse, computed)
    cpu.load().attention_backward(packed, *_numbers(call))
    if bias is None or not wanted[3]:
        return *gradients, None
    return *gradients, shift_gradient(dlse, result.statistics, bias) if computed is None else computed.to(bias.dtype)


def _without_sequences(call: AttentionCall) -> bool:
    """Whether the call is packed and has no sequence, so that no token sees any."""
    starts = call.scores.cu_seqlens
    return starts is not None and len(starts) == 1


def _packed(
    call: AttentionCall,
    angles: Angles | None,
    result: AttentionResult,
    gradients: tuple[Tensor | None, ...] = (None, None, None, None),
    dlse: Tensor | None = None,
    dbias: Tensor | None = None,
) -> cpu.Held:
    """The fields of AttentionCall in csrc/cpu/products/attention.h."""
    q, k, scores = call.q, call.k, call.scores
    bias, slopes, starts = scores.bias, scores.alibi_slopes, scores.cu_seqlens
    key_starts = starts if scores.cu_seqlens_k is None else scores.cu_seqlens_k
    no_bias, rotated = (0, 0, 0, 0, 0, 0), angles is not None
    fields = array(
        "q",
        (
            DTYPE_CODES[q.dtype], q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
            scores.left, scores.right,
            *_heads(q, rotated), *_heads(k, rotated), *_heads(call.v), *_heads(result.out),
            address(result.lse), address(result.statistics), address(scores.key_padding_mask), address(call.seed),
            *(no_bias if bias is None else (bias.data_ptr(), DTYPE_CODES[bias.dtype], *broadcast_strides(bias))),
            address(slopes), *((0, 0) if slopes is None else broadcast_strides(slopes)[:2]),
            address(starts), address(key_starts), 0 if starts is None else len(starts) - 1,
            *_heads(gradients[0]), *_heads(gradients[1], rotated), *_heads(gradients[2], rotated),
            *_heads(gradients[3]),
            address(dlse), address(dbias), *((0, 0, 0, 0) if bias is None else bias.shape),
            *(NO_ANGLES if angles is None else angles.addresses()),
        ),
    )  # fmt: skip
    return cpu.Held(fields.buffer_info()[0], fields)


def _numbers(call: AttentionCall) -> tuple[float, float, float]:
    return call.scores.scale, call.dropout_p, call.scores.softcap


def _heads(x: Tensor | None, rotated: bool = False) -> tuple[int, ...]:
    """Address, strides of batches, heads and rows, and whether the rows are rotated."""
    return NO_HEADS if x is None else (x.data_ptr(), *x.stride()[:3], rotated)
