"""Triton: attention of few queries to many keys, with keys split among programs and the splits combined."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_forward import (
    SIZES,
    STRIDES,
    Softmax,
    finish_rows,
    store_row_results,
    weigh,
)
from transformer_kernels.ops.attention._triton_masks import isolated_keys, real_columns, split_range, visible_tile
from transformer_kernels.ops.attention._triton_scores import (
    Stage,
    dropout_scale,
    dropped,
    exponential,
    kept_weights,
    oriented,
    remaining_scale,
    stage_numbers,
    tile_scores,
    weight_operand,
)
from transformer_kernels.ops.attention._triton_tile import accumulate, head_rows, load_rows, multiply, wide


@triton.jit(do_not_specialize=[*SIZES, *STRIDES, "split_keys", "bias_column"])
def attention_decode_kernel(
    inputs,  # Inputs
    out_pointer,  # (B, Lq, Hq, D), contiguous, written when there is one split
    lse_pointer,  # (B, Hq, Lq), contiguous, likewise
    statistics_pointer,  # (B, Hq, 2, Lq), contiguous, likewise: of each row the largest score and the log of the sum
    partial_pointer,  # (splits, B, Hq, Lq, D), fp32, or None
    partial_max_pointer,  # (splits, B, Hq, Lq), fp32, or None
    partial_sum_pointer,  # (splits, B, Hq, Lq), fp32, or None
    extras,  # Extras
    query_heads, query_length, key_length, split_keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    bias_batch, bias_head, bias_row, bias_column,
    scale, left, right, threshold,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns all queries of one key head's group and `split_keys` of its keys."""
    NATURAL: tl.constexpr = OPTIONS.NATURAL
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    key_heads = query_heads // OPTIONS.GROUP
    split, batch_key_head = tl.program_id(1), tl.program_id(0)
    batch, key_head = batch_key_head // key_heads, batch_key_head % key_heads
    indices = tl.arange(0, BLOCK_M)
    member = tl.minimum(indices // query_length, OPTIONS.GROUP - 1)  # rows that do not exist read the last head's
    heads, rows = (key_head * OPTIONS.GROUP + member)[:, None], (indices % query_length)[:, None]
    exists = indices < OPTIONS.GROUP * query_length
    columns_d = tl.arange(0, OPTIONS.BLOCK_D)[None, :]
    inside = exists[:, None] & (columns_d < OPTIONS.HEAD_DIM)
    k_rows = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, key_length, OPTIONS)
    v_rows = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, key_length, OPTIONS)
    stage = Stage(
        extras,
        stage_numbers(
            extras, batch, heads, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, bias_column,
            left, right, threshold, OPTIONS,
        ),
    )  # fmt: skip
    q_pointers = inputs.q + batch * wide(q_batch, 1) + heads * wide(q_head, 1) + rows * wide(q_row, 1) + columns_d
    q = tl.load(q_pointers, mask=inside, other=0.0)  # [M, D]
    q, scale = oriented(dot_operand(q, q.dtype), scale, OPTIONS)
    row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    softmax = Softmax(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), row_max, row_sum)
    start, end = split_range(split * split_keys, split_keys, stage, OPTIONS)
    for first_key in range(start, end, BLOCK_N):
        columns = tl.arange(0, BLOCK_N)[None, :]
        k = load_rows(k_rows, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
        v = load_rows(v_rows, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
        real = real_columns(stage, first_key + columns)
        visible = visible_tile(stage, real, rows, first_key + columns, True, OPTIONS)
        v, _ = isolated_keys(stage, v, real)
        products = multiply(q, tl.trans(dot_operand(k, k.dtype)), OPTIONS)  # [M, N]
        scores, _ = tile_scores(products, stage, scale, 0, first_key, rows, columns, True, True, OPTIONS)
        scores = tl.where(visible, scores, float("-inf"))
        weights, softmax = weigh(scores, remaining_scale(scale, OPTIONS), softmax, True, NATURAL)
        weights = dropped(stage, weights, kept_weights(stage, first_key, rows, BLOCK_N))
        weights, v = weight_operand(stage, weights, True, v.dtype), dot_operand(v, v.dtype)
        softmax = Softmax(accumulate(weights, v, softmax.total, OPTIONS), softmax.row_max, softmax.row_sum)

    first_row = (tl.cast(batch, tl.int64) * query_heads + key_head * OPTIONS.GROUP) * query_length
    if partial_pointer is None:
        out, lse, row_max, log_sum = finish_rows(softmax, dropout_scale(stage), NATURAL)
        out_pointers = (tl.cast(batch, tl.int64) * query_length + rows) * query_heads + heads
        out_pointers = out_pointer + out_pointers * OPTIONS.HEAD_DIM + columns_d
        tl.store(out_pointers, from_fp32(out, out_pointer.dtype.element_ty), mask=inside)
        batch_head = batch * query_heads + key_head * OPTIONS.GROUP + indices // query_length
        row = indices % query_length
        store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, row, query_length, exists)
    else:
        part_rows = tl.cast(tl.num_programs(0), tl.int64) * OPTIONS.GROUP * query_length
        part = split * part_rows + first_row + indices
        tl.store(partial_pointer + part[:, None] * OPTIONS.HEAD_DIM + columns_d, softmax.total, mask=inside)
        tl.store(partial_max_pointer + part, softmax.row_max, mask=exists)
        tl.store(partial_sum_pointer + part, softmax.row_sum, mask=exists)


@triton.jit(do_not_specialize=["query_heads", "query_length", "splits"])
def attention_combine_kernel(
    partial_pointer,  # (splits, B, Hq, Lq, D), fp32
    partial_max_pointer,  # (splits, B, Hq, Lq), fp32
    partial_sum_pointer,  # (splits, B, Hq, Lq), fp32
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    statistics_pointer,  # (B, Hq, 2, Lq), contiguous
    query_heads, query_length, splits, keep_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program owns one query of one head and combines its splits in order."""
    NATURAL: tl.constexpr = out_pointer.dtype.element_ty == tl.float32
    index = tl.cast(tl.program_id(0), tl.int64)
    rows = tl.cast(tl.num_programs(0), tl.int64)
    columns = tl.arange(0, BLOCK_D)[None, :]
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    total = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        exists = split < splits
        part = split * rows + index
        part_max = tl.load(partial_max_pointer + part, mask=exists, other=float("-inf"))  # [S]
        part_sum = tl.load(partial_sum_pointer + part, mask=exists, other=0.0)  # [S]
        inside = exists[:, None] & (columns < HEAD_DIM)
        part_total = tl.load(partial_pointer + part[:, None] * HEAD_DIM + columns, mask=inside, other=0.0)  # [S, D]
        new_max = tl.maximum(row_max, tl.max(part_max, 0))  # [1]
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = exponential(row_max - origin, NATURAL)
        weights = exponential(part_max - origin, NATURAL)  # [S]
        row_sum = row_sum * correction + tl.sum(weights * part_sum, 0)
        total = total * correction[:, None] + tl.sum(weights[:, None] * part_total, 0)[None, :]  # [1, D]
        row_max = new_max
    out, lse, row_max, log_sum = finish_rows(Softmax(total, row_max, row_sum), keep_scale, NATURAL)
    row, batch_head = index % query_length, index // query_length
    batch, head = batch_head // query_heads, batch_head % query_heads
    out_pointer += ((batch * query_length + row) * query_heads + head) * HEAD_DIM
    tl.store(out_pointer + columns, from_fp32(out, out_pointer.dtype.element_ty), mask=columns < HEAD_DIM)
    row += tl.arange(0, 1)
    store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, row, query_length, row >= 0)
