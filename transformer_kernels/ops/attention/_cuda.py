"""Attention by the kernels of csrc/ops/attention*.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output

MAX_HEAD_DIM = 256
PATHS = {"auto": 0, "general": 1, "short": 2, "sm90": 3}  # csrc/ops/attention.cu

path = "auto"  # tests and benchmarks name the kernels that they mean


def unsupported(call: AttentionCall) -> str | None:
    """Why these kernels cannot take this call, or None."""
    if call.q.shape[3] > MAX_HEAD_DIM:
        return f"the head dimension is {call.q.shape[3]}, above {MAX_HEAD_DIM}; backend='torch' takes it"
    return None


def forward(call: AttentionCall) -> AttentionResult:
    """(out, lse)."""
    q, k, v = call[:3]
    out = like_output(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    load().attention_forward(
        DTYPE_CODES[q.dtype],
        *_rows(q),
        *_rows(k),
        *_rows(v),
        *_rows(out),
        lse.data_ptr(),
        *_problem(call),
        PATHS[path],
    )
    return AttentionResult(out, lse)


def backward(
    call: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, into: Into | None = None
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias), bit for bit the same each time; the first three are `into` where it is given."""
    (q, k, v), attn_bias, (out, lse), (dout, dlse) = call[:3], call.attn_bias, result, grads
    dq, dk, dv = into or (like_output(q), like_output(k), like_output(v))
    dbias: Tensor | None = None
    computed_dbias: tuple[int, ...] = (0, 1, 1, 1, 1)  # address and shape of what the kernels compute
    if attn_bias is not None and wanted[3]:
        dbias = torch.empty(attn_bias.shape, dtype=attn_bias.dtype, device=q.device)
        if attn_bias.shape[3] == k.shape[2] > 1:
            computed_dbias = (dbias.data_ptr(), *dbias.shape)
        else:
            dbias.copy_(_gradient_of_row_shift(dlse, lse, attn_bias))
    delta = torch.empty_like(lse)
    load().attention_backward(
        DTYPE_CODES[q.dtype],
        *_rows(dout),
        0 if dlse is None else dlse.data_ptr(),
        *_rows(q),
        *_rows(k),
        *_rows(v),
        *_rows(out),
        lse.data_ptr(),
        delta.data_ptr(),
        *_rows(dq),
        *_rows(dk),
        *_rows(dv),
        *computed_dbias,
        *_problem(call),
        PATHS[path],
    )
    return dq, dk, dv, dbias


def _gradient_of_row_shift(dlse: Tensor | None, lse: Tensor, attn_bias: Tensor) -> Tensor:
    """Of a bias with one value for all keys of a row: softmax ignores it, lse grows with it where a key is seen."""
    if dlse is None:
        return torch.zeros_like(lse[:1, :1, :1, None]).expand(attn_bias.shape)
    broadcast = [axis for axis, size in enumerate(attn_bias.shape[:3]) if size == 1]
    seen = dlse.masked_fill(lse == -torch.inf, 0.0)
    return (seen.sum(broadcast, keepdim=True) if broadcast else seen)[..., None]


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """Address, and the strides of batch, head and row."""
    batch, head, row, _ = x.stride()
    return x.data_ptr(), batch, head, row


def _problem(call: AttentionCall) -> tuple[int | float | bool, ...]:
    """The arguments that forward and backward share: sizes, masks, dropout, and where to launch."""
    q, k, _, key_padding_mask, attn_bias, seed, cu_seqlens, causal, window, dropout_p, scale = call
    batch, query_heads, query_length, width = q.shape
    bias: tuple[int | bool, ...] = (0, False, 0, 0, 0, 0)
    if attn_bias is not None:
        strides = [0 if size == 1 else stride for size, stride in zip(attn_bias.shape, attn_bias.stride(), strict=True)]
        bias = (attn_bias.data_ptr(), attn_bias.dtype is torch.float32, *strides)
    return (
        batch,
        query_heads,
        k.shape[1],
        query_length,
        k.shape[2],
        width,
        0 if key_padding_mask is None else key_padding_mask.data_ptr(),
        *((0, 0) if cu_seqlens is None else (cu_seqlens.data_ptr(), len(cu_seqlens) - 1)),
        *bias,
        0 if seed is None else seed.data_ptr(),
        dropout_p,
        scale,
        causal,
        0 if window is None else window,
        *stream_of(q),
    )
