"""Triton: dk and dv of attention for any lengths, and functions shared with the short path and the bias gradient."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED, Queries
from transformer_kernels.ops.attention._triton_masks import (
    isolated_padding,
    isolated_queries,
    masked_length,
    masked_position,
    query_blocks,
    read_length,
    real_columns,
    visible_tile,
)
from transformer_kernels.ops.attention._triton_rotary import Angles, first_token, load_rotated, store_unrotated
from transformer_kernels.ops.attention._triton_scores import (
    Stage,
    dropout_scale,
    dropped,
    dropped_gradient,
    kept_weights,
    load_base,
    load_statistic,
    numbers_of_head,
    product_gradient,
    score_unit,
    stage_numbers,
    tile_scores,
    weight_operand,
    weights_of,
)
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    head_rows,
    load_rows,
    multiply,
    store_rows,
    tile_of_program,
)


class Keys(NamedTuple):
    """A tile of keys."""

    k: Any  # [N, D]
    v: Any  # [N, D]
    real: Any  # [N], False for padding
    first_key: Any


class KeyGradient(NamedTuple):
    """Gradients that key kernels accumulate over queries."""

    dk: Any  # [N, D]
    dv: Any  # [N, D]


class QuerySource(NamedTuple):
    """The query-side inputs of one head."""

    q: Any
    dout: Any
    statistics: Any
    delta: Any
    angles: Any


@triton.jit
def load_queries(source, first_row, query_length, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The queries [first_row, first_row + ROWS)."""
    rows = first_row + tl.arange(0, ROWS)
    q = load_rotated(source.q, source.angles, first_row, ROWS, BOUNDED, OPTIONS)  # [M, D]
    dout = load_rows(source.dout, first_row, ROWS, BOUNDED, OPTIONS)  # [M, D]
    base, log_sum = load_base(source.statistics, rows, query_length, BOUNDED, OPTIONS)
    delta = load_statistic(source.delta, rows, query_length, 0.0, BOUNDED)
    return Queries(q, dout, base, log_sum, delta, first_row)


@triton.jit
def operands(queries):
    """The queries as operands of matrix products."""
    q, dout = dot_operand(queries.q, queries.q.dtype), dot_operand(queries.dout, queries.dout.dtype)
    return Queries(q, dout, queries.base, queries.log_sum, queries.delta, queries.first_row)


@triton.jit
def key_gradient_block(
    gradient, keys, queries, stage, scale,
    MASKED: tl.constexpr, WHOLE_ROWS: tl.constexpr, SCORES_ONLY: tl.constexpr, DTYPE: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Accumulate the contribution of one query block to dk and dv of a key tile, unless SCORES_ONLY.

    Also returns delta and dS [N, M]: with respect to products, with SCORES_ONLY to scores. Tiles are transposed, keys
    first, so that weights and dS are left operands of the next product without a conversion.

    With WHOLE_ROWS the tile contains all keys and `delta` is -dlse on entry: the mean of dP under the weights is added,
    which needs no `out`, and the weights are normalised again to remove the rounding of scores."""
    PADDED: tl.constexpr = WHOLE_ROWS or SCORES_ONLY  # else rows of padding are not stored
    SCREENED: tl.constexpr = stage.inputs.sequences is not None or (PADDED and stage.inputs.padding is not None)
    tile_rows = tl.arange(0, queries.q.shape[0])[None, :]
    tile_columns = tl.arange(0, keys.k.shape[0])[:, None]
    rows, columns = queries.first_row + tile_rows, keys.first_key + tile_columns
    products = multiply(keys.k, tl.trans(queries.q), OPTIONS)  # [N, M]
    scores, slope = tile_scores(
        products, stage, scale, queries.first_row, keys.first_key, tile_rows, tile_columns, True, False, OPTIONS
    )
    if SCORES_ONLY:
        slope = 1.0
    weights = weights_of(scores, queries.base[None, :], queries.log_sum[None, :], OPTIONS)
    delta = queries.delta
    visible = rows >= 0
    if MASKED:
        visible = visible_tile(stage, keys.real[:, None], rows, columns, PADDED, OPTIONS)
        weights = tl.where(visible, weights, 0.0)
    if WHOLE_ROWS:
        weight_sum = tl.sum(weights, 0)  # 1 up to the rounding of scores, or 0
        weights *= (1.0 / tl.where(weight_sum == 0.0, 1.0, weight_sum))[None, :]
    kept = tl.trans(kept_weights(stage, keys.first_key, tl.trans(rows), keys.k.shape[0]))
    dk, dv = gradient.dk, gradient.dv
    if not SCORES_ONLY:
        operand = weight_operand(stage, dropped(stage, weights, kept), PADDED, DTYPE)
        dv = accumulate(operand, queries.dout, dv, OPTIONS)  # [N, D]
    dweights = multiply(keys.v, tl.trans(queries.dout), OPTIONS)  # [N, M]
    dweights = dropped_gradient(stage, dweights, kept)
    if WHOLE_ROWS:
        mean = tl.sum(weights * dweights, 0)
        if OPTIONS.NATURAL:  # correct the rounding of this sum, an error common to all keys of a query
            mean += tl.sum(weights * (dweights - mean[None, :]), 0)
        delta += mean
    HIDE: tl.constexpr = MASKED and not WHOLE_ROWS and SCREENED  # v or delta may be NaN where the weight is 0
    dproducts = product_gradient(weights * (dweights - delta[None, :]), slope, visible, HIDE, OPTIONS)
    if not SCORES_ONLY:
        dk = accumulate(weight_operand(stage, dproducts, PADDED, DTYPE), queries.q, dk, OPTIONS)
    return KeyGradient(dk, dv), dproducts, delta


@triton.jit
def accumulate_queries(gradient, keys, source, first_row, stage, scale, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Load the query block at `first_row` and accumulate its contribution to dk and dv."""
    BLOCK_M: tl.constexpr = OPTIONS.MASKED if MASKED else OPTIONS.BLOCK_M
    queries = load_queries(source, first_row, stage.numbers.query_length, BLOCK_M, MASKED, OPTIONS)
    if MASKED:
        q, dout, dk, dv = isolated_queries(
            stage, queries.q, queries.dout, gradient.dk, gradient.dv, first_row, keys.first_key
        )
        gradient = KeyGradient(dk, dv)
        queries = Queries(q, dout, queries.base, queries.log_sum, queries.delta, first_row)
    gradient, _, _ = key_gradient_block(
        gradient, keys, operands(queries), stage, scale, MASKED, False, False, queries.q.dtype, OPTIONS
    )
    return gradient


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_key_kernel(
    inputs,  # Inputs
    backward,  # Backward
    extras,  # Extras
    query_heads, query_length, key_length,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dkv_batch, dkv_head, dkv_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold, section,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N keys of one key head and loops over the queries that see them, in every query head of
    the group. Rows of padding and out-of-range keys are not stored."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    score_scale = scale * score_unit(OPTIONS.NATURAL)
    key_heads = query_heads // OPTIONS.GROUP
    block, batch_head = tile_of_program(tl.cdiv(key_length, BLOCK_N), section)
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    first_key = block * BLOCK_N
    numbers = stage_numbers(
        extras, batch, key_head, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, 1,
        left, right, threshold, OPTIONS,
    )  # fmt: skip
    keys_stage = Stage(extras, numbers)
    real = real_columns(keys_stage, first_key + tl.arange(0, BLOCK_N))
    read = read_length(keys_stage, real)
    k_rows = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, read, OPTIONS)
    v_rows = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, read, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, key_length, OPTIONS))
    k = load_rotated(k_rows, angles, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
    v = load_rows(v_rows, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
    keys = Keys(dot_operand(k, k.dtype), dot_operand(v, v.dtype), real, first_key)
    zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    gradient = KeyGradient(zeros, zeros)
    span = query_blocks(first_key, read, keys_stage, OPTIONS)
    masked_rows = masked_length(span)
    for member in range(OPTIONS.GROUP):
        head = key_head * OPTIONS.GROUP + member
        query_batch_head = batch * query_heads + head
        row_offset = tl.cast(query_batch_head, tl.int64) * query_length
        source = QuerySource(
            head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS),
            head_rows(backward.dout, batch, head, dout_batch, dout_head, dout_row, query_length, OPTIONS),
            backward.statistics + 2 * row_offset,
            backward.delta + row_offset,
            angles,
        )
        stage = Stage(extras, numbers_of_head(numbers, batch, head, query_heads, bias_batch, bias_head, OPTIONS))
        for row in range(span.full_start, span.full_end, OPTIONS.BLOCK_M):
            gradient = accumulate_queries(gradient, keys, source, row, stage, score_scale, False, OPTIONS)
        for offset in tl.range(0, masked_rows, OPTIONS.MASKED, num_stages=1):
            row = masked_position(span, offset)
            gradient = accumulate_queries(gradient, keys, source, row, stage, score_scale, True, OPTIONS)
    dk, dv = gradient.dk * scale, gradient.dv * dropout_scale(keys_stage)
    dk, dv = isolated_padding(keys_stage, dk, real), isolated_padding(keys_stage, dv, real)
    for_dk = head_rows(backward.dk, batch, key_head, dkv_batch, dkv_head, dkv_row, key_length, OPTIONS)
    for_dv = head_rows(backward.dv, batch, key_head, dkv_batch, dkv_head, dkv_row, key_length, OPTIONS)
    store_unrotated(for_dk, dk, angles, first_key, OPTIONS)
    store_rows(for_dv, dv, first_key, OPTIONS)
