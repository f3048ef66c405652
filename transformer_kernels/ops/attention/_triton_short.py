"""Triton: attention where all keys of a head fit into one tile, the shape of small BERTs and GPTs.

Forward needs no online softmax. Backward is one pass: the program that holds a head's keys sees every query, so dq, dk
and dv come out of the same weights, computed once.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LN_2, dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED
from transformer_kernels.ops.attention._triton_backward_key import key_gradient_block
from transformer_kernels.ops.attention._triton_tile import (
    biased,
    exponential,
    finite_rows,
    keep_tile,
    load_bias,
    load_lse,
    load_rows,
    multiply,
    score_unit,
    store_rows,
    visible_pairs,
    wide,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_short_forward_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    padding_pointer,  # (B, Lk), contiguous, or None
    bias_pointer,  # (B, Hq, Lq, Lk), broadcast, or None
    seed_pointer,  # (1,), or None
    query_heads,
    query_length,
    key_length,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bias_batch,
    bias_head,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BLOCK_M queries of one head and all of its keys."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    blocks = tl.cdiv(query_length, BLOCK_M)
    batch_head = tl.program_id(0) // blocks
    first_row = tl.program_id(0) % blocks * BLOCK_M
    batch, head = batch_head // query_heads, batch_head % query_heads
    key_head = head // GROUP
    tile_rows, tile_columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    rows = first_row + tile_rows
    q = load_rows(
        q_pointer + batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT), 0, 0, first_row,
        wide(q_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True, False,
    )  # [M, D]  # fmt: skip
    k = load_rows(
        k_pointer + batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT), 0, 0, 0,
        wide(k_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
    )  # [N, D]  # fmt: skip
    v = load_rows(
        v_pointer + batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT), 0, 0, 0,
        wide(v_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
    )  # [N, D]  # fmt: skip
    visible = visible_pairs(rows, tile_columns, key_length - query_length, key_length, window, CAUSAL, WINDOW)
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
        real = tl.load(padding_pointer + tile_columns, mask=tile_columns < key_length, other=0) != 0
        visible = visible & real
        v = tl.where(tl.reshape(real, (BLOCK_N, 1)), v, tl.zeros_like(v))
    scores = multiply(dot_operand(q, q.dtype), tl.trans(dot_operand(k, k.dtype)), PRECISION)  # [M, N]
    scores *= scale * score_unit(NATURAL)
    if BIAS != "none":
        bias_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
        bias = load_bias(
            bias_pointer, first_row, 0, tile_rows, tile_columns, bias_row, query_length, key_length, True, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    scores = tl.where(visible, scores, float("-inf"))
    row_max = tl.max(scores, 1)
    weights = exponential(scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None], NATURAL)
    row_sum = tl.sum(weights, 1)
    if DROPOUT:
        weights = tl.where(keep_tile(tl.load(seed_pointer), 0, rows, batch_head, threshold, BLOCK_N), weights, 0.0)
    empty = row_sum == 0.0
    divisor = tl.where(empty, 1.0, row_sum)
    if CAUSAL or WINDOW:
        v, trace = finite_rows(v)
        taint = tl.sum(tl.where(visible, trace[None, :], 0.0), 1)
    out = multiply(dot_operand(weights, v.dtype), dot_operand(v, v.dtype), PRECISION)  # [M, D]
    out *= (keep_scale / divisor)[:, None]
    if CAUSAL or WINDOW:
        out += taint[:, None]
    lse = tl.where(empty, float("-inf"), row_max / score_unit(NATURAL) + tl.log2(divisor) * LN_2)
    out_pointer += (tl.cast(batch, tl.int64) * query_length * query_heads + head) * HEAD_DIM
    out = from_fp32(out, out_pointer.dtype.element_ty)
    out_row = tl.cast(query_heads, tl.int64) * HEAD_DIM
    store_rows(
        out_pointer, out, first_row, out_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, HEAD_DIM & -HEAD_DIM
    )  # fmt: skip
    lse_rows = first_row + tl.arange(0, BLOCK_M)
    lse_pointer += tl.cast(batch_head, tl.int64) * query_length
    tl.store(lse_pointer + lse_rows, lse, mask=lse_rows < query_length)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_short_backward_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    dlse_pointer,  # (B, Hq, Lq), contiguous, or None
    delta_pointer,  # (B, Hq, Lq), contiguous, written for the bias gradient, or None
    correction_pointer,  # likewise, for fp32 operands; else None
    dq_pointer,  # (B, Hq, Lq, D)
    dk_pointer,  # (B, Hk, Lk, D)
    dv_pointer,  # (B, Hk, Lk, D)
    padding_pointer,  # (B, Lk), contiguous, or None
    bias_pointer,  # (B, Hq, Lq, Lk), broadcast, or None
    seed_pointer,  # (1,), or None
    query_heads,
    query_length,
    key_length,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    dout_batch,
    dout_head,
    dout_row,
    dq_batch,
    dq_head,
    dq_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    bias_batch,
    bias_head,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns one key head: all its keys stay here while the queries of its group pass by."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    key_heads = query_heads // GROUP
    batch, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    seed = tl.load(seed_pointer) if DROPOUT else 0
    keys = tl.arange(0, BLOCK_N)
    k = load_rows(
        k_pointer + batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT), 0, 0, 0,
        wide(k_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
    )  # [N, D]  # fmt: skip
    v = load_rows(
        v_pointer + batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT), 0, 0, 0,
        wide(v_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
    )  # [N, D]  # fmt: skip
    real = None
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
        real = tl.load(padding_pointer + keys, mask=keys < key_length, other=0) != 0
        k = tl.where(real[:, None], k, tl.zeros_like(k))
        v = tl.where(real[:, None], v, tl.zeros_like(v))
    if CAUSAL or WINDOW:
        finite_k, _ = finite_rows(k)
    else:
        finite_k = k
    operand_k, operand_v = dot_operand(k, k.dtype), dot_operand(v, v.dtype)
    operand_finite_k = dot_operand(finite_k, k.dtype)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    unit = tl.full([BLOCK_M], 1.0, tl.float32)
    blocks = tl.cdiv(query_length, BLOCK_M)
    for step in tl.range(0, GROUP * blocks, num_stages=1):
        head = key_head * GROUP + step // blocks
        first_row = step % blocks * BLOCK_M
        batch_head = batch * query_heads + head
        rows = first_row + tl.arange(0, BLOCK_M)
        row_offset = tl.cast(batch_head, tl.int64) * query_length
        q = load_rows(
            q_pointer + batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT), 0, 0, first_row,
            wide(q_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True, False,
        )  # [M, D]  # fmt: skip
        dout = load_rows(
            dout_pointer + batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT), 0, 0, first_row,
            wide(dout_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True, False,
        )  # [M, D]  # fmt: skip
        delta = tl.zeros([BLOCK_M], tl.float32)
        if dlse_pointer is not None:
            delta -= tl.load(dlse_pointer + row_offset + rows, mask=rows < query_length, other=0.0)
        lse = load_lse(lse_pointer + row_offset, rows, query_length, True, NATURAL)
        bias_head_pointer = bias_pointer
        if BIAS != "none":
            bias_head_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
        dk, dv, dscores, delta, correction = key_gradient_block(
            dk, dv, operand_k, operand_v, dot_operand(q, q.dtype), dot_operand(dout, dout.dtype), lse, delta, unit, 0,
            first_row, None, bias_head_pointer, seed, real, batch_head, query_length, key_length, bias_row,
            scale * score_unit(NATURAL), window, threshold, keep_scale, True, CAUSAL, WINDOW, PADDING, False, BIAS,
            BIAS_ALIGNMENT, DROPOUT, True, q.dtype, PRECISION, NATURAL,
        )  # fmt: skip
        if delta_pointer is not None:
            tl.store(delta_pointer + row_offset + rows, delta, mask=rows < query_length)
        if correction_pointer is not None:
            tl.store(correction_pointer + row_offset + rows, correction, mask=rows < query_length)
        dq = multiply(tl.trans(dscores), operand_finite_k, PRECISION) * scale  # [M, D]
        dq = from_fp32(dq, dq_pointer.dtype.element_ty)
        store_rows(
            dq_pointer + batch * wide(dq_batch, ALIGNMENT) + head * wide(dq_head, ALIGNMENT), dq, first_row,
            wide(dq_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT,
        )  # fmt: skip
    dk, dv = dk * scale, dv * keep_scale
    dk, dv = from_fp32(dk, dk_pointer.dtype.element_ty), from_fp32(dv, dv_pointer.dtype.element_ty)
    dk_pointer += batch * wide(dk_batch, ALIGNMENT) + key_head * wide(dk_head, ALIGNMENT)
    dv_pointer += batch * wide(dv_batch, ALIGNMENT) + key_head * wide(dv_head, ALIGNMENT)
    store_rows(dk_pointer, dk, 0, wide(dk_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT)
    store_rows(dv_pointer, dv, 0, wide(dv_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT)
