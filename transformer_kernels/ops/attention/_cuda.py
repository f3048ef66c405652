"""Attention by the kernels of csrc/ops/attention*.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import address, cuda
from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention._common import Angles, beyond, broadcast_strides, shift_gradient
from transformer_kernels.ops.rotary import Heads, RotaryCall
from transformer_kernels.ops.rotary._compiled import Kernels as RotaryKernels

MAX_HEAD_DIM = 256
MAX_FLOAT32_HEAD_DIM = 128
"""In fp32 on GPUs that give a block less than FLOAT32_WIDE_BYTES of shared memory, as those with 99 KiB do."""
FLOAT32_WIDE_BYTES = 131456

MAX_WHOLE_HEAD_DIM = 128
"""Above, a block owns half the columns of dK, and rotary's kernel rotates these back where they lie."""

PATHS = {"auto": 0, "general": 1, "short": 2, "sm90": 3}  # csrc/ops/attention.cu

path = "auto"  # tests and benchmarks name the kernels that they mean


class Rows(NamedTuple):
    """Address of a tensor (B, H, L, D), 0 for none, and its strides in elements."""

    data: int
    batch: int
    head: int
    row: int


class Tables(NamedTuple):
    """`Angles.addresses`, zeros for none."""

    cos: int
    sin: int
    batch: int
    half: int
    interleaved: bool


class Bias(NamedTuple):
    """Address of a bias or of slopes, 0 for none, and its strides, 0 along a broadcast axis."""

    data: int
    is_float: bool
    is_slope: bool
    batch: int
    head: int
    row: int
    column: int


class BiasGradient(NamedTuple):
    """Address of a contiguous tensor, 0 for none, and its shape."""

    data: int
    batches: int
    heads: int
    rows: int
    columns: int


class Launch(NamedTuple):
    """AttentionLaunch of csrc/ops/attention.cu, field by field. 0 stands for an absent tensor."""

    q: Rows
    k: Rows
    v: Rows
    out: Rows
    lse: int
    statistics: int
    dtype: int
    batches: int
    query_heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_dim: int
    key_padding_mask: int
    cu_seqlens: int
    sequences: int
    bias: Bias
    angles: Tables
    seed: int
    dropout_p: float
    scale: float
    softcap: float
    left: int
    right: int
    device: int
    stream: int
    path: int
    dout: Rows = Rows(0, 0, 0, 0)
    dlse: int = 0
    delta: int = 0
    dq: Rows = Rows(0, 0, 0, 0)
    dk: Rows = Rows(0, 0, 0, 0)
    dv: Rows = Rows(0, 0, 0, 0)
    dbias: BiasGradient = BiasGradient(0, 1, 1, 1, 1)


def unsupported(call: AttentionCall) -> str | None:
    """Why these kernels cannot take this call, or None."""
    if (reason := beyond(call)) is not None:
        return reason
    width = call.q.shape[3]
    if width > MAX_HEAD_DIM:
        return f"the head dimension is {width}, above {MAX_HEAD_DIM}; backend='torch' takes it"
    if call.q.dtype is torch.float32 and width > MAX_FLOAT32_HEAD_DIM:
        given = load().shared_memory_per_block(call.q.device.index or 0)
        if given < FLOAT32_WIDE_BYTES:
            return (
                f"the head dimension is {width}; in float32 above {MAX_FLOAT32_HEAD_DIM} the backward pass needs "
                f"{FLOAT32_WIDE_BYTES} bytes of shared memory and this GPU gives a block {given}; use float16 or "
                "bfloat16, or backend='torch'"
            )
    return None


def rotates(call: AttentionCall) -> bool:
    """Whether the kernels rotate queries and keys as they read them; the one for the bias's gradient does not."""
    return call.scores.bias is None


def forward(call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
    """(out, lse)."""
    q = call.q
    batch, heads, queries, _ = q.shape
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    statistics = torch.empty((batch, heads, 2, queries), dtype=torch.float32, device=q.device)
    result = AttentionResult(like_output(q), lse, statistics)
    load().attention_forward(_launch(call, result, angles))
    return result


def backward(
    call: AttentionCall,
    result: AttentionResult,
    grads: Grads,
    wanted: Wanted,
    into: Into | None = None,
    angles: Angles | None = None,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias), bit for bit the same each time; the first three are `into` where it is given."""
    q, k, v, attn_bias, (dout, dlse) = call.q, call.k, call.v, call.scores.bias, grads
    dq, dk, dv = into or (like_output(q), like_output(k), like_output(v))
    delta = torch.empty_like(result.lse)
    gradients: dict[str, Any] = {"dout": _rows(dout), "dlse": address(dlse), "delta": delta.data_ptr()}
    gradients |= {"dq": _rows(dq), "dk": _rows(dk), "dv": _rows(dv)}
    dbias: Tensor | None = None
    if attn_bias is not None and wanted[3]:
        if attn_bias.shape[3] == k.shape[2] > 1:
            dbias = torch.empty(attn_bias.shape, dtype=attn_bias.dtype, device=q.device)
            gradients["dbias"] = BiasGradient(dbias.data_ptr(), *dbias.shape)
        else:
            dbias = shift_gradient(dlse, result.statistics, attn_bias)
    load().attention_backward(_launch(call, result, angles, **gradients))
    if angles is not None and q.shape[3] > MAX_WHOLE_HEAD_DIM:
        heads = Heads(dk, None)
        RotaryKernels(cuda).rotate(RotaryCall(dk, dk, *angles), heads, heads, inverse=True)
    return dq, dk, dv, dbias


def _rows(x: Tensor) -> Rows:
    batch, head, row, _ = x.stride()
    return Rows(x.data_ptr(), batch, head, row)


def _bias(call: AttentionCall) -> Bias:
    slopes = call.scores.alibi_slopes
    bias = call.scores.bias if slopes is None else slopes
    if bias is None:
        return Bias(0, False, False, 0, 0, 0, 0)
    return Bias(bias.data_ptr(), bias.dtype is torch.float32, slopes is not None, *broadcast_strides(bias))


def _launch(call: AttentionCall, result: AttentionResult, angles: Angles | None, **gradients: Any) -> Launch:
    q, k, scores = call.q, call.k, call.scores
    batches, query_heads, query_length, head_dim = q.shape
    device, stream = stream_of(q)
    return Launch(
        _rows(q),
        _rows(k),
        _rows(call.v),
        _rows(result.out),
        result.lse.data_ptr(),
        address(result.statistics),
        DTYPE_CODES[q.dtype],
        batches,
        query_heads,
        k.shape[1],
        query_length,
        k.shape[2],
        head_dim,
        address(scores.key_padding_mask),
        address(scores.cu_seqlens),
        0 if scores.cu_seqlens is None else len(scores.cu_seqlens) - 1,
        _bias(call),
        Tables(0, 0, 0, 0, False) if angles is None else Tables(*angles.addresses()),
        address(call.seed),
        call.dropout_p,
        scores.scale,
        scores.softcap,
        scores.left,
        scores.right,
        device,
        stream,
        PATHS[path],
        **gradients,
    )
