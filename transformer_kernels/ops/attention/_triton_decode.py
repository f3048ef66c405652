"""Triton: attention of a few queries to many keys. Programs share out the keys, and the parts are put together."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32, to_fp32
from transformer_kernels.ops.attention._triton_forward import finish_rows, weigh
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    biased,
    exponential,
    finite_rows,
    keep_tile,
    load_rows,
    multiply,
    real_keys,
    score_unit,
    visible_keys,
    visible_pairs,
    wide,
)


@triton.jit(
    do_not_specialize=[
        "query_heads",
        "query_length",
        "key_length",
        "split_keys",
        "q_batch",
        "q_head",
        "q_row",
        "k_batch",
        "k_head",
        "k_row",
        "v_batch",
        "v_head",
        "v_row",
        "bias_batch",
        "bias_head",
        "bias_row",
        "bias_column",
        "window",
        "threshold",
    ]
)
def attention_decode_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    out_pointer,  # (B, Lq, Hq, D), contiguous, written when there is one split
    lse_pointer,  # (B, Hq, Lq), contiguous, likewise
    partial_pointer,  # (splits, B, Hq, Lq, D), fp32, or None
    partial_max_pointer,  # (splits, B, Hq, Lq), fp32, or None
    partial_sum_pointer,  # (splits, B, Hq, Lq), fp32, or None
    padding_pointer,  # (B, Lk), contiguous, or None
    bias_pointer,  # (B, Hq, Lq, Lk), broadcast, or None
    seed_pointer,  # (1,), or None
    query_heads,
    query_length,
    key_length,
    split_keys,
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
    bias_column,
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
    DROPOUT: tl.constexpr,
    NEGATE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns all queries of the group of one key head, and `split_keys` of its keys."""
    key_heads = query_heads // GROUP
    split, batch_key_head = tl.program_id(1), tl.program_id(0)
    batch, key_head = batch_key_head // key_heads, batch_key_head % key_heads
    indices = tl.arange(0, BLOCK_M)
    heads, rows = (key_head * GROUP + indices // query_length)[:, None], (indices % query_length)[:, None]
    exists = indices < GROUP * query_length
    columns_d = tl.arange(0, BLOCK_D)[None, :]
    k_pointer += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
    v_pointer += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    k_row, v_row = wide(k_row, ALIGNMENT), wide(v_row, ALIGNMENT)
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
    seed = tl.load(seed_pointer) if DROPOUT else 0
    q = tl.load(
        q_pointer + batch * wide(q_batch, 1) + heads * wide(q_head, 1) + rows * wide(q_row, 1) + columns_d,
        mask=exists[:, None] & (columns_d < HEAD_DIM),
        other=0.0,
    )  # [M, D]
    q = dot_operand(q, q.dtype)
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    scale *= score_unit(NATURAL)
    if NEGATE:
        q, scale = -q, -scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    taint = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    shift = key_length - query_length
    start, end, _, _ = visible_keys(0, query_length - 1, shift, key_length, window, CAUSAL, WINDOW)
    start = tl.maximum(start // BLOCK_N * BLOCK_N, split * split_keys)
    end = tl.minimum(end, (split + 1) * split_keys)
    if PADDING:
        first_real, end_real, _ = real_keys(padding_pointer, start, end)
        start, end = tl.maximum(start, first_real // BLOCK_N * BLOCK_N), tl.minimum(end, end_real)
    for first_key in range(start, end, BLOCK_N):
        keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
        visible = visible_pairs(rows, keys, shift, key_length, window, CAUSAL, WINDOW)
        k = load_rows(
            k_pointer, 0, 0, first_key, k_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False
        )  # [N, D]
        v = load_rows(
            v_pointer, 0, 0, first_key, v_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, False
        )  # [N, D]
        if PADDING:
            real = tl.load(padding_pointer + keys, mask=keys < key_length, other=0) != 0
            visible = visible & real
            v = tl.where(tl.reshape(real, (BLOCK_N, 1)), v, tl.zeros_like(v))
        if CAUSAL or WINDOW:
            v, trace = finite_rows(v)
            taint += tl.sum(tl.where(visible, trace[None, :], 0.0), 1)
        scores = multiply(q, tl.trans(dot_operand(k, k.dtype)), PRECISION) * scale  # [M, N]
        if BIAS:
            row_pointer = bias_pointer + batch * wide(bias_batch, 1) + heads * wide(bias_head, 1)
            row_pointer += rows * wide(bias_row, 1)
            inside = exists[:, None] & (keys < key_length)
            bias = tl.load(row_pointer + keys * wide(bias_column, 1), mask=inside, other=0.0)
            scores = biased(scores, to_fp32(bias) * score_unit(NATURAL), NATURAL)
        scores = tl.where(visible, scores, float("-inf"))
        weights, row_max, row_sum, correction = weigh(scores, 1.0, row_max, row_sum, True, NATURAL)
        if DROPOUT:
            keep = keep_tile(seed, first_key, rows, batch * query_heads + heads, threshold, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        total = accumulate(
            dot_operand(weights, v.dtype), dot_operand(v, v.dtype), total * correction[:, None], PRECISION
        )  # [M, D]

    total += taint[:, None]
    inside = exists[:, None] & (columns_d < HEAD_DIM)
    first_row = (tl.cast(batch, tl.int64) * query_heads + key_head * GROUP) * query_length
    if partial_pointer is None:
        out, lse = finish_rows(total, row_max, row_sum, keep_scale, NATURAL)
        out_pointers = out_pointer + ((tl.cast(batch, tl.int64) * query_length + rows) * query_heads + heads) * HEAD_DIM
        tl.store(out_pointers + columns_d, from_fp32(out, out_pointer.dtype.element_ty), mask=inside)
        tl.store(lse_pointer + first_row + indices, lse, mask=exists)
    else:
        part_rows = tl.cast(tl.num_programs(0), tl.int64) * GROUP * query_length
        part = split * part_rows + first_row + indices
        tl.store(partial_pointer + part[:, None] * HEAD_DIM + columns_d, total, mask=inside)
        tl.store(partial_max_pointer + part, row_max, mask=exists)
        tl.store(partial_sum_pointer + part, row_sum, mask=exists)


@triton.jit(do_not_specialize=["query_heads", "query_length", "splits"])
def attention_combine_kernel(
    partial_pointer,  # (splits, B, Hq, Lq, D), fp32
    partial_max_pointer,  # (splits, B, Hq, Lq), fp32
    partial_sum_pointer,  # (splits, B, Hq, Lq), fp32
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    query_heads,
    query_length,
    splits,
    keep_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One program owns one query of one head and joins its parts, always in the same order."""
    NATURAL: tl.constexpr = out_pointer.dtype.element_ty == tl.float32
    index = tl.cast(tl.program_id(0), tl.int64)
    rows = tl.cast(tl.num_programs(0), tl.int64)
    columns = tl.arange(0, BLOCK_D)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    total = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        exists = split < splits
        part = split * rows + index
        part_max = tl.load(partial_max_pointer + part, mask=exists, other=float("-inf"))  # [S]
        part_sum = tl.load(partial_sum_pointer + part, mask=exists, other=0.0)  # [S]
        inside = exists[:, None] & (columns < HEAD_DIM)[None, :]
        part_total = tl.load(partial_pointer + part[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))  # [1]
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = exponential(row_max - origin, NATURAL)
        weights = exponential(part_max - origin, NATURAL)  # [S]
        row_sum = row_sum * correction + tl.sum(weights * part_sum, 0)
        total = total * correction[:, None] + tl.sum(weights[:, None] * part_total, 0)[None, :]  # [1, D]
        row_max = new_max
    out, lse = finish_rows(total, row_max, row_sum, keep_scale, NATURAL)
    row, batch_head = index % query_length, index // query_length
    batch, head = batch_head // query_heads, batch_head % query_heads
    out_pointer += ((batch * query_length + row) * query_heads + head) * HEAD_DIM
    tl.store(
        out_pointer + columns[None, :], from_fp32(out, out_pointer.dtype.element_ty), mask=columns[None, :] < HEAD_DIM
    )
    tl.store(lse_pointer + index + tl.arange(0, 1), lse)
