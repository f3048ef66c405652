"""Triton: the gradient of an attention bias, summed over broadcast axes."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_backward import UNSPECIALIZED
from transformer_kernels.ops.attention._triton_backward_key import (
    KeyGradient,
    Keys,
    QuerySource,
    key_gradient_block,
    load_queries,
    operands,
)
from transformer_kernels.ops.attention._triton_masks import has_queries, real_columns, sequence_queries
from transformer_kernels.ops.attention._triton_rotary import Angles
from transformer_kernels.ops.attention._triton_scores import Stage, numbers_of_head, score_unit, stage_numbers
from transformer_kernels.ops.attention._triton_tile import head_rows, load_rows


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "batches", "bias_batches", "bias_heads"])
def attention_backward_bias_kernel(
    inputs,  # Inputs
    backward,  # Backward
    dbias_pointer,  # (splits, bias batches, bias heads, Lq or 1, Lk), contiguous
    extras,  # Extras
    batches, query_heads, query_length, key_length, bias_batches, bias_heads,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row,
    bias_batch, bias_head, bias_row,
    scale, left, right, threshold,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """One program owns one tile of dbias and one split of its sum of dS over the batches, heads and query blocks on
    which the bias is broadcast."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    row_blocks = tl.cdiv(query_length, BLOCK_M)
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    own_rows = row_blocks if OPTIONS.SCORES.BIAS == "full" else 1
    program = tl.program_id(0)
    own_key, program = program % key_tiles, program // key_tiles
    own_row, program = program % own_rows, program // own_rows
    own_head, program = program % bias_heads, program // bias_heads
    own_batch, split = program % bias_batches, program // bias_batches
    shared_rows, shared_heads = row_blocks // own_rows, query_heads // bias_heads
    shared = shared_rows * shared_heads * (batches // bias_batches)
    splits = tl.num_programs(0) // (key_tiles * own_rows * bias_heads * bias_batches)
    share = tl.cdiv(shared, splits)
    first_key = own_key * BLOCK_N
    numbers = stage_numbers(
        extras, 0, 0, query_heads, query_length, key_length, bias_batch, bias_head, bias_row, 1,
        left, right, threshold, OPTIONS,
    )  # fmt: skip
    first_query, end_query = sequence_queries(Stage(extras, numbers), first_key, OPTIONS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for index in tl.range(split * share, tl.minimum((split + 1) * share, shared), num_stages=1):
        first_row = (own_row + index % shared_rows) * BLOCK_M
        index = index // shared_rows
        head, batch = own_head + index % shared_heads, own_batch + index // shared_heads
        if has_queries(Stage(extras, numbers), first_row, first_query, end_query, OPTIONS):
            batch_head, key_head = batch * query_heads + head, head // OPTIONS.GROUP
            row_offset = tl.cast(batch_head, tl.int64) * query_length
            stage = Stage(extras, numbers_of_head(numbers, batch, head, query_heads, bias_batch, bias_head, OPTIONS))
            source = QuerySource(
                head_rows(inputs.q, batch, head, q_batch, q_head, q_row, query_length, OPTIONS),
                head_rows(backward.dout, batch, head, dout_batch, dout_head, dout_row, query_length, OPTIONS),
                backward.statistics + 2 * row_offset,
                backward.delta + row_offset,
                Angles(None, None, 0),
            )
            queries = load_queries(source, first_row, query_length, BLOCK_M, True, OPTIONS)
            k_rows = head_rows(inputs.k, batch, key_head, k_batch, k_head, k_row, key_length, OPTIONS)
            v_rows = head_rows(inputs.v, batch, key_head, v_batch, v_head, v_row, key_length, OPTIONS)
            k = load_rows(k_rows, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
            v = load_rows(v_rows, first_key, BLOCK_N, True, OPTIONS)  # [N, D]
            real = real_columns(stage, first_key + tl.arange(0, BLOCK_N))
            keys = Keys(dot_operand(k, k.dtype), dot_operand(v, v.dtype), real, first_key)
            _, dscores, _ = key_gradient_block(
                KeyGradient(0.0, 0.0), keys, operands(queries), stage, scale * score_unit(OPTIONS.NATURAL),
                True, False, True, k.dtype, OPTIONS,
            )  # [N, M]  # fmt: skip
            total += dscores

    rows, keys = own_row * BLOCK_M + tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N)
    tile = tl.cast((split * bias_batches + own_batch) * bias_heads + own_head, tl.int64)
    if OPTIONS.SCORES.BIAS == "full":
        pointers = dbias_pointer + (tile * query_length + rows[None, :]) * key_length + keys[:, None]
        inside = (rows < query_length)[None, :] & (keys < key_length)[:, None]
        tl.store(pointers, from_fp32(total, dbias_pointer.dtype.element_ty), mask=inside)
    else:
        total = from_fp32(tl.sum(total, 1), dbias_pointer.dtype.element_ty)
        tl.store(dbias_pointer + tile * key_length + keys, total, mask=keys < key_length)
