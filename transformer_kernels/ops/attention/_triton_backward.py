"""Triton: attention backward for any lengths: dq. See README.md for the derivation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, to_fp32
from transformer_kernels.ops.attention._triton_forward import SIZES, STRIDES
from transformer_kernels.ops.attention._triton_masks import (
    has_keys,
    isolated_keys,
    key_blocks,
    masked_length,
    masked_position,
    query_tile_of_program,
    real_columns,
    visible_tile,
)
from transformer_kernels.ops.attention._triton_rotary import Angles, first_token, load_rotated, store_unrotated
from transformer_kernels.ops.attention._triton_scores import (
    Stage,
    dropped_gradient,
    kept_weights,
    load_base,
    product_gradient,
    score_unit,
    stage_numbers,
    tile_scores,
    weight_operand,
    weights_of,
)
from transformer_kernels.ops.attention._triton_tile import accumulate, head_rows, load_rows, multiply, output_rows

GRADIENT_STRIDES = [f"{tensor}_{axis}" for tensor in ("dout", "dq", "dkv") for axis in ("batch", "head", "row")]
UNSPECIALIZED = SIZES + STRIDES + GRADIENT_STRIDES


class Backward(NamedTuple):
    """Pointers of the backward pass besides the inputs."""

    out: Any  # (B, Lq, Hq, D), contiguous
    statistics: Any  # (B, Hq, 2, Lq), contiguous: the largest score and the log of the sum
    dout: Any  # (B, Hq, Lq, D)
    dlse: Any  # (B, Hq, Lq), contiguous, or None
    delta: Any  # (B, Hq, Lq), contiguous, written by one kernel and read by the next; or None
    dq: Any  # (B, Hq, Lq, D)
    dk: Any  # (B, Hk, Lk, D)
    dv: Any  # (B, Hk, Lk, D), with the strides of dk; heads are adjacent


class Queries(NamedTuple):
    """A tile of queries in the backward pass."""

    q: Any  # [M, D]
    dout: Any  # [M, D]
    base: Any  # [M], the largest score; see `load_base`
    log_sum: Any  # [M]
    delta: Any  # [M]
    first_row: Any


@triton.jit
def query_gradient_block(
    dq, queries, start, k, v, stage, angles, scale,
    MASKED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq [M, D] of a query tile plus the contribution of the key block at `start`."""
    BLOCK_N: tl.constexpr = OPTIONS.MASKED if MASKED else OPTIONS.BLOCK_N
    tile_rows = tl.arange(0, OPTIONS.BLOCK_M)[:, None]
    tile_columns = tl.arange(0, BLOCK_N)[None, :]
    rows, columns = queries.first_row + tile_rows, start + tile_columns
    k_tile = load_rotated(k, angles, start, BLOCK_N, MASKED, OPTIONS)  # [N, D]
    visible = rows >= 0
    if MASKED:
        real = real_columns(stage, columns)
        visible = visible_tile(stage, real, rows, columns, True, OPTIONS)
        k_tile, _ = isolated_keys(stage, k_tile, real)
    operand_k = dot_operand(k_tile, k_tile.dtype)
    products = multiply(queries.q, tl.trans(operand_k), OPTIONS)  # [M, N]
    scores, slope = tile_scores(
        products, stage, scale, queries.first_row, start, tile_rows, tile_columns, MASKED, False, OPTIONS
    )
    weights = weights_of(scores, queries.base[:, None], queries.log_sum[:, None], OPTIONS)
    v_tile = load_rows(v, start, BLOCK_N, MASKED, OPTIONS)  # [N, D]
    dweights = multiply(queries.dout, tl.trans(dot_operand(v_tile, v_tile.dtype)), OPTIONS)  # [M, N]
    dweights = dropped_gradient(stage, dweights, kept_weights(stage, start, rows, BLOCK_N))
    dproducts = product_gradient(weights * (dweights - queries.delta[:, None]), slope, visible, MASKED, OPTIONS)
    return accumulate(weight_operand(stage, dproducts, MASKED, k_tile.dtype), operand_k, dq, OPTIONS)  # [M, D]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_query_kernel(
    inputs,  # Inputs
    backward,  # Backward
    extras,  # Extras
    query_heads, query_length, key_length,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold, section,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M queries of one head: it writes their delta, then loops over their visible keys."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    NATURAL: tl.constexpr = OPTIONS.NATURAL
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
    span = key_blocks(first_row, stage, OPTIONS)  # before tiles are loaded: a padding mask takes many registers

    out_rows = output_rows(backward.out, batch, head, query_heads, query_length, OPTIONS)
    dout_rows = head_rows(backward.dout, batch, head, dout_batch, dout_head, dout_row, query_length, OPTIONS)
    out = load_rows(out_rows, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    dout = load_rows(dout_rows, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    delta = tl.sum(to_fp32(out) * to_fp32(dout), 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    row_offset = tl.cast(batch_head, tl.int64) * query_length
    if backward.dlse is not None:
        delta -= tl.load(backward.dlse + row_offset + rows, mask=rows < query_length, other=0.0)
    tl.store(backward.delta + row_offset + rows, delta, mask=rows < query_length)

    q_rows = head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS)
    angles = Angles(extras.cos, extras.sin, first_token(batch, query_length, OPTIONS))
    q = load_rotated(q_rows, angles, first_row, BLOCK_M, True, OPTIONS)  # [M, D]
    base, log_sum = load_base(backward.statistics + 2 * row_offset, rows, query_length, True, OPTIONS)
    queries = Queries(dot_operand(q, q.dtype), dot_operand(dout, dout.dtype), base, log_sum, delta, first_row)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    score_scale = scale * score_unit(NATURAL)
    for key in range(span.full_start, span.full_end, OPTIONS.BLOCK_N):
        dq = query_gradient_block(dq, queries, key, k, v, stage, angles, score_scale, False, OPTIONS)
    for offset in tl.range(0, masked_length(span), OPTIONS.MASKED, num_stages=1):
        key = masked_position(span, offset)
        if has_keys(stage, key, OPTIONS.MASKED):
            dq = query_gradient_block(dq, queries, key, k, v, stage, angles, score_scale, True, OPTIONS)
    target = head_rows(backward.dq, batch, head, dq_batch, dq_head, dq_row, query_length, OPTIONS)
    store_unrotated(target, dq * scale, angles, first_row, OPTIONS)
