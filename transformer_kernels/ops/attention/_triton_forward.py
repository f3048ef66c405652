"""Triton: attention forward for any lengths. See README.md for the derivation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LN_2, dot_operand
from transformer_kernels.ops.attention._triton_masks import (
    add_trace,
    has_keys,
    isolated_keys,
    key_blocks,
    masked_length,
    masked_position,
    query_tile_of_program,
    real_columns,
    visible_tile,
)
from transformer_kernels.ops.attention._triton_rotary import Angles, first_token, load_rotated
from transformer_kernels.ops.attention._triton_scores import (
    Stage,
    dropout_scale,
    dropped,
    exponential,
    kept_weights,
    oriented,
    remaining_scale,
    score_unit,
    stage_numbers,
    tile_scores,
    weight_operand,
)
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    head_rows,
    load_rows,
    multiply,
    output_rows,
    store_rows,
)

SIZES = ["query_heads", "query_length", "key_length", "left", "right", "threshold", "section"]
STRIDES = [f"{tensor}_{axis}" for tensor in ("q", "k", "v", "bias") for axis in ("batch", "head", "row")]
"""Not specialised: a new length, stride or head count needs no compilation. ALIGNMENT carries the alignment."""


class Softmax(NamedTuple):
    """The running softmax of a query tile: sum(exp(score - row_max) * v) and sum(exp(score - row_max))."""

    total: Any  # [M, D]
    row_max: Any  # [M]
    row_sum: Any  # [M]


@triton.jit
def weigh(scores, scale, softmax, SAFE: tl.constexpr, NATURAL: tl.constexpr):
    """One step of the online softmax: weights exp(scale * scores - max), and the running softmax rescaled to the new
    maximum. SAFE: the maximum of a row may still be -inf."""
    row_max = tl.maximum(softmax.row_max, tl.max(scores, 1) * scale)
    origin = tl.where(row_max == float("-inf"), 0.0, row_max) if SAFE else row_max
    weights = exponential(scores * scale - origin[:, None], NATURAL)  # [M, N], one fused multiply-add and one exp2 each
    correction = exponential(softmax.row_max - origin, NATURAL)
    row_sum = softmax.row_sum * correction + tl.sum(weights, 1)
    return weights, Softmax(softmax.total * correction[:, None], row_max, row_sum)


@triton.jit
def finish_rows(softmax, scale, NATURAL: tl.constexpr):
    """Normalised output times the dropout scale, natural log-sum-exp, maximum, and log of the sum, the last two in the
    unit of scores. A fully masked row gives 0, -inf, -inf and 0."""
    empty = softmax.row_sum == 0.0
    divisor = tl.where(empty, 1.0, softmax.row_sum)
    log_sum = tl.log2(divisor)
    lse = softmax.row_max / score_unit(NATURAL) + log_sum * LN_2
    row_max = tl.where(empty, float("-inf"), softmax.row_max)
    if NATURAL:
        log_sum *= LN_2
    return softmax.total * (scale / divisor)[:, None], tl.where(empty, float("-inf"), lse), row_max, log_sum


@triton.jit
def store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, rows, query_length, exists):
    """Store the statistics of `rows`; `batch_head` is a scalar or one value per row."""
    head_offset = tl.cast(batch_head, tl.int64) * query_length
    tl.store(lse_pointer + head_offset + rows, lse, mask=exists)
    tl.store(statistics_pointer + 2 * head_offset + rows, row_max, mask=exists)
    tl.store(statistics_pointer + 2 * head_offset + query_length + rows, log_sum, mask=exists)


@triton.jit
def attend_block(
    softmax, q, first_row, start, k, v, stage, angles, scale,
    MASKED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Accumulate the key block at `start` into the running softmax of a query tile."""
    NATURAL: tl.constexpr = OPTIONS.NATURAL
    BLOCK_N: tl.constexpr = OPTIONS.MASKED if MASKED else OPTIONS.BLOCK_N
    start = tl.multiple_of(start, BLOCK_N)
    tile_rows = tl.arange(0, OPTIONS.BLOCK_M)[:, None]
    tile_columns = tl.arange(0, BLOCK_N)[None, :]
    rows, columns = first_row + tile_rows, start + tile_columns
    total = softmax.total
    if MASKED:
        real = real_columns(stage, columns)
        visible = visible_tile(stage, real, rows, columns, True, OPTIONS)
        v_tile, trace = isolated_keys(stage, load_rows(v, start, BLOCK_N, True, OPTIONS), real)  # [N, D]
        total = add_trace(stage, total, trace, visible)
    k_tile = load_rotated(k, angles, start, BLOCK_N, MASKED, OPTIONS)  # [N, D]
    products = multiply(q, tl.trans(dot_operand(k_tile, k_tile.dtype)), OPTIONS)  # [M, N]
    scores, _ = tile_scores(products, stage, scale, first_row, start, tile_rows, tile_columns, MASKED, True, OPTIONS)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    else:
        v_tile = load_rows(v, start, BLOCK_N, False, OPTIONS)  # [N, D]
    softmax = Softmax(total, softmax.row_max, softmax.row_sum)
    SAFE: tl.constexpr = MASKED or OPTIONS.SCORES.HIDES
    weights, softmax = weigh(scores, remaining_scale(scale, OPTIONS), softmax, SAFE, NATURAL)
    weights = dropped(stage, weights, kept_weights(stage, start, rows, BLOCK_N))
    weights, v_tile = weight_operand(stage, weights, MASKED, v_tile.dtype), dot_operand(v_tile, v_tile.dtype)
    return Softmax(accumulate(weights, v_tile, softmax.total, OPTIONS), softmax.row_max, softmax.row_sum)


@triton.jit(do_not_specialize=SIZES + STRIDES)
def attention_forward_kernel(
    inputs,  # Inputs
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    statistics_pointer,  # (B, Hq, 2, Lq), contiguous: of each row the largest score and the log of the sum
    extras,  # Extras
    query_heads, query_length, key_length,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold, section,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M queries of one head and loops over their visible keys."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    batch, head, first_row = query_tile_of_program(query_heads, query_length, section, OPTIONS)
    batch_head, key_head = batch * query_heads + head, head // OPTIONS.GROUP
    k = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, key_length, OPTIONS)
    v = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, key_length, OPTIONS)
    stage = Stage(
        extras,
        stage_numbers(
            extras, batch, head, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, 1,
            left, right, threshold, OPTIONS,
        ),
    )  # fmt: skip
    queries = head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, query_length, OPTIONS))
    q = load_rotated(queries, angles, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    q, scale = oriented(dot_operand(q, q.dtype), scale, OPTIONS)
    row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    softmax = Softmax(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), row_max, row_sum)
    span = key_blocks(first_row, stage, OPTIONS)
    for key in range(span.full_start, span.full_end, OPTIONS.BLOCK_N):
        softmax = attend_block(softmax, q, first_row, key, k, v, stage, angles, scale, False, OPTIONS)
    for offset in tl.range(0, masked_length(span), OPTIONS.MASKED, num_stages=1):
        key = masked_position(span, offset)
        if has_keys(stage, key, OPTIONS.MASKED):
            softmax = attend_block(softmax, q, first_row, key, k, v, stage, angles, scale, True, OPTIONS)
    out, lse, row_max, log_sum = finish_rows(softmax, dropout_scale(stage), OPTIONS.NATURAL)
    store_rows(output_rows(out_pointer, batch, head, query_heads, query_length, OPTIONS), out, first_row, OPTIONS)
    rows = first_row + tl.arange(0, BLOCK_M)
    exists = rows < query_length
    store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, rows, query_length, exists)
