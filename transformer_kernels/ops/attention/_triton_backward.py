"""Triton: attention backward for any lengths, without atomics: dq, then dk and dv, and dbias where it is asked for.

With P = exp(S - lse) recomputed, dP = dout v^T and delta = rowsum(dout * out) - dlse:
dS = P * (dP - delta), dq = scale dS k, dk = scale dS^T q, dv = P^T dout, dbias = dS.
"""

import triton
import triton.language as tl

from transformer_kernels._triton_language import dot_operand, from_fp32, to_fp32
from transformer_kernels.ops.attention._triton_tile import (
    accumulate,
    biased,
    exponential,
    finite_rows,
    keep_tile,
    key_blocks,
    load_bias,
    load_lse,
    load_rows,
    load_statistic,
    multiply,
    query_blocks,
    score_unit,
    store_rows,
    tile_of_program,
    visible_pairs,
    wide,
)

UNSPECIALIZED = [
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
    "dout_batch",
    "dout_head",
    "dout_row",
    "bias_batch",
    "bias_head",
    "bias_row",
    "window",
    "threshold",
    "section",
]
"""A new length, stride or head count compiles nothing anew; what alignment matters is in ALIGNMENT."""


@triton.jit
def query_gradient_block(
    dq,
    q,
    dout,
    lse,
    delta,
    start,
    k_pointer,
    v_pointer,
    padding_pointer,
    bias_pointer,
    seed,
    batch_head,
    first_row,
    query_length,
    key_length,
    k_row,
    v_row,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Add what one block of keys gives to the gradient of a query tile."""
    tile_rows = tl.arange(0, q.shape[0])[:, None]
    tile_columns = tl.arange(0, BLOCK_N)[None, :]
    rows, columns = first_row + tile_rows, start + tile_columns
    k = load_rows(
        k_pointer, 0, 0, start, k_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [N, D]
    if MASKED:
        visible = visible_pairs(rows, columns, key_length - query_length, key_length, window, CAUSAL, WINDOW)
        if PADDING:
            visible = visible & (tl.load(padding_pointer + columns, mask=columns < key_length, other=0) != 0)
        if CAUSAL or WINDOW or PADDING:
            k, _ = finite_rows(k)
    operand_k = dot_operand(k, k.dtype)
    scores = multiply(q, tl.trans(operand_k), PRECISION) * scale  # [M, N]
    if BIAS != "none":
        bias = load_bias(
            bias_pointer, first_row, start, tile_rows, tile_columns, bias_row, query_length, key_length, MASKED, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    weights = exponential(scores - lse[:, None], NATURAL)
    v = load_rows(
        v_pointer, 0, 0, start, v_row, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [N, D]
    dweights = multiply(dout, tl.trans(dot_operand(v, v.dtype)), PRECISION)  # [M, N]
    if DROPOUT:
        keep = keep_tile(seed, start, rows, batch_head, threshold, BLOCK_N)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    dscores = weights * (dweights - delta[:, None])
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
    return accumulate(dot_operand(dscores, k.dtype), operand_k, dq, PRECISION)  # [M, D]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_query_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    out_pointer,  # (B, Lq, Hq, D), contiguous
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    dlse_pointer,  # (B, Hq, Lq), contiguous, or None
    delta_pointer,  # (B, Hq, Lq), contiguous: written here, for the kernels that follow
    dq_pointer,  # (B, Lq, Hq, D), contiguous
    padding_pointer,  # (B, Lk), contiguous, or None
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
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BLOCK_M queries of one head: it writes their delta, then walks over the keys they see."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    score_scale = scale * score_unit(NATURAL)
    blocks = tl.cdiv(query_length, BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if CAUSAL:
        block = blocks - 1 - block  # the longest tiles first, so that short ones fill the end
    batch, head = batch_head // query_heads, batch_head % query_heads
    key_head = head // GROUP
    first_row = block * BLOCK_M
    q_pointer += batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT)
    k_pointer += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
    v_pointer += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    dout_pointer += batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT)
    k_row, v_row = wide(k_row, ALIGNMENT), wide(v_row, ALIGNMENT)
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
    if BIAS != "none":
        bias_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
    seed = tl.load(seed_pointer) if DROPOUT else 0
    out_row = tl.cast(query_heads, tl.int64) * HEAD_DIM
    out_offset = (tl.cast(batch, tl.int64) * query_length * query_heads + head) * HEAD_DIM
    row_offset = tl.cast(batch_head, tl.int64) * query_length

    out = load_rows(
        out_pointer + out_offset, 0, 0, first_row, out_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D,
        HEAD_DIM & -HEAD_DIM, True, False,
    )  # [M, D]  # fmt: skip
    dout = load_rows(
        dout_pointer, 0, 0, first_row, wide(dout_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT,
        True, False,
    )  # [M, D]  # fmt: skip
    delta = tl.sum(to_fp32(out) * to_fp32(dout), 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    if dlse_pointer is not None:
        delta -= tl.load(dlse_pointer + row_offset + rows, mask=rows < query_length, other=0.0)
    tl.store(delta_pointer + row_offset + rows, delta, mask=rows < query_length)

    q = load_rows(
        q_pointer, 0, 0, first_row, wide(q_row, ALIGNMENT), query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [M, D]  # fmt: skip
    q, dout = dot_operand(q, q.dtype), dot_operand(dout, dout.dtype)
    lse = load_lse(lse_pointer + row_offset, rows, query_length, True, NATURAL)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, full_start, full_end, end = key_blocks(
        padding_pointer, first_row, tl.minimum(first_row + BLOCK_M, query_length) - 1, key_length - query_length,
        key_length, window, BLOCK_N, CAUSAL, WINDOW, PADDING,
    )  # fmt: skip
    for key in range(full_start, full_end, BLOCK_N):
        dq = query_gradient_block(
            dq, q, dout, lse, delta, key, k_pointer, v_pointer, padding_pointer, bias_pointer, seed, batch_head,
            first_row, query_length, key_length, k_row, v_row, bias_row, score_scale, window, threshold, keep_scale,
            False, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, PADDING, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT,
            PRECISION, NATURAL,
        )  # fmt: skip
    before = full_start - start
    for offset in tl.range(0, before + tl.maximum(end - full_end, 0), MASKED_N, num_stages=1):
        key = tl.where(offset < before, start + offset, full_end + offset - before)
        dq = query_gradient_block(
            dq, q, dout, lse, delta, key, k_pointer, v_pointer, padding_pointer, bias_pointer, seed, batch_head,
            first_row, query_length, key_length, k_row, v_row, bias_row, score_scale, window, threshold, keep_scale,
            True, HEAD_DIM, BLOCK_D, MASKED_N, CAUSAL, WINDOW, PADDING, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT,
            PRECISION, NATURAL,
        )  # fmt: skip
    dq = from_fp32(dq * scale, dq_pointer.dtype.element_ty)
    store_rows(dq_pointer + out_offset, dq, first_row, query_heads, query_length, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def transposed_weights(
    k,
    q,
    lse,
    first_key,
    first_row,
    bias_pointer,
    query_length,
    key_length,
    bias_row,
    scale,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The weights [N, M] of a tile, keys first, and which of its pairs are visible by position."""
    tile_rows = tl.arange(0, q.shape[0])[None, :]
    tile_columns = tl.arange(0, k.shape[0])[:, None]
    scores = multiply(k, tl.trans(q), PRECISION) * scale  # [N, M]
    if BIAS != "none":
        bias = load_bias(
            bias_pointer, first_row, first_key, tile_rows, tile_columns, bias_row, query_length, key_length, True, BIAS,
            BIAS_ALIGNMENT, NATURAL,
        )  # fmt: skip
        scores = biased(scores, bias, NATURAL)
    weights = exponential(scores - lse[None, :], NATURAL)
    visible = visible_pairs(
        first_row + tile_rows, first_key + tile_columns, key_length - query_length, key_length, window, CAUSAL, WINDOW
    )
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    return weights, visible


@triton.jit
def key_gradient_block(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    lse,
    delta,
    first_key,
    first_row,
    bias_pointer,
    seed,
    real,
    batch_head,
    query_length,
    key_length,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Add what one block of queries gives to dk and dv of a key tile; also returns dS, [N, M], and delta. Everything
    stands transposed, keys first, so that weights and dS go from one matrix product into the next as they are.

    With WHOLE_ROWS the tile holds all keys, `real` tells them from padding, and `delta` comes as -dlse: the mean of dP
    under the weights is added here, which needs no `out` and does not suffer from the rounding of lse."""
    weights, visible = transposed_weights(
        k, q, lse, first_key, first_row, bias_pointer, query_length, key_length, bias_row, scale, window, MASKED,
        CAUSAL, WINDOW, BIAS, BIAS_ALIGNMENT, PRECISION, NATURAL,
    )  # fmt: skip
    if WHOLE_ROWS:
        if PADDING:
            visible = visible & real[:, None]
            weights = tl.where(visible, weights, 0.0)
        weight_sum = tl.sum(weights, 0)  # 1 up to the rounding of lse, or 0
        weights /= tl.where(weight_sum == 0.0, 1.0, weight_sum)[None, :]
    kept_weights = weights
    if DROPOUT:
        rows = (first_row + tl.arange(0, q.shape[0]))[:, None]
        keep = tl.trans(keep_tile(seed, first_key, rows, batch_head, threshold, k.shape[0]))
        kept_weights = tl.where(keep, weights, 0.0)
    dv = accumulate(dot_operand(kept_weights, DTYPE), dout, dv, PRECISION)  # [N, D]
    dweights = multiply(v, tl.trans(dout), PRECISION)  # [N, M]
    if DROPOUT:
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    if WHOLE_ROWS:
        delta += tl.sum(weights * tl.where(visible, dweights, 0.0), 0)
    dscores = weights * (dweights - delta[None, :])
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
    operand_dscores = dot_operand(dscores, DTYPE)
    return accumulate(operand_dscores, q, dk, PRECISION), dv, operand_dscores, delta


@triton.jit
def walk_queries(
    dk,
    dv,
    k,
    v,
    first_key,
    first_row,
    q_pointer,
    dout_pointer,
    lse_pointer,
    delta_pointer,
    bias_pointer,
    seed,
    batch_head,
    query_length,
    key_length,
    q_row,
    dout_row,
    bias_row,
    scale,
    window,
    threshold,
    keep_scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Load one block of queries and add what it gives to dk and dv."""
    rows = first_row + tl.arange(0, BLOCK_M)
    q = load_rows(
        q_pointer, 0, 0, first_row, q_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [M, D]
    dout = load_rows(
        dout_pointer, 0, 0, first_row, dout_row, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, ALIGNMENT, MASKED, False
    )  # [M, D]
    lse = load_lse(lse_pointer, rows, query_length, MASKED, NATURAL)
    delta = load_statistic(delta_pointer, rows, query_length, 0.0, MASKED)
    dk, dv, _, _ = key_gradient_block(
        dk, dv, k, v, dot_operand(q, q.dtype), dot_operand(dout, dout.dtype), lse, delta, first_key, first_row,
        bias_pointer, seed, None, batch_head, query_length, key_length, bias_row, scale, window, threshold, keep_scale,
        MASKED, CAUSAL, WINDOW, False, BIAS, BIAS_ALIGNMENT, DROPOUT, False, q.dtype, PRECISION, NATURAL,
    )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_key_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    delta_pointer,  # (B, Hq, Lq), contiguous
    dk_pointer,  # (B, Lk, Hk, D), contiguous
    dv_pointer,  # (B, Lk, Hk, D), contiguous
    padding_pointer,  # (B, Lk), contiguous, or None
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
    section,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_ALIGNMENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BLOCK_N keys of one key head and walks over the queries that see them, of every query head of
    the group. A key that is padding or does not exist touches only its own row, which is not kept."""
    NATURAL: tl.constexpr = q_pointer.dtype.element_ty == tl.float32
    score_scale = scale * score_unit(NATURAL)
    key_heads = query_heads // GROUP
    block, batch_head = tile_of_program(tl.cdiv(key_length, BLOCK_N), section)
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    first_key = block * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k_pointer += batch * wide(k_batch, ALIGNMENT) + key_head * wide(k_head, ALIGNMENT)
    v_pointer += batch * wide(v_batch, ALIGNMENT) + key_head * wide(v_head, ALIGNMENT)
    q_row, dout_row = wide(q_row, ALIGNMENT), wide(dout_row, ALIGNMENT)
    seed = tl.load(seed_pointer) if DROPOUT else 0
    k = load_rows(
        k_pointer, 0, 0, first_key, wide(k_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [N, D]  # fmt: skip
    v = load_rows(
        v_pointer, 0, 0, first_key, wide(v_row, ALIGNMENT), key_length, HEAD_DIM, BLOCK_N, BLOCK_D, ALIGNMENT, True,
        False,
    )  # [N, D]  # fmt: skip
    k, v = dot_operand(k, k.dtype), dot_operand(v, v.dtype)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start, full_start, full_end, end = query_blocks(
        first_key, tl.minimum(first_key + BLOCK_N, key_length) - 1, key_length - query_length, query_length, window,
        BLOCK_M, CAUSAL, WINDOW,
    )  # fmt: skip
    if PADDING:
        padding_pointer += tl.cast(batch, tl.int64) * key_length
        real = tl.load(padding_pointer + keys, mask=keys < key_length, other=0) != 0
        if tl.max(real.to(tl.int32), 0) == 0:  # all padding: nothing to walk over
            full_start, full_end, end = start, start, start
    before = full_start - start
    masked_rows = before + tl.maximum(end - full_end, 0)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_head_pointer = q_pointer + batch * wide(q_batch, ALIGNMENT) + head * wide(q_head, ALIGNMENT)
        dout_head_pointer = dout_pointer + batch * wide(dout_batch, ALIGNMENT) + head * wide(dout_head, ALIGNMENT)
        query_batch_head = batch * query_heads + head
        row_offset = tl.cast(query_batch_head, tl.int64) * query_length
        bias_head_pointer = bias_pointer
        if BIAS != "none":
            bias_head_pointer += batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT)
        for row in range(full_start, full_end, BLOCK_M):
            dk, dv = walk_queries(
                dk, dv, k, v, first_key, row, q_head_pointer, dout_head_pointer, lse_pointer + row_offset,
                delta_pointer + row_offset, bias_head_pointer, seed, query_batch_head, query_length, key_length, q_row,
                dout_row, bias_row, score_scale, window, threshold, keep_scale, False, HEAD_DIM, BLOCK_D, BLOCK_M,
                CAUSAL, WINDOW, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, PRECISION, NATURAL,
            )  # fmt: skip
        for offset in tl.range(0, masked_rows, MASKED_M, num_stages=1):
            row = tl.where(offset < before, start + offset, full_end + offset - before)
            dk, dv = walk_queries(
                dk, dv, k, v, first_key, row, q_head_pointer, dout_head_pointer, lse_pointer + row_offset,
                delta_pointer + row_offset, bias_head_pointer, seed, query_batch_head, query_length, key_length, q_row,
                dout_row, bias_row, score_scale, window, threshold, keep_scale, True, HEAD_DIM, BLOCK_D, MASKED_M,
                CAUSAL, WINDOW, BIAS, BIAS_ALIGNMENT, DROPOUT, ALIGNMENT, PRECISION, NATURAL,
            )  # fmt: skip
    dk, dv = dk * scale, dv * keep_scale
    if PADDING:
        dk, dv = tl.where(real[:, None], dk, 0.0), tl.where(real[:, None], dv, 0.0)
    offset = (tl.cast(batch, tl.int64) * key_length * key_heads + key_head) * HEAD_DIM
    dk, dv = from_fp32(dk, dk_pointer.dtype.element_ty), from_fp32(dv, dv_pointer.dtype.element_ty)
    store_rows(dk_pointer + offset, dk, first_key, key_heads, key_length, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_pointer + offset, dv, first_key, key_heads, key_length, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "batches", "bias_batches", "bias_heads", "splits"])
def attention_backward_bias_kernel(
    q_pointer,  # (B, Hq, Lq, D)
    k_pointer,  # (B, Hk, Lk, D)
    v_pointer,  # (B, Hk, Lk, D)
    lse_pointer,  # (B, Hq, Lq), contiguous
    dout_pointer,  # (B, Hq, Lq, D)
    delta_pointer,  # (B, Hq, Lq), contiguous
    dbias_pointer,  # (splits, bias batches, bias heads, Lq or 1, Lk), contiguous
    padding_pointer,  # (B, Lk), contiguous, or None
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
    seed = tl.load(seed_pointer) if DROPOUT else 0
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for index in tl.range(first, end, num_stages=1):
        first_row = (own_row + index % shared_rows) * BLOCK_M
        index = index // shared_rows
        head, batch = own_head + index % shared_heads, own_batch + index // shared_heads
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
        weights, visible = transposed_weights(
            dot_operand(k, k.dtype), dot_operand(q, q.dtype),
            load_lse(lse_pointer + row_offset, rows, query_length, True, NATURAL), first_key, first_row,
            bias_pointer + batch * wide(bias_batch, BIAS_ALIGNMENT) + head * wide(bias_head, BIAS_ALIGNMENT),
            query_length, key_length, bias_row, score_scale, window, True, CAUSAL, WINDOW, BIAS, BIAS_ALIGNMENT,
            PRECISION, NATURAL,
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
        delta = tl.load(delta_pointer + row_offset + rows, mask=rows < query_length, other=0.0)
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
