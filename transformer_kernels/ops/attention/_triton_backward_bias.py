"""Triton: the gradient of an attention bias, summed over what the bias is broadcast over."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED
from transformer_kernels.ops.attention._triton_backward_key import transposed_weights
from transformer_kernels.ops.attention._triton_sequences import sequence_range
from transformer_kernels.ops.attention._triton_tile import (
    keep_tile,
    load_lse,
    load_rows,
    load_statistic,
    multiply,
    score_unit,
    wide,
)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "batches", "bias_batches", "bias_heads", "splits"])
def attention_backward_bias_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    delta_pointer,  # (B, Hq, Lq), contiguous
    correction_pointer,  # (B, Hq, Lq), contiguous, for fp32 operands; else None
    dbias_pointer,  # (splits, bias batches, bias heads, Lq or 1, Lk), contiguous
    padding_pointer,  # (B, Lk), contiguous, or None
    sequences_pointer,  # (2, Lk), contiguous, or None
    bias_pointer,  # (B, Hq, Lq, Lk), broadcast
    seed_pointer,  # (1,), or None
    batches,
    query_heads,
    query_length,
    key_length,
    bias_batches,
    bias_heads,
    splits,
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
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns one tile of dbias and one of `splits` shares of the tiles of dS that are summed into it: those
    of the batches, heads and query blocks over which the bias is broadcast."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    score_scale = scale * score_unit(NATURAL)
    row_blocks = tl.cdiv(query_length, BLOCK_M)
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    own_rows = row_blocks if BIAS == "full" else 1
    program = tl.program_id(0)
    own_key, program = program % key_tiles, program // key_tiles
    own_row, program = program % own_rows, program // own_rows
    own_head, program = program % bias_heads, program // bias_heads
    own_batch, split = program % bias_batches, program // bias_batches
    shared_rows, shared_heads = row_blocks // own_rows, query_heads // bias_heads
    shared = shared_rows * shared_heads * (batches // bias_batches)
    share = tl.cdiv(shared, splits)
    first, end = split * share, tl.minimum((split + 1) * share, shared)
    first_key = own_key * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    if SEQUENCES:
        last_key = tl.minimum(first_key + BLOCK_N, key_length) - 1
        sequences_start, sequences_end, _, _ = sequence_range(sequences_pointer, first_key, last_key, key_length)
    seed = tl.load(seed_pointer) if DROPOUT else 0
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for index in tl.range(first, end, num_stages=1):
        first_row = (own_row + index % shared_rows) * BLOCK_M
        index = index // shared_rows
        head, batch = own_head + index % shared_heads, own_batch + index // shared_heads
        visited = True
        if SEQUENCES:
            visited = (first_row < sequences_end) & (first_row + BLOCK_M > sequences_start)
        if visited:
            key_head = head // GROUP
            rows = first_row + tl.arange(0, BLOCK_M)
            q = load_rows(
                q_pointer + batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT), 0, 0, first_row,
                wide(q_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True, False,
            )  # [M, D]  # fmt: skip
            k = load_rows(
                k_pointer + batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT), 0, 0, first_key,
                wide(k_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
            )  # [N, D]  # fmt: skip
            query_batch_head = batch * query_heads + head
            row_offset = tl.cast(query_batch_head, tl.int64) * query_length
            correction = 1.0
            if NATURAL:
                correction = load_statistic(correction_pointer + row_offset, rows, query_length, 1.0, True)
            weights, visible = transposed_weights(
                dot_operand(k, k.dtype), dot_operand(q, q.dtype),
                load_lse(lse_pointer + row_offset, rows, query_length, True, NATURAL), correction, first_key, first_row,
                sequences_pointer,
                bias_pointer + batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT),
                query_length, key_length, bias_row, score_scale, window, True, CAUSAL, WINDOW, SEQUENCES, BIAS,
                BIAS_ALIGNMENT, PRECISION, NATURAL,
            )  # [N, M]  # fmt: skip
            v = load_rows(
                v_pointer + batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT), 0, 0, first_key,
                wide(v_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False,
            )  # [N, D]  # fmt: skip
            dout = load_rows(
                dout_pointer + batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT), 0, 0, first_row,
                wide(dout_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True, False,
            )  # [M, D]  # fmt: skip
            dweights = multiply(dot_operand(v, v.dtype), tl.trans(dot_operand(dout, dout.dtype)), PRECISION)  # [N, M]
            if DROPOUT:
                keep = tl.trans(keep_tile(seed, first_key, rows[:, None], query_batch_head, threshold, BLOCK_N))
                dweights = tl.where(keep, dweights * keep_scale, 0.0)
            delta = load_statistic(delta_pointer + row_offset, rows, query_length, 0.0, True)
            if PADDING:
                padding = padding_pointer + tl.cast(batch, tl.int64) * key_length
                visible = visible & (tl.load(padding + keys, mask=keys < key_length, other=0) != 0)[:, None]
            total += tl.where(visible, weights * (dweights - delta[None, :]), 0.0)

    rows = own_row * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.cast((split * bias_batches + own_batch) * bias_heads + own_head, tl.int64)
    if BIAS == "full":
        pointers = dbias_pointer + (tile * query_length + rows[None, :]) * key_length + keys[:, None]
        inside = (rows < query_length)[None, :] & (keys < key_length)[:, None]
        tl.store(pointers, from_fp32(total, dbias_pointer.dtype.element_ty), mask=inside)
    else:
        total = from_fp32(tl.sum(total, 1), dbias_pointer.dtype.element_ty)
        tl.store(dbias_pointer + tile * key_length + keys, total, mask=keys < key_length)
