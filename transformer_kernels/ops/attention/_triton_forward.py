"""Triton: attention forward for any lengths. See README.md for the derivation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LN_2, dot_operand
from transformer_kernels.ops.attention._triton_rotary import Angles, first_token, load_rotated
from transformer_kernels.ops.attention._triton_tile import (
    Bias,
    Dropout,
    Mask,
    accumulate,
    any_real,
    biased,
    capped,
    dropout_scale,
    exponential,
    finite_rows,
    head_offset,
    head_rows,
    keep_tile,
    key_blocks,
    load_bias,
    load_padding,
    load_rows,
    masked_length,
    masked_position,
    multiply,
    output_rows,
    query_tile_of_program,
    score_unit,
    store_rows,
    visible_pairs,
    within_sequence,
    without_padding,
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
def positive(scale):
    """|scale|, at least the smallest normal number: a maximum and -inf are preserved only by a positive factor."""
    return tl.maximum(tl.abs(scale), 1e-37)


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
    softmax, q, first_row, start, k, v, mask, bias, dropout, angles, scale,
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
        visible = visible_pairs(rows, columns, mask, OPTIONS)
        v_tile = load_rows(v, start, BLOCK_N, True, OPTIONS)  # [N, D]
        if mask.padding is not None:
            real = load_padding(mask, columns)
            visible = visible & real
            v_tile = without_padding(v_tile, real)
        if mask.sequences is not None:  # non-finite values reach only queries of their own sequence
            visible = visible & within_sequence(mask, rows, columns)
            v_tile, trace = finite_rows(v_tile)
            total += tl.sum(tl.where(visible, trace[None, :], 0.0), 1)[:, None]
    k_tile = load_rotated(k, angles, start, BLOCK_N, MASKED, OPTIONS)  # [N, D]
    scores = multiply(q, tl.trans(dot_operand(k_tile, k_tile.dtype)), OPTIONS)  # [M, N]
    if OPTIONS.SOFTCAP > 0.0 or bias.pointer is not None:
        scores = capped(scores * scale, OPTIONS)
        scale = 1.0
    if bias.pointer is not None:
        values = load_bias(bias, first_row, start, tile_rows, tile_columns, mask, MASKED, OPTIONS)
        scores = biased(scores, values, NATURAL)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    else:
        v_tile = load_rows(v, start, BLOCK_N, False, OPTIONS)  # [N, D]
    SAFE: tl.constexpr = MASKED or bias.pointer is not None
    weights, softmax = weigh(scores, scale, Softmax(total, softmax.row_max, softmax.row_sum), SAFE, NATURAL)
    if dropout.seed is not None:
        weights = tl.where(keep_tile(dropout, start, rows, BLOCK_N), weights, 0.0)
    weights, v_tile = dot_operand(weights, v_tile.dtype), dot_operand(v_tile, v_tile.dtype)
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
    mask = Mask(extras.padding, batch, extras.sequences, query_length, key_length, left, right)
    bias = Bias(extras.bias, head_offset(batch, head, bias_batch, bias_head, OPTIONS.BIAS_ALIGNMENT), bias_row)
    dropout = Dropout(tl.load(extras.seed) if extras.seed is not None else None, batch_head, threshold)
    queries = head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, query_length, OPTIONS))
    q = load_rotated(queries, angles, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    q = dot_operand(q, q.dtype)
    scale = positive(scale * score_unit(OPTIONS.NATURAL))
    if OPTIONS.NEGATE:
        q = -q
    row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    softmax = Softmax(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), row_max, row_sum)
    span = key_blocks(first_row, mask, OPTIONS)
    for key in range(span.full_start, span.full_end, OPTIONS.BLOCK_N):
        softmax = attend_block(softmax, q, first_row, key, k, v, mask, bias, dropout, angles, scale, False, OPTIONS)
    for offset in tl.range(0, masked_length(span), OPTIONS.MASKED, num_stages=1):
        key = masked_position(span, offset)
        visited = True
        if extras.padding is not None:
            visited = any_real(mask, key, OPTIONS.MASKED)
        if visited:
            softmax = attend_block(softmax, q, first_row, key, k, v, mask, bias, dropout, angles, scale, True, OPTIONS)
    out, lse, row_max, log_sum = finish_rows(softmax, dropout_scale(dropout), OPTIONS.NATURAL)
    store_rows(output_rows(out_pointer, batch, head, query_heads, query_length, OPTIONS), out, first_row, OPTIONS)
    rows = first_row + tl.arange(0, BLOCK_M)
    exists = rows < query_length
    store_row_results(lse_pointer, statistics_pointer, lse, row_max, log_sum, batch_head, rows, query_length, exists)
