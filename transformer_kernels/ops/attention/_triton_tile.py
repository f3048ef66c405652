"""What every Triton attention kernel does with one tile of queries by keys: load it, see what is visible, weigh it.

Scores live in base 2: x = log2(e) * (scale * q.k + bias), so that softmax is exp2(x - max x) with one fused
multiply-add for each score. NATURAL (fp32 operands) leaves log2(e) to the last step, after the maximum or lse has been
taken off: a multiplication more and a rounding of large numbers less. Positions are bottom-right aligned: query i
stands at key position i + Lk - Lq ("shift").
"""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LOG2_E, keep_by_column, to_fp32
from transformer_kernels.ops.attention._triton_sequences import sequence_range

SCORE_FLOOR = tl.constexpr(-90000.0)
"""Biased scores stop here. A row biased by finfo.min everywhere stays finite, and its log-sum-exp still holds the log
of the number of keys, which the backward pass needs; -65504, the least fp16, is above it."""


@triton.jit
def tile_of_program(blocks, section):
    """This program's (block, head): heads in sections whose keys fit the L2 cache, blocks in order within a section."""
    program = tl.program_id(0)
    heads = tl.num_programs(0) // blocks
    first_head = program // (blocks * section) * section
    width = tl.minimum(section, heads - first_head)
    rank = program - first_head * blocks
    return rank // width, first_head + rank % width


@triton.jit
def wide(stride, ALIGNMENT: tl.constexpr):
    """`stride` as int64, of which the compiler is told that it is a multiple of ALIGNMENT elements."""
    stride = tl.cast(stride, tl.int64)
    if ALIGNMENT > 1:
        stride = tl.multiple_of(stride, ALIGNMENT)
    return stride


@triton.jit
def row_offsets(rows, stride, ALIGNMENT: tl.constexpr):
    """Offsets of the rows of a tile from its first row, in 32 bits, which saves registers; ALIGNMENT 0 stands for a
    stride so large that a tile needs 64."""
    if ALIGNMENT == 0:
        offsets = tl.cast(rows, tl.int64) * stride
    elif ALIGNMENT == 1:
        offsets = rows * tl.cast(stride, tl.int32)
    else:
        offsets = tl.multiple_of(rows * tl.cast(stride, tl.int32), (ALIGNMENT, ALIGNMENT))
    return offsets


@triton.jit
def score_unit(NATURAL: tl.constexpr):
    """What one unit of a natural score counts in the kernel."""
    return 1.0 if NATURAL else LOG2_E


@triton.jit
def exponential(scores, NATURAL: tl.constexpr):
    """exp of scores in their unit."""
    return tl.exp2(scores * LOG2_E) if NATURAL else tl.exp2(scores)


@triton.jit
def load_rows(
    source,
    batch,
    head,
    start,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BOUNDED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Rows [start, start + ROWS) of one head, zeros beyond `length` and HEAD_DIM: from a 4-D tensor descriptor, or from
    a pointer to the head's first row. Without BOUNDED all rows are known to exist."""
    if DESCRIPTOR:
        tile = tl.reshape(source.load([batch, head, start, 0]), (ROWS, BLOCK_D))
    else:
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, BLOCK_D)[None, :]
        pointers = source + tl.cast(start, tl.int64) * stride + (row_offsets(rows, stride, ALIGNMENT) + columns)
        if BOUNDED:
            tile = tl.load(pointers, mask=(start + rows < length) & (columns < HEAD_DIM), other=0.0)
        elif HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=columns < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    pointer,
    tile,
    start,
    stride,
    length,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write `tile` [ROWS, BLOCK_D] to rows [start, start + ROWS) of one head, whose first row is at `pointer`."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + tl.cast(start, tl.int64) * stride + (row_offsets(rows, stride, ALIGNMENT) + columns)
    tl.store(pointers, tile, mask=(start + rows < length) & (columns < HEAD_DIM))


@triton.jit
def visible_pairs(rows, columns, shift, key_length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which queries see which keys by position; `rows` and `columns` broadcast, so either may be the first axis."""
    visible = (columns < key_length) & (rows >= 0)
    if CAUSAL:
        visible = visible & (columns <= rows + shift)
    if WINDOW:
        visible = visible & (rows + shift - columns < window)
        if not CAUSAL:
            visible = visible & (columns - rows - shift < window)
    return visible


@triton.jit
def visible_keys(first_row, last_row, shift, key_length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """For queries first_row..last_row: keys [some_start, some_end) that any of them sees, [all_start, all_end) that all
    of them see."""
    some_start = 0
    all_start = 0
    some_end = key_length
    all_end = key_length
    if WINDOW:
        some_start = tl.maximum(0, first_row + shift - window + 1)
        all_start = tl.maximum(0, last_row + shift - window + 1)
    if CAUSAL:
        some_end = tl.minimum(key_length, last_row + shift + 1)
        all_end = tl.minimum(key_length, first_row + shift + 1)
    elif WINDOW:
        some_end = tl.minimum(key_length, last_row + shift + window)
        all_end = tl.minimum(key_length, first_row + shift + window)
    return some_start, some_end, all_start, all_end


@triton.jit
def real_keys(padding_pointer, start, end):
    """Of the keys [start, end): the first real one, one past the last one, and whether there is no padding between."""
    CHUNK: tl.constexpr = 1024
    columns = tl.arange(0, CHUNK)
    first = tl.zeros([CHUNK], tl.int32) + end
    last = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for chunk in range(start, end, CHUNK):
        keys = chunk + columns
        real = tl.load(padding_pointer + keys, mask=keys < end, other=0) != 0
        first = tl.where(real, tl.minimum(first, keys), first)
        last = tl.where(real, keys + 1, last)
        count += real.to(tl.int32)
    first_real = tl.min(first, 0)
    end_real = tl.max(last, 0)
    return first_real, end_real, tl.sum(count, 0) == end_real - first_real


@triton.jit
def any_real(padding_pointer, start, key_length, BLOCK_N: tl.constexpr):
    """Whether any of the keys [start, start + BLOCK_N) is a real one."""
    keys = start + tl.arange(0, BLOCK_N)
    real = tl.load(padding_pointer + keys, mask=keys < key_length, other=0) != 0
    return tl.max(real.to(tl.int32), 0) > 0


@triton.jit
def key_blocks(
    padding_pointer,
    sequences_pointer,
    first_row,
    last_row,
    shift,
    key_length,
    window,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Key positions (start, full_start, full_end, end) of a query tile: whole blocks of
    BLOCK_N in [full_start, full_end) need no mask, those of MASKED_N in the rest of [start, end) do, and what lies
    outside is never visited."""
    start, end, full_start, full_end = visible_keys(first_row, last_row, shift, key_length, window, CAUSAL, WINDOW)
    if SEQUENCES:
        some_start, some_end, all_start, all_end = sequence_range(sequences_pointer, first_row, last_row, key_length)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    if PADDING:
        first_real, end_real, contiguous = real_keys(padding_pointer, start, end)
        start = tl.maximum(start, first_real)
        end = tl.minimum(end, end_real)
        full_start = tl.maximum(full_start, first_real)
        full_end = tl.where(contiguous, tl.minimum(full_end, end_real), 0)
    return whole_blocks(start, full_start, full_end, end, BLOCK_N, MASKED_N)


@triton.jit
def whole_blocks(start, full_start, full_end, end, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The same ranges in whole blocks: [start, end), unless it is empty, grows to the left, by blocks of MASKED, and
    [full_start, full_end) shrinks into it."""
    end = tl.where(end > start, end, 0)
    start = start // MASKED * MASKED
    end = tl.maximum(end, start)
    full_start = tl.minimum((full_start + BLOCK - 1) // BLOCK * BLOCK, end)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK * BLOCK, full_start)
    return start, full_start, full_end, end


@triton.jit
def query_blocks(
    first_key,
    last_key,
    shift,
    query_length,
    window,
    sequences_pointer,
    BLOCK_M: tl.constexpr,
    MASKED_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Query positions (start, full_start, full_end, end) of a key tile, as `key_blocks` has them of a query tile."""
    start = 0
    full_start = 0
    end = query_length
    full_end = query_length
    if CAUSAL:
        start = tl.maximum(0, first_key - shift)
        full_start = tl.maximum(0, last_key - shift)
    elif WINDOW:
        start = tl.maximum(0, first_key - shift - window + 1)
        full_start = tl.maximum(0, last_key - shift - window + 1)
    if WINDOW:
        end = tl.minimum(query_length, last_key - shift + window)
        full_end = tl.minimum(query_length, first_key - shift + window)
    if SEQUENCES:
        some_start, some_end, all_start, all_end = sequence_range(sequences_pointer, first_key, last_key, query_length)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    return whole_blocks(start, full_start, full_end, end, BLOCK_M, MASKED_M)


@triton.jit
def load_bias(
    pointer,
    first_row,
    start,
    rows,
    columns,
    stride,
    query_length,
    key_length,
    BOUNDED: tl.constexpr,
    BIAS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The additive bias of the tile at (first_row, start), of which `rows` and `columns` count the queries
    and keys along either axis. BIAS names what varies within a head: "full", "row" (one row for all queries), "column"
    (one value for each query) or "scalar". Without BOUNDED all keys of the tile exist."""
    if BIAS == "full" or BIAS == "column":
        pointer += tl.cast(first_row, tl.int64) * wide(stride, ALIGNMENT)
    if BIAS == "full":
        inside = rows < query_length - first_row
        if BOUNDED:
            inside = inside & (columns < key_length - start)
        offsets = row_offsets(rows, stride, ALIGNMENT) + columns
        bias = tl.load(pointer + wide(start, ALIGNMENT) + offsets, mask=inside, other=0.0)
    elif BIAS == "row":
        bias = tl.load(pointer + wide(start, ALIGNMENT) + columns, mask=columns < key_length - start, other=0.0)
    elif BIAS == "column":
        offsets = row_offsets(rows, stride, ALIGNMENT)
        bias = tl.load(pointer + offsets, mask=rows < query_length - first_row, other=0.0)
    else:
        bias = tl.load(pointer)
    return to_fp32(bias) * score_unit(NATURAL)


@triton.jit
def biased(scores, bias, NATURAL: tl.constexpr):
    """Scores plus bias, no lower than SCORE_FLOOR unless the bias is -inf, which hides the key."""
    floor = SCORE_FLOOR * score_unit(NATURAL)
    return tl.where(bias == float("-inf"), float("-inf"), tl.maximum(scores + bias, floor))


@triton.jit
def load_statistic(pointer, rows, query_length, other, BOUNDED: tl.constexpr):
    """One number for each of `rows`, `other` beyond the last query; without BOUNDED all rows exist."""
    return tl.load(pointer + rows, mask=rows < query_length, other=other) if BOUNDED else tl.load(pointer + rows)


@triton.jit
def load_lse(pointer, rows, query_length, BOUNDED: tl.constexpr, NATURAL: tl.constexpr):
    """The log-sum-exp of `rows` in the unit of the scores; +inf, which makes every weight 0, where there is no row or
    no key."""
    lse = load_statistic(pointer, rows, query_length, float("-inf"), BOUNDED)
    return tl.where(lse == float("-inf"), float("inf"), lse * score_unit(NATURAL))


@triton.jit
def keep_tile(seed, start, rows, head, threshold, BLOCK_N: tl.constexpr):
    """Which probabilities of `rows` [M, 1] by keys [start, start + BLOCK_N) dropout keeps: int1 [M, BLOCK_N]."""
    groups = start // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    return keep_by_column(seed, groups, rows, head, threshold)


@triton.jit
def finite_rows(tile):
    """`tile` with zeros for inf and NaN, and for each row 0, or NaN where it held one."""
    values = to_fp32(tile)
    trace = values * 0.0
    return tl.where(trace == 0.0, tile, tl.zeros_like(tile)), tl.sum(trace, 1)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def accumulate(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b; `a` is rounded to the dtype of `b`, as the matrix units take them."""
    return tl.dot(a, b, total, input_precision=PRECISION)
