"""Triton: attention forward for any lengths. Derivation and passes over memory: README.md."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LN_2, dot_operand, from_fp32
from transformer_kernels.ops.attention._triton_sequences import within_sequence
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    any_real,
    biased,
    exponential,
    finite_rows,
    keep_tile,
    key_blocks,
    load_bias,
    load_rows,
    multiply,
    score_unit,
    store_rows,
    tile_of_program,
    visible_pairs,
    wide,
)


@triton.jit
def weigh(scores, scale, row_max, row_sum, SAFE: tl.constexpr, NATURAL: tl.constexpr):
    """One step of the online softmax: weights exp(scale * scores - max), the new maximum and sum, and the factor for
    what was gathered so far. SAFE where a row may have seen no key yet, so that its maximum is -inf."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    origin = tl.where(new_max == float("-inf"), 0.0, new_max) if SAFE else new_max
    weights = exponential(scores * scale - origin[:, None], NATURAL)  # [M, N], one fused multiply-add and one exp2 each
    correction = exponential(row_max - origin, NATURAL)
    return weights, new_max, row_sum * correction + tl.sum(weights, 1), correction


@triton.jit
def finish_rows(total, row_max, row_sum, keep_scale, NATURAL: tl.constexpr):
    """Normalised output and natural log-sum-exp; a row that saw no key gets 0 and -inf."""
    empty = row_sum == 0.0
    out = total * (keep_scale / tl.where(empty, 1.0, row_sum))[:, None]
    lse = row_max / score_unit(NATURAL) + tl.log2(tl.where(empty, 1.0, row_sum)) * LN_2
    lse = tl.where(empty, float("-inf"), lse)
    return out, lse


@triton.jit
def attend_block(
    total,
    row_max,
    row_sum,
    taint,
    q,
    start,
    k_source,
    v_source,
    padding_pointer,
    sequences_pointer,
    bias_pointer,
    seed,
    batch,
    head,
    key_head,
    first_row,
    query_length,
    key_length,
    k_row,
    v_row,
    bias_row,
    scale,
    window,
    threshold,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Add one block of keys to the running softmax of a query tile."""
    tile_rows = tl.arange(0, q.shape[0])[:, None]
    tile_columns = tl.arange(0, BLOCK_N)[None, :]
    rows, columns = first_row + tile_rows, start + tile_columns
    if MASKED:
        visible = visible_pairs(rows, columns, key_length - query_length, key_length, window, CAUSAL, WINDOW)
        v = load_rows(
            v_source, batch, key_head, start, v_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True, DESCRIPTOR
        )  # [N, D]
        if PADDING:
            real = tl.load(padding_pointer + columns, mask=columns < key_length, other=0) != 0
            visible = visible & real
            v = tl.where(tl.reshape(real, (BLOCK_N, 1)), v, tl.zeros_like(v))
        if SEQUENCES:
            visible = visible & within_sequence(sequences_pointer, rows, columns, key_length)
        if CAUSAL or WINDOW or SEQUENCES:
            v, trace = finite_rows(v)
            taint += tl.sum(tl.where(visible, trace[None, :], 0.0), 1)
    k = load_rows(
        k_source, batch, key_head, start, k_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, MASKED, DESCRIPTOR
    )  # [N, D]
    scores = multiply(q, tl.trans(dot_operand(k, k.dtype)), PRECISION)  # [M, N]
    if MASKED or BIAS != "none":
        scores *= scale
        scale = 1.0
    if BIAS != "none":
        bias = load_bias(
            bias_pointer, first_row, start, tile_rows, tile_columns, bias_row, query_length, key_length, MASKED, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    else:
        v = load_rows(
            v_source,
            batch,
            key_head,
            start,
            v_row,
            key_length,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
            ALIGNMENT,
            False,
            DESCRIPTOR,
        )  # [N, D]
    weights, row_max, row_sum, correction = weigh(scores, scale, row_max, row_sum, MASKED or BIAS != "none", NATURAL)
    if DROPOUT:
        weights = tl.where(keep_tile(seed, start, rows, head, threshold, BLOCK_N), weights, 0.0)
    total = accumulate(
        dot_operand(weights, v.dtype), dot_operand(v, v.dtype), total * correction[:, None], PRECISION
    )  # [M, D]
    return total, row_max, row_sum, taint


@triton.jit(
    do_not_specialize=[
        "query_heads",
        "query_length",
        "key_length",
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
        "window",
        "threshold",
        "section",
    ]
)
def attention_forward_kernel(
    q_source,  # (B, Hq, Lq, D)
    k_source,  # (B, Hk, Lk, D)
    v_source,  # (B, Hk, Lk, D)
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
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
    MASKED_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BLOCK_M queries of one head and walks over the keys they see."""
    blocks = tl.cdiv(query_length, BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if CAUSAL:
        block = blocks - 1 - block  # the longest tiles first, so that short ones fill the end
    batch, head = batch_head // query_heads, batch_head % query_heads
    key_head = head // GROUP
    first_row = block * BLOCK_M
    k_row, v_row = wide(k_row, ALIGNMENT), wide(v_row, ALIGNMENT)
    if not DESCRIPTOR:
        q_source += batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT)
        k_source += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
        v_source += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
    if BIAS != "none":
        bias_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
    seed = tl.load(seed_pointer) if DROPOUT else 0

    q = load_rows(
        q_source,
        batch,
        head,
        first_row,
        wide(q_row, ALIGNMENT),
        query_length,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
        ALIGNMENT,
        True,
        DESCRIPTOR,
    )  # [M, D]
    q = dot_operand(q, q.dtype)
    NATURAL: tl.constexpr = out_pointer.dtype.element_ty == tl.float32
    scale *= score_unit(NATURAL)
    if NEGATE:  # a maximum survives only a factor that is not negative
        q, scale = -q, -scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    taint = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, full_start, full_end, end = key_blocks(
        padding_pointer,
        sequences_pointer,
        first_row,
        tl.minimum(first_row + BLOCK_M, query_length) - 1,
        key_length - query_length,
        key_length,
        window,
        BLOCK_N,
        MASKED_N,
        CAUSAL,
        WINDOW,
        PADDING,
        SEQUENCES,
    )
    for key in range(full_start, full_end, BLOCK_N):
        key = tl.multiple_of(key, BLOCK_N)
        total, row_max, row_sum, taint = attend_block(
            total, row_max, row_sum, taint, q, key, k_source, v_source, padding_pointer, sequences_pointer,
            bias_pointer, seed, batch, batch_head, key_head, first_row, query_length, key_length, k_row, v_row,
            bias_row, scale, window, threshold, False, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, PADDING,
            SEQUENCES, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, DESCRIPTOR, PRECISION, NATURAL,
        )  # fmt: skip
    before = full_start - start  # keys of the masked blocks to the left of the full ones; the others are to the right
    for offset in tl.range(0, before + tl.maximum(end - full_end, 0), MASKED_N, num_stages=1):
        key = tl.multiple_of(tl.where(offset < before, start + offset, full_end + offset - before), MASKED_N)
        visited = True
        if PADDING:
            visited = any_real(padding_pointer, key, key_length, MASKED_N)
        if visited:
            total, row_max, row_sum, taint = attend_block(
                total, row_max, row_sum, taint, q, key, k_source, v_source, padding_pointer, sequences_pointer,
                bias_pointer, seed, batch, batch_head, key_head, first_row, query_length, key_length, k_row, v_row,
                bias_row, scale, window, threshold, True, HEAD_DIM, BLOCK_D, MASKED_N, CAUSAL, WINDOW, PADDING,
                SEQUENCES, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, DESCRIPTOR, PRECISION, NATURAL,
            )  # fmt: skip

    out, lse = finish_rows(total, row_max, row_sum, keep_scale, NATURAL)
    if CAUSAL or WINDOW or SEQUENCES:
        out += taint[:, None]
    out_pointer += (tl.cast(batch, tl.int64) * query_length * query_heads + head) * HEAD_DIM
    out = from_fp32(out, out_pointer.dtype.element_ty)
    out_row = tl.cast(query_heads, tl.int64) * HEAD_DIM
    store_rows(
        out_pointer, out, first_row, out_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, HEAD_DIM & -HEAD_DIM
    )  # fmt: skip
    lse_rows = first_row + tl.arange(0, BLOCK_M)
    tl.store(lse_pointer + tl.cast(batch_head, tl.int64) * query_length + lse_rows, lse, mask=lse_rows < query_length)
