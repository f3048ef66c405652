"""Triton: attention where all keys of a head fit into one tile.

Forward needs no online softmax. Backward is one pass: the program that owns a head's keys processes every query, so dq,
dk and dv use the same weights.
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED, Queries
from transformer_kernels.ops.attention._triton_backward_key import KeyGradient, Keys, key_gradient_block, operands
from transformer_kernels.ops.attention._triton_forward import Softmax, finish_rows, store_row_results
from transformer_kernels.ops.attention._triton_masks import isolated_keys, isolated_padding, real_columns, visible_tile
from transformer_kernels.ops.attention._triton_rotary import Angles, first_token, load_rotated, store_unrotated
from transformer_kernels.ops.attention._triton_scores import (
    Stage,
    dropout_scale,
    dropped,
    exponential,
    kept_weights,
    load_base,
    numbers_of_head,
    score_unit,
    stage_numbers,
    tile_scores,
    weight_operand,
)
from transformer_kernels.ops.attention._triton_tile import head_rows, load_rows, multiply, output_rows, store_rows


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_short_forward_kernel(
    inputs,  # Inputs
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    statistics_pointer,  # (B, Hq, 2, Lq), contiguous: of each row the largest score and the log of the sum
    extras,  # Extras
    query_heads, query_length, key_length,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M queries of one head and all of its keys."""
    NATURAL: tl.constexpr = OPTIONS.NATURAL
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    blocks = tl.cdiv(query_length, BLOCK_M)
    batch_head = tl.program_id(0) // blocks
    first_row = tl.program_id(0) % blocks * BLOCK_M
    batch, head = batch_head // query_heads, batch_head % query_heads
    key_head = head // OPTIONS.GROUP
    tile_rows, tile_columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    q_rows = head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS)
    k_rows = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, key_length, OPTIONS)
    v_rows = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, key_length, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, query_length, OPTIONS))
    q = load_rotated(q_rows, angles, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    k = load_rotated(k_rows, angles, 0, BLOCK_N, True, OPTIONS)  # [N, D]
    stage = Stage(
        extras,
        stage_numbers(
            extras, batch, head, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, 1,
            left, right, threshold, OPTIONS,
        ),
    )  # fmt: skip
    real = real_columns(stage, tile_columns)
    visible = visible_tile(stage, real, first_row + tile_rows, tile_columns, True, OPTIONS)
    v, _ = isolated_keys(stage, load_rows(v_rows, 0, BLOCK_N, True, OPTIONS), real)  # [N, D]
    products = multiply(dot_operand(q, q.dtype), tl.trans(dot_operand(k, k.dtype)), OPTIONS)  # [M, N]
    scores, _ = tile_scores(
        products, stage, scale * score_unit(NATURAL), first_row, 0, tile_rows, tile_columns, True, False, OPTIONS
    )
    scores = tl.where(visible, scores, float("-inf"))
    row_max = tl.max(scores, 1)
    weights = exponential(scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None], NATURAL)
    row_sum = tl.sum(weights, 1)
    weights = dropped(stage, weights, kept_weights(stage, 0, first_row + tile_rows, BLOCK_N))
    total = multiply(weight_operand(stage, weights, True, v.dtype), dot_operand(v, v.dtype), OPTIONS)  # [M, D]
    out, lse, row_max, log_sum = finish_rows(Softmax(total, row_max, row_sum), dropout_scale(stage), NATURAL)
    store_rows(output_rows(out_pointer, batch, head, query_heads, query_length, OPTIONS), out, first_row, OPTIONS)
    rows = first_row + tl.arange(0, BLOCK_M)
    exists = rows < query_length
    store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, rows, query_length, exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_short_backward_kernel(
    inputs,  # Inputs
    backward,  # Backward
    extras,  # Extras
    query_length, key_length,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row, dkv_batch, dkv_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program of (B, Hk) owns all keys of one key head and loops over the queries of its group."""
    NATURAL: tl.constexpr = OPTIONS.NATURAL
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    batch, key_head = tl.program_id(0), tl.program_id(1)
    query_heads = tl.num_programs(1) * OPTIONS.GROUP
    k_rows = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, key_length, OPTIONS)
    v_rows = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, key_length, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, key_length, OPTIONS))
    k = load_rotated(k_rows, angles, 0, BLOCK_N, True, OPTIONS)  # [N, D]
    v = load_rows(v_rows, 0, BLOCK_N, True, OPTIONS)  # [N, D]
    numbers = stage_numbers(
        extras, batch, key_head, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, 1,
        left, right, threshold, OPTIONS,
    )  # fmt: skip
    keys_stage = Stage(extras, numbers)
    real = real_columns(keys_stage, tl.arange(0, BLOCK_N))
    k, v = isolated_padding(keys_stage, k, real), isolated_padding(keys_stage, v, real)
    keys = Keys(dot_operand(k, k.dtype), dot_operand(v, v.dtype), real, 0)
    zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    gradient = KeyGradient(zeros, zeros)
    blocks = tl.cdiv(query_length, BLOCK_M)
    for step in tl.range(0, OPTIONS.GROUP * blocks, num_stages=1):
        head = key_head * OPTIONS.GROUP + step // blocks
        first_row = step % blocks * BLOCK_M
        batch_head = batch * query_heads + head
        rows = first_row + tl.arange(0, BLOCK_M)
        row_offset = tl.cast(batch_head, tl.int64) * query_length
        q_rows = head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS)
        dout_rows = head_rows(backward.dout, batch, head, dout_batch, dout_head, dout_row, query_length, OPTIONS)
        q = load_rotated(q_rows, angles, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
        dout = load_rows(dout_rows, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
        delta = tl.zeros([BLOCK_M], tl.float32)
        if backward.dlse is not None:
            delta -= tl.load(backward.dlse + row_offset + rows, mask=rows < query_length, other=0.0)
        base, log_sum = load_base(backward.statistics + 2 * row_offset, rows, query_length, True, OPTIONS)
        queries = operands(Queries(q, dout, base, log_sum, delta, first_row))
        stage = Stage(extras, numbers_of_head(numbers, batch, head, query_heads, bias_batch, bias_head, OPTIONS))
        gradient, dproducts, delta = key_gradient_block(
            gradient, keys, queries, stage, scale * score_unit(NATURAL), True, True, False, q.dtype, OPTIONS
        )
        if backward.delta is not None:
            tl.store(backward.delta + row_offset + rows, delta, mask=rows < query_length)
        dq = multiply(tl.trans(dot_operand(dproducts, q.dtype)), keys.k, OPTIONS) * scale  # [M, D]
        target = head_rows(backward.dq, batch, head, dq_batch, dq_head, dq_row, query_length, OPTIONS)
        store_unrotated(target, dq, angles, first_row, OPTIONS)
    dk, dv = gradient.dk * scale, gradient.dv * dropout_scale(keys_stage)
    for_dk = head_rows(backward.dk, batch, key_head, dkv_batch, OPTIONS.HEAD_DIM, dkv_row, key_length, OPTIONS)
    for_dv = head_rows(backward.dv, batch, key_head, dkv_batch, OPTIONS.HEAD_DIM, dkv_row, key_length, OPTIONS)
    store_unrotated(for_dk, dk, angles, 0, OPTIONS)
    store_rows(for_dv, dv, 0, OPTIONS)
