"""Triton: dk and dv of attention for any lengths, and what the short path shares of it."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED
from transformer_kernels.ops.attention._triton_sequences import within_sequence
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    biased,
    exponential,
    finite_rows,
    keep_tile,
    load_bias,
    load_lse,
    load_rows,
    load_statistic,
    multiply,
    query_blocks,
    score_unit,
    store_rows,
    tile_of_program,
    visible_pairs,
    wide,
)


@triton.jit
def transposed_weights(
    k,
    q,
    lse,
    correction,
    first_key,
    first_row,
    sequences_pointer,
    bias_pointer,
    query_length,
    key_length,
    bias_row,
    scale,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The weights [N, M] of a tile, keys first, and which of its pairs are visible by position."""
    tile_rows = tl.arange(0, q.shape[0])[None, :]
    tile_columns = tl.arange(0, k.shape[0])[:, None]
    scores = multiply(k, tl.trans(q), PRECISION) * scale  # [N, M]
    if BIAS != "none":
        bias = load_bias(
            bias_pointer, first_row, first_key, tile_rows, tile_columns, bias_row, query_length, key_length, True, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    weights = exponential(scores - lse[None, :], NATURAL)
    if NATURAL:
        weights *= correction[None, :]
    rows, columns = first_row + tile_rows, first_key + tile_columns
    visible = visible_pairs(rows, columns, key_length - query_length, key_length, window, CAUSAL, WINDOW)
    if SEQUENCES:
        visible = visible & within_sequence(sequences_pointer, columns, rows, key_length)
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    return weights, visible


@triton.jit
def key_gradient_block(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    lse,
    delta,
    correction,
    first_key,
    first_row,
    sequences_pointer,
    bias_pointer,
    seed,
    real,
    batch_head,
    query_length,
    key_length,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Add what one block of queries gives to dk and dv of a key tile; also returns dS, [N, M], delta and correction.
    Everything stands transposed, keys first, so that weights and dS go from one matrix product into the next as they
    are.

    With WHOLE_ROWS the tile holds all keys, `real` tells them from padding, and `delta` comes as -dlse: the mean of dP
    under the weights is added here, which needs no `out`, and the weights are normalised again, which takes out the
    rounding of lse."""
    weights, visible = transposed_weights(
        k, q, lse, correction, first_key, first_row, sequences_pointer, bias_pointer, query_length, key_length,
        bias_row, scale, window, MASKED, CAUSAL, WINDOW, SEQUENCES, BIAS, BIAS_ALIGNMENT, PRECISION, NATURAL,
    )  # fmt: skip
    if WHOLE_ROWS:
        if PADDING:
            visible = visible & real[:, None]
            weights = tl.where(visible, weights, 0.0)
        weight_sum = tl.sum(weights, 0)  # 1 up to the rounding of lse, or 0
        correction = 1.0 / tl.where(weight_sum == 0.0, 1.0, weight_sum)
        weights *= correction[None, :]
    kept_weights = weights
    if DROPOUT:
        rows = (first_row + tl.arange(0, q.shape[0]))[:, None]
        keep = tl.trans(keep_tile(seed, first_key, rows, batch_head, threshold, k.shape[0]))
        kept_weights = tl.where(keep, weights, 0.0)
    dv = accumulate(dot_operand(kept_weights, DTYPE), dout, dv, PRECISION)  # [N, D]
    dweights = multiply(v, tl.trans(dout), PRECISION)  # [N, M]
    if DROPOUT:
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    if WHOLE_ROWS:
        delta += tl.sum(weights * tl.where(visible, dweights, 0.0), 0)
    dscores = weights * (dweights - delta[None, :])
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
    operand_dscores = dot_operand(dscores, DTYPE)
    return accumulate(operand_dscores, q, dk, PRECISION), dv, operand_dscores, delta, correction


@triton.jit
def walk_queries(
    dk,
    dv,
    k,
    v,
    first_key,
    first_row,
    q_pointer,
    dout_pointer,
    lse_pointer,
    delta_pointer,
    correction_pointer,
    sequences_pointer,
    bias_pointer,
    seed,
    batch_head,
    query_length,
    key_length,
    q_row,
    dout_row,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Load one block of queries and add what it gives to dk and dv."""
    rows = first_row + tl.arange(0, BLOCK_M)
    q = load_rows(
        q_pointer, 0, 0, first_row, q_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [M, D]
    dout = load_rows(
        dout_pointer, 0, 0, first_row, dout_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [M, D]
    lse = load_lse(lse_pointer, rows, query_length, MASKED, NATURAL)
    delta = load_statistic(delta_pointer, rows, query_length, 0.0, MASKED)
    correction = load_statistic(correction_pointer, rows, query_length, 1.0, MASKED) if NATURAL else 1.0
    if MASKED and SEQUENCES:  # what is not finite stays among the keys of its sequence
        keys = first_key + tl.arange(0, k.shape[0])
        q, q_trace = finite_rows(q)
        dout, dout_trace = finite_rows(dout)
        own = within_sequence(sequences_pointer, keys[:, None], rows[None, :], key_length)
        taint = tl.sum(tl.where(own, (q_trace + dout_trace)[None, :], 0.0), 1)[:, None]
        dk, dv = dk + taint, dv + taint
    dk, dv, _, _, _ = key_gradient_block(
        dk, dv, k, v, dot_operand(q, q.dtype), dot_operand(dout, dout.dtype), lse, delta, correction, first_key,
        first_row, sequences_pointer, bias_pointer, seed, None, batch_head, query_length, key_length, bias_row, scale,
        window, threshold, keep_scale, MASKED, CAUSAL, WINDOW, False, SEQUENCES, BIAS, BIAS_ALIGNMENT, DROPOUT, False,
        q.dtype, PRECISION, NATURAL,
    )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_key_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    delta_pointer,  # (B, Hq, Lq), contiguous
    correction_pointer,  # (B, Hq, Lq), contiguous, for fp32 operands; else None
    dk_pointer,  # (B, Hk, Lk, D)
    dv_pointer,  # (B, Hk, Lk, D)
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
    section,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_M: tl.constexpr,
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
    """One program owns BLOCK_N keys of one key head and walks over the queries that see them, of every query head of
    the group. A key that is padding or does not exist touches only its own row, which is not kept."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    score_scale = scale * score_unit(NATURAL)
    key_heads = query_heads // GROUP
    block, batch_head = tile_of_program(tl.cdiv(key_length, BLOCK_N), section)
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    first_key = block * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k_pointer += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
    v_pointer += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    q_row, dout_row = wide(q_row, ALIGNMENT), wide(dout_row, ALIGNMENT)
    seed = tl.load(seed_pointer) if DROPOUT else 0
    read = key_length
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
        real = tl.load(padding_pointer + keys, mask=keys < key_length, other=0) != 0
        read = tl.where(tl.max(real.to(tl.int32), 0) > 0, key_length, 0)  # all padding: not even the keys are read
    k = load_rows(
        k_pointer, 0, 0, first_key, wide(k_row, ALIGNMENT), read, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [N, D]  # fmt: skip
    v = load_rows(
        v_pointer, 0, 0, first_key, wide(v_row, ALIGNMENT), read, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [N, D]  # fmt: skip
    k, v = dot_operand(k, k.dtype), dot_operand(v, v.dtype)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start, full_start, full_end, end = query_blocks(
        first_key, tl.minimum(first_key + BLOCK_N, key_length) - 1, key_length - query_length, query_length, window,
        sequences_pointer, BLOCK_M, MASKED_M, CAUSAL, WINDOW, SEQUENCES,
    )  # fmt: skip
    if PADDING and read == 0:
        full_start, full_end, end = start, start, start  # all padding: nothing to walk over
    before = full_start - start
    masked_rows = before + tl.maximum(end - full_end, 0)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_head_pointer = q_pointer + batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT)
        dout_head_pointer = dout_pointer + batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT)
        query_batch_head = batch * query_heads + head
        row_offset = tl.cast(query_batch_head, tl.int64) * query_length
        correction_head_pointer = correction_pointer
        if NATURAL:
            correction_head_pointer += row_offset
        bias_head_pointer = bias_pointer
        if BIAS != "none":
            bias_head_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
        for row in range(full_start, full_end, BLOCK_M):
            dk, dv = walk_queries(
                dk, dv, k, v, first_key, row, q_head_pointer, dout_head_pointer, lse_pointer + row_offset,
                delta_pointer + row_offset, correction_head_pointer, sequences_pointer, bias_head_pointer, seed,
                query_batch_head, query_length, key_length, q_row, dout_row, bias_row, score_scale, window, threshold,
                keep_scale, False, HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, WINDOW, SEQUENCES, BIAS, BIAS_ALIGNMENT,
                DROPOUT, ALIGNMENT, PRECISION, NATURAL,
            )  # fmt: skip
        for offset in tl.range(0, masked_rows, MASKED_M, num_stages=1):
            row = tl.where(offset < before, start + offset, full_end + offset - before)
            dk, dv = walk_queries(
                dk, dv, k, v, first_key, row, q_head_pointer, dout_head_pointer, lse_pointer + row_offset,
                delta_pointer + row_offset, correction_head_pointer, sequences_pointer, bias_head_pointer, seed,
                query_batch_head, query_length, key_length, q_row, dout_row, bias_row, score_scale, window, threshold,
                keep_scale, True, HEAD_DIM, BLOCK_D, MASKED_M, CAUSAL, WINDOW, SEQUENCES, BIAS, BIAS_ALIGNMENT,
                DROPOUT, ALIGNMENT, PRECISION, NATURAL,
            )  # fmt: skip
    dk, dv = dk * scale, dv * keep_scale
    if PADDING:
        dk, dv = tl.where(real[:, None], dk, 0.0), tl.where(real[:, None], dv, 0.0)
    dk, dv = from_fp32(dk, dk_pointer.dtype.element_ty), from_fp32(dv, dv_pointer.dtype.element_ty)
    dk_pointer += batch * wide(dk_batch, ALIGNMENT) + key_head * wide(dk_head, ALIGNMENT)
    dv_pointer += batch * wide(dv_batch, ALIGNMENT) + key_head * wide(dv_head, ALIGNMENT)
    store_rows(dk_pointer, dk, first_key, wide(dk_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT)
    store_rows(dv_pointer, dv, first_key, wide(dv_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT)
