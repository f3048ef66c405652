"""What every Triton attention kernel does with one tile of queries by keys: load it, see what is visible, weigh it.

Scores live in base 2: x = log2(e) * (scale * q.k + bias), so that softmax is exp2(x - max x) with one fused
multiply-add for each score. NATURAL (fp32 operands) leaves log2(e) to the last step, after the maximum or lse has been
taken off: a multiplication more and a rounding of large numbers less. Positions are bottom-right aligned: query i
stands at key position i + Lk - Lq ("shift").

Kernels take flat arguments, because numbers within a tuple would be specialised; the functions here take the tuples
that a kernel makes of them. (A tuple that a function returns holds no None and no compile-time value.)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LOG2_E, from_fp32, keep_by_column, tanh, to_fp32

SCORE_FLOOR = tl.constexpr(-3.4028234e38)
"""Biased scores stop here, so that a row biased by finfo.min everywhere stays finite in base 2 too."""


DROPOUT_LEVELS = tl.constexpr(1 << 16)
"""A weight is kept where its random number of as many bits reaches the threshold."""


SCANNED = tl.constexpr(1024)
"""Keys whose padding a program reads at a time."""


class Options(NamedTuple):
    """All that a kernel is compiled for, in one compile-time argument. What a pointer that is None says is not here."""

    GROUP: int  # query heads that share a key head
    HEAD_DIM: int
    BLOCK_D: int  # the head dimension as a power of two
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    MASKED: int  # keys, or queries, of a block in the loop that masks
    CAUSAL: bool
    WINDOW: bool
    BIAS: str  # what varies within a head: "full", "row" (one row for all queries), "column" or "scalar"; or "slope"
    BIAS_ALIGNMENT: int
    ALIGNMENT: int  # elements that every stride is a multiple of; 0 if offsets within a tile overflow 32 bits
    SOFTCAP: float  # what scores approach at most, 0 without a cap
    PAIRS: int  # of columns that are rotated by rotary positions; 0 if none are
    INTERLEAVED: bool  # a pair is two neighbours, else a column of either half of what is rotated
    OWN_ANGLES: bool  # each batch has rotary positions of its own
    NEGATE: bool  # the scale is negative
    NATURAL: bool
    PRECISION: str  # of products of fp32


class Rows(NamedTuple):
    """The rows of one head."""

    pointer: Any  # to the first one
    stride: Any
    length: Any


class Mask(NamedTuple):
    """What hides keys from queries, besides causality."""

    padding: Any  # pointer to (B, Lk), or None
    batch: Any
    sequences: Any  # pointer to (2, Lk), or None
    query_length: Any
    key_length: Any
    left: Any  # keys before a query's own position that it sees
    right: Any  # keys after it


class Bias(NamedTuple):
    """The additive bias of one head."""

    pointer: Any  # or None
    offset: Any  # to the head
    stride: Any  # from query to query


class Dropout(NamedTuple):
    """The dropout of one head."""

    seed: Any  # or None
    head: Any  # its number within the whole batch
    threshold: Any


class Span(NamedTuple):
    """Positions that a tile walks over: [full_start, full_end) without a mask, the rest of [start, end) with one."""

    start: Any
    full_start: Any
    full_end: Any
    end: Any


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
def query_tile_of_program(query_heads, query_length, section, OPTIONS: tl.constexpr):
    """This program's (batch, head, first row); of a causal pass the longest tiles first, so that short ones fill the
    end."""
    blocks = tl.cdiv(query_length, OPTIONS.BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if OPTIONS.CAUSAL:
        block = blocks - 1 - block
    return batch_head // query_heads, batch_head % query_heads, block * OPTIONS.BLOCK_M


@triton.jit
def wide(stride, ALIGNMENT: tl.constexpr):
    """`stride` as int64, of which the compiler is told that it is a multiple of ALIGNMENT elements."""
    stride = tl.cast(stride, tl.int64)
    if ALIGNMENT > 1:
        stride = tl.multiple_of(stride, ALIGNMENT)
    return stride


@triton.jit
def head_offset(batch, head, batch_stride, head_stride, ALIGNMENT: tl.constexpr):
    """Where a head begins, in elements."""
    return batch * wide(batch_stride, ALIGNMENT) + head * wide(head_stride, ALIGNMENT)


@triton.jit
def head_rows(pointer, batch, head, batch_stride, head_stride, row_stride, length, OPTIONS: tl.constexpr):
    """The rows of one head of a tensor (B, H, L, D)."""
    pointer += head_offset(batch, head, batch_stride, head_stride, OPTIONS.ALIGNMENT)
    return Rows(pointer, wide(row_stride, OPTIONS.ALIGNMENT), length)


@triton.jit
def output_rows(pointer, batch, head, heads, length, OPTIONS: tl.constexpr):
    """The rows of one head of an output, contiguous as (B, L, H, D)."""
    row_stride = heads * OPTIONS.HEAD_DIM
    return head_rows(
        pointer, batch, head, length * tl.cast(row_stride, tl.int64), OPTIONS.HEAD_DIM, row_stride, length, OPTIONS
    )


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
def load_rows(source, start, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """Rows [start, start + ROWS) of one head, zeros beyond its length and HEAD_DIM. Without BOUNDED all rows exist."""
    return load_columns(source, start, tl.arange(0, OPTIONS.BLOCK_D)[None, :], ROWS, BOUNDED, OPTIONS)


@triton.jit
def load_columns(source, start, columns, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """`columns` [1, C] of such rows."""
    rows = tl.arange(0, ROWS)[:, None]
    pointers = source.pointer + tl.cast(start, tl.int64) * source.stride
    pointers += row_offsets(rows, source.stride, OPTIONS.ALIGNMENT) + columns
    if BOUNDED:
        tile = tl.load(pointers, mask=(start + rows < source.length) & (columns < OPTIONS.HEAD_DIM), other=0.0)
    elif OPTIONS.HEAD_DIM < OPTIONS.BLOCK_D:
        tile = tl.load(pointers, mask=columns < OPTIONS.HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(target, tile, start, OPTIONS: tl.constexpr):
    """Write `tile`, in fp32 [ROWS, BLOCK_D], to rows from `start` on of one head."""
    store_columns(target, tile, start, tl.arange(0, OPTIONS.BLOCK_D)[None, :], OPTIONS)


@triton.jit
def store_columns(target, tile, start, columns, OPTIONS: tl.constexpr):
    """Write `tile`, in fp32 [ROWS, C], to `columns` [1, C] of those rows."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    pointers = target.pointer + tl.cast(start, tl.int64) * target.stride
    pointers += row_offsets(rows, target.stride, OPTIONS.ALIGNMENT) + columns
    tile = from_fp32(tile, target.pointer.dtype.element_ty)
    tl.store(pointers, tile, mask=(start + rows < target.length) & (columns < OPTIONS.HEAD_DIM))


@triton.jit
def visible_pairs(rows, columns, mask, OPTIONS: tl.constexpr):
    """Which queries see which keys by position; `rows` and `columns` broadcast, so either may be the first axis."""
    positions = rows + (mask.key_length - mask.query_length)
    if OPTIONS.CAUSAL:
        visible = columns < tl.minimum(positions + 1, mask.key_length)
    elif OPTIONS.WINDOW:
        visible = columns < tl.minimum(positions + mask.right + 1, mask.key_length)
    else:
        visible = (columns < mask.key_length) & (rows >= 0)
    if OPTIONS.WINDOW:
        visible = visible & (columns >= positions - mask.left)
    return visible


@triton.jit
def load_padding(mask, keys):
    """Which of `keys` are real ones."""
    padding = mask.padding + tl.cast(mask.batch, tl.int64) * mask.key_length
    return tl.load(padding + keys, mask=keys < mask.key_length, other=0) != 0


@triton.jit
def without_padding(tile, real):
    """`tile`, rows of keys, with zeros for padding: a weight of 0 does not hide NaN."""
    return tl.where(tl.reshape(real, (tile.shape[0], 1)), tile, tl.zeros_like(tile))


@triton.jit
def within_sequence(mask, tokens, others):
    """Whether `others` belong to the sequences of `tokens`; none does to that of a token that does not exist."""
    exists = tokens < mask.key_length
    starts = tl.load(mask.sequences + tokens, mask=exists, other=0)
    ends = tl.load(mask.sequences + mask.key_length + tokens, mask=exists, other=0)
    return (others >= starts) & (others < ends)


@triton.jit
def sequence_range(mask, first, last):
    """For tokens first..last: [some_start, some_end), the sequences of any of them, and [all_start, all_end), the
    sequence of all of them."""
    some_start = tl.load(mask.sequences + first)
    some_end = tl.load(mask.sequences + mask.key_length + last)
    all_start = tl.load(mask.sequences + last)
    all_end = tl.load(mask.sequences + mask.key_length + first)
    return some_start, some_end, all_start, all_end


@triton.jit
def visible_keys(first_row, last_row, mask, OPTIONS: tl.constexpr):
    """For queries first_row..last_row: keys [some_start, some_end) that any of them sees, [all_start, all_end) that all
    of them see."""
    first, last = mask.key_length - mask.query_length + first_row, mask.key_length - mask.query_length + last_row
    some_start = 0
    all_start = 0
    some_end = mask.key_length
    all_end = mask.key_length
    if OPTIONS.WINDOW:
        some_start = tl.maximum(0, first - mask.left)
        all_start = tl.maximum(0, last - mask.left)
    if OPTIONS.CAUSAL:
        some_end = tl.minimum(mask.key_length, last + 1)
        all_end = tl.minimum(mask.key_length, first + 1)
    elif OPTIONS.WINDOW:
        some_end = tl.minimum(mask.key_length, last + mask.right + 1)
        all_end = tl.minimum(mask.key_length, first + mask.right + 1)
    return some_start, some_end, all_start, all_end


@triton.jit
def real_keys(mask, start, end, CHUNK: tl.constexpr):
    """Of the keys [start, end): the first real one, one past the last one, and whether there is no padding between.
    More than SCANNED are read CHUNK at a time; fewer do not pay for the instructions."""
    if CHUNK == SCANNED:  # noqa: SIM114 -- decided when compiled; the other where it runs
        first_real, end_real, count = scan_keys(mask, start, end, CHUNK)
    elif end - start > SCANNED:
        first_real, end_real, count = scan_keys(mask, start, end, CHUNK)
    else:
        first_real, end_real, count = scan_keys(mask, start, end, SCANNED)
    return first_real, end_real, count == end_real - first_real


@triton.jit
def scan_keys(mask, start, end, CHUNK: tl.constexpr):
    """Of the keys [start, end): the first real one, one past the last one, and how many there are, read CHUNK at a
    time."""
    columns = tl.arange(0, CHUNK)
    first = tl.zeros([CHUNK], tl.int32) + end
    last = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for chunk in range(start, end, CHUNK):
        keys = chunk + columns
        real = load_padding(mask, keys) & (keys < end)
        first = tl.where(real, tl.minimum(first, keys), first)
        last = tl.where(real, keys + 1, last)
        count += real.to(tl.int32)
    return tl.min(first, 0), tl.max(last, 0), tl.sum(count, 0)


@triton.jit
def any_real(mask, start, BLOCK: tl.constexpr):
    """Whether any of the keys [start, start + BLOCK) is a real one."""
    return tl.max(load_padding(mask, start + tl.arange(0, BLOCK)).to(tl.int32), 0) > 0


@triton.jit
def key_blocks(first_row, mask, OPTIONS: tl.constexpr):
    """The keys of a query tile: whole blocks of BLOCK_N without a mask, of MASKED with one; what lies outside is never
    visited."""
    last_row = tl.minimum(first_row + OPTIONS.BLOCK_M, mask.query_length) - 1
    start, end, full_start, full_end = visible_keys(first_row, last_row, mask, OPTIONS)
    if mask.sequences is not None:
        some_start, some_end, all_start, all_end = sequence_range(mask, first_row, last_row)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    if mask.padding is not None:
        narrow: tl.constexpr = OPTIONS.BLOCK_D <= 64 and not OPTIONS.NATURAL  # else no registers are left for it
        LONG: tl.constexpr = 4 * SCANNED if narrow else SCANNED
        first_real, end_real, contiguous = real_keys(mask, start, end, LONG)
        start = tl.maximum(start, first_real)
        end = tl.minimum(end, end_real)
        full_start = tl.maximum(full_start, first_real)
        full_end = tl.where(contiguous, tl.minimum(full_end, end_real), 0)
    return whole_blocks(start, full_start, full_end, end, OPTIONS.BLOCK_N, OPTIONS.MASKED)


@triton.jit
def query_blocks(first_key, mask, OPTIONS: tl.constexpr):
    """The queries of a key tile, as `key_blocks` has the keys of a query tile."""
    last_key = tl.minimum(first_key + OPTIONS.BLOCK_N, mask.key_length) - 1
    shift = mask.key_length - mask.query_length
    start = 0
    full_start = 0
    end = mask.query_length
    full_end = mask.query_length
    if OPTIONS.CAUSAL:
        start = tl.maximum(0, first_key - shift)
        full_start = tl.maximum(0, last_key - shift)
    elif OPTIONS.WINDOW:
        start = tl.maximum(0, first_key - shift - mask.right)
        full_start = tl.maximum(0, last_key - shift - mask.right)
    if OPTIONS.WINDOW:
        end = tl.minimum(mask.query_length, last_key - shift + mask.left + 1)
        full_end = tl.minimum(mask.query_length, first_key - shift + mask.left + 1)
    if mask.sequences is not None:
        some_start, some_end, all_start, all_end = sequence_range(mask, first_key, last_key)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    return whole_blocks(start, full_start, full_end, end, OPTIONS.BLOCK_M, OPTIONS.MASKED)


@triton.jit
def whole_blocks(start, full_start, full_end, end, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The same ranges in whole blocks: [start, end), unless it is empty, grows to the left, by blocks of MASKED, and
    [full_start, full_end) shrinks into it."""
    end = tl.where(end > start, end, 0)
    start = start // MASKED * MASKED
    end = tl.maximum(end, start)
    full_start = tl.minimum((full_start + BLOCK - 1) // BLOCK * BLOCK, end)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK * BLOCK, full_start)
    return Span(start, full_start, full_end, end)


@triton.jit
def masked_length(span):
    """How many positions the loop that masks walks over, before the full blocks and behind them."""
    return span.full_start - span.start + tl.maximum(span.end - span.full_end, 0)


@triton.jit
def masked_position(span, offset):
    """The position of that loop's block at `offset`."""
    before = span.full_start - span.start
    return tl.where(offset < before, span.start + offset, span.full_end + offset - before)


@triton.jit
def score_unit(NATURAL: tl.constexpr):
    """What one unit of a natural score counts in the kernel."""
    return 1.0 if NATURAL else LOG2_E


@triton.jit
def exponential(scores, NATURAL: tl.constexpr):
    """exp of scores in their unit."""
    return tl.exp2(scores * LOG2_E) if NATURAL else tl.exp2(scores)


@triton.jit
def capped(scores, OPTIONS: tl.constexpr):
    """softcap * tanh(scores / softcap) of scores to which nothing is added yet; the scores themselves without a cap."""
    if OPTIONS.SOFTCAP > 0.0:
        limit = OPTIONS.SOFTCAP * score_unit(OPTIONS.NATURAL)
        scores = limit * tanh(scores / limit, OPTIONS.NATURAL)
    return scores


@triton.jit
def cap_slope(scores, OPTIONS: tl.constexpr):
    """The derivative of `capped`, from the scores that it returned: 1 - tanh^2."""
    ratio = scores / (OPTIONS.SOFTCAP * score_unit(OPTIONS.NATURAL))
    return 1.0 - ratio * ratio


@triton.jit
def load_bias(bias, first_row, start, rows, columns, mask, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The additive bias of the tile at (first_row, start), of which `rows` and `columns` count the queries
    and keys along either axis. Without BOUNDED all keys of the tile exist."""
    BIAS: tl.constexpr = OPTIONS.BIAS
    ALIGNMENT: tl.constexpr = OPTIONS.BIAS_ALIGNMENT
    pointer = bias.pointer + bias.offset
    if BIAS == "full" or BIAS == "column":
        pointer += tl.cast(first_row, tl.int64) * wide(bias.stride, ALIGNMENT)
    if BIAS == "full":
        inside = rows < mask.query_length - first_row
        if BOUNDED:
            inside = inside & (columns < mask.key_length - start)
        offsets = row_offsets(rows, bias.stride, ALIGNMENT) + columns
        values = tl.load(pointer + wide(start, ALIGNMENT) + offsets, mask=inside, other=0.0)
    elif BIAS == "row":
        inside = columns < mask.key_length - start
        values = tl.load(pointer + wide(start, ALIGNMENT) + columns, mask=inside, other=0.0)
    elif BIAS == "column":
        inside = rows < mask.query_length - first_row
        values = tl.load(pointer + row_offsets(rows, bias.stride, ALIGNMENT), mask=inside, other=0.0)
    elif BIAS == "slope":
        distance = first_row + rows + (mask.key_length - mask.query_length) - start - columns
        values = -tl.load(pointer) * tl.abs(distance).to(tl.float32)
    else:
        values = tl.load(pointer)
    return to_fp32(values)


@triton.jit
def biased(scores, bias, NATURAL: tl.constexpr):
    """Scores plus a natural bias, no lower than SCORE_FLOOR unless the bias is -inf, which hides the key."""
    total = tl.maximum(scores + bias * score_unit(NATURAL), SCORE_FLOOR)
    return tl.where(bias == float("-inf"), float("-inf"), total)


@triton.jit
def load_statistic(pointer, rows, query_length, other, BOUNDED: tl.constexpr):
    """One number for each of `rows`, `other` beyond the last query; without BOUNDED all rows exist."""
    return tl.load(pointer + rows, mask=rows < query_length, other=other) if BOUNDED else tl.load(pointer + rows)


@triton.jit
def load_base(statistics, rows, query_length, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The largest score and the log of the sum of `rows`, in the unit of scores: what `weights_of` takes off. Their sum
    and 0 for 16 bits without a bias, whose large scores are rounded by more. +inf, which makes every weight 0, where
    there is no row or no key."""
    base = load_statistic(statistics, rows, query_length, float("-inf"), BOUNDED)
    log_sum = load_statistic(statistics + query_length, rows, query_length, 0.0, BOUNDED)
    base = tl.where(base == float("-inf"), float("inf"), base)
    if not (OPTIONS.NATURAL or OPTIONS.BIAS != ""):
        base += log_sum
        log_sum = tl.zeros_like(log_sum)
    return base, log_sum


@triton.jit
def weights_of(scores, base, log_sum, OPTIONS: tl.constexpr):
    """exp(score - largest - log of the sum), one after the other: the sum of the last two loses the log where scores
    are large."""
    differences = scores - base
    if OPTIONS.NATURAL or OPTIONS.BIAS != "":
        differences -= log_sum
    return exponential(differences, OPTIONS.NATURAL)


@triton.jit
def keep_tile(dropout, start, rows, BLOCK_N: tl.constexpr):
    """Which probabilities of `rows` [M, 1] by keys [start, start + BLOCK_N) dropout keeps: int1 [M, BLOCK_N]."""
    groups = start // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    return keep_by_column(dropout.seed, groups, rows, dropout.head, dropout.threshold)


@triton.jit
def dropout_scale(dropout):
    """What the kept weights are multiplied by: 1 / (1 - p), 0 where all are dropped."""
    kept = DROPOUT_LEVELS - dropout.threshold
    scale = 1.0
    if dropout.seed is not None:
        scale = tl.where(kept == 0, 0.0, DROPOUT_LEVELS / tl.maximum(kept, 1).to(tl.float32))
    return scale


@triton.jit
def finite_rows(tile):
    """`tile` with zeros for inf and NaN, and for each row 0, or NaN where it held one."""
    values = to_fp32(tile)
    trace = values * 0.0
    return tl.where(trace == 0.0, tile, tl.zeros_like(tile)), tl.sum(trace, 1)


@triton.jit
def multiply(a, b, OPTIONS: tl.constexpr):
    """a @ b in fp32."""
    return tl.dot(a, b, input_precision=OPTIONS.PRECISION)


@triton.jit
def accumulate(a, b, total, OPTIONS: tl.constexpr):
    """total + a @ b."""
    return tl.dot(a, b, total, input_precision=OPTIONS.PRECISION)
