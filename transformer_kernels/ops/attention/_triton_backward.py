"""Triton: attention backward for any lengths, without atomics: dq here, dk and dv in
`_triton_backward_key.py`, and dbias, where it is asked for, in `_triton_backward_bias.py`.

With P = exp(S - lse) recomputed, dP = dout v^T and delta = rowsum(dout * out) - dlse:
dS = P * (dP - delta), dq = scale dS k, dk = scale dS^T q, dv = P^T dout, dbias = dS.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32, to_fp32
from transformer_kernels.ops.attention._triton_sequences import within_sequence
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    any_real,
    biased,
    exponential,
    finite_rows,
    keep_tile,
    key_blocks,
    load_bias,
    load_lse,
    load_rows,
    multiply,
    score_unit,
    store_rows,
    tile_of_program,
    visible_pairs,
    wide,
)

UNSPECIALIZED = [
    "query_heads",
    "query_length",
    "key_length",
    "q_batch",
    "q_head",
    "q_row",
    "k_batch",
    "k_head",
    "k_row",
    "v_batch",
    "v_head",
    "v_row",
    "dout_batch",
    "dout_head",
    "dout_row",
    "dq_batch",
    "dq_head",
    "dq_row",
    "dk_batch",
    "dk_head",
    "dk_row",
    "dv_batch",
    "dv_head",
    "dv_row",
    "bias_batch",
    "bias_head",
    "bias_row",
    "window",
    "threshold",
    "section",
]
"""A new length, stride or head count compiles nothing anew; what alignment matters is in ALIGNMENT."""


@triton.jit
def query_gradient_block(
    dq,
    weight_sum,
    q,
    dout,
    lse,
    delta,
    start,
    k_pointer,
    v_pointer,
    padding_pointer,
    sequences_pointer,
    bias_pointer,
    seed,
    batch_head,
    first_row,
    query_length,
    key_length,
    k_row,
    v_row,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Add what one block of keys gives to the gradient of a query tile and, for fp32, to the sum of its weights."""
    tile_rows = tl.arange(0, q.shape[0])[:, None]
    tile_columns = tl.arange(0, BLOCK_N)[None, :]
    rows, columns = first_row + tile_rows, start + tile_columns
    k = load_rows(
        k_pointer, 0, 0, start, k_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [N, D]
    if MASKED:
        visible = visible_pairs(rows, columns, key_length - query_length, key_length, window, CAUSAL, WINDOW)
        if PADDING:
            visible = visible & (tl.load(padding_pointer + columns, mask=columns < key_length, other=0) != 0)
        if SEQUENCES:
            visible = visible & within_sequence(sequences_pointer, rows, columns, key_length)
        if CAUSAL or WINDOW or PADDING or SEQUENCES:
            k, _ = finite_rows(k)
    operand_k = dot_operand(k, k.dtype)
    scores = multiply(q, tl.trans(operand_k), PRECISION) * scale  # [M, N]
    if BIAS != "none":
        bias = load_bias(
            bias_pointer, first_row, start, tile_rows, tile_columns, bias_row, query_length, key_length, MASKED, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    weights = exponential(scores - lse[:, None], NATURAL)
    if NATURAL:
        weight_sum += tl.sum(tl.where(visible, weights, 0.0) if MASKED else weights, 1)
    v = load_rows(
        v_pointer, 0, 0, start, v_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [N, D]
    dweights = multiply(dout, tl.trans(dot_operand(v, v.dtype)), PRECISION)  # [M, N]
    if DROPOUT:
        keep = keep_tile(seed, start, rows, batch_head, threshold, BLOCK_N)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    dscores = weights * (dweights - delta[:, None])
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
    return accumulate(dot_operand(dscores, k.dtype), operand_k, dq, PRECISION), weight_sum  # [M, D]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_query_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    dlse_pointer,  # (B, Hq, Lq), contiguous, or None
    delta_pointer,  # (B, Hq, Lq), contiguous: written here, for the kernels that follow
    correction_pointer,  # likewise, for fp32 operands; else None
    dq_pointer,  # (B, Hq, Lq, D)
    padding_pointer,  # (B, Lk), contiguous, or None
    sequences_pointer,  # (2, Lk), contiguous, or None
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
    bias_batch,
    bias_head,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    section,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BLOCK_M queries of one head: it writes their delta, then walks over the keys they see.

    Where lse is large, its rounding to fp32 scales all weights of a query alike, by more than a rounding of their own.
    For fp32 operands their sum is gathered on the way, and 1 / sum takes that out, here and in the kernels to come."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    score_scale = scale * score_unit(NATURAL)
    blocks = tl.cdiv(query_length, BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if CAUSAL:
        block = blocks - 1 - block  # the longest tiles first, so that short ones fill the end
    batch, head = batch_head // query_heads, batch_head % query_heads
    key_head = head // GROUP
    first_row = block * BLOCK_M
    q_pointer += batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT)
    k_pointer += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
    v_pointer += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    dout_pointer += batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT)
    k_row, v_row = wide(k_row, ALIGNMENT), wide(v_row, ALIGNMENT)
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
    if BIAS != "none":
        bias_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
    seed = tl.load(seed_pointer) if DROPOUT else 0
    out_row = tl.cast(query_heads, tl.int64) * HEAD_DIM
    out_offset = (tl.cast(batch, tl.int64) * query_length * query_heads + head) * HEAD_DIM
    row_offset = tl.cast(batch_head, tl.int64) * query_length

    out = load_rows(
        out_pointer + out_offset, 0, 0, first_row, out_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D,
        HEAD_DIM & -HEAD_DIM, True, False,
    )  # [M, D]  # fmt: skip
    dout = load_rows(
        dout_pointer, 0, 0, first_row, wide(dout_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT,
        True, False,
    )  # [M, D]  # fmt: skip
    delta = tl.sum(to_fp32(out) * to_fp32(dout), 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    if dlse_pointer is not None:
        delta -= tl.load(dlse_pointer + row_offset + rows, mask=rows < query_length, other=0.0)
    tl.store(delta_pointer + row_offset + rows, delta, mask=rows < query_length)

    q = load_rows(
        q_pointer, 0, 0, first_row, wide(q_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [M, D]  # fmt: skip
    q, dout = dot_operand(q, q.dtype), dot_operand(dout, dout.dtype)
    lse = load_lse(lse_pointer + row_offset, rows, query_length, True, NATURAL)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    start, full_start, full_end, end = key_blocks(
        padding_pointer, sequences_pointer, first_row, tl.minimum(first_row + BLOCK_M, query_length) - 1,
        key_length - query_length, key_length, window, BLOCK_N, MASKED_N, CAUSAL, WINDOW, PADDING, SEQUENCES,
    )  # fmt: skip
    for key in range(full_start, full_end, BLOCK_N):
        dq, weight_sum = query_gradient_block(
            dq, weight_sum, q, dout, lse, delta, key, k_pointer, v_pointer, padding_pointer, sequences_pointer,
            bias_pointer, seed, batch_head, first_row, query_length, key_length, k_row, v_row, bias_row, score_scale,
            window, threshold, keep_scale, False, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, PADDING, SEQUENCES, BIAS,
            BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, PRECISION, NATURAL,
        )  # fmt: skip
    before = full_start - start
    for offset in tl.range(0, before + tl.maximum(end - full_end, 0), MASKED_N, num_stages=1):
        key = tl.where(offset < before, start + offset, full_end + offset - before)
        visited = True
        if PADDING:
            visited = any_real(padding_pointer, key, key_length, MASKED_N)
        if visited:
            dq, weight_sum = query_gradient_block(
                dq, weight_sum, q, dout, lse, delta, key, k_pointer, v_pointer, padding_pointer, sequences_pointer,
                bias_pointer, seed, batch_head, first_row, query_length, key_length, k_row, v_row, bias_row,
                score_scale, window, threshold, keep_scale, True, HEAD_DIM, BLOCK_D, MASKED_N, CAUSAL, WINDOW, PADDING,
                SEQUENCES, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, PRECISION, NATURAL,
            )  # fmt: skip
    if NATURAL:
        correction = 1.0 / tl.where(weight_sum == 0.0, 1.0, weight_sum)
        tl.store(correction_pointer + row_offset + rows, correction, mask=rows < query_length)
        dq *= correction[:, None]
    dq = from_fp32(dq * scale, dq_pointer.dtype.element_ty)
    dq_pointer += batch * wide(dq_batch, ALIGNMENT) + head * wide(dq_head, ALIGNMENT)
    store_rows(dq_pointer, dq, first_row, wide(dq_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT)
