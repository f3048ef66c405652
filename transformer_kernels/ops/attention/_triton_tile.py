"""Device functions of all Triton attention kernels on one tile of queries by keys: loads, visibility, weights.

Scores are in base 2: x = log2(e) * (scale * q.k + bias), so softmax is exp2(x - max x) with one fused multiply-add per
score. NATURAL (fp32 operands) multiplies by log2(e) after the maximum or lse is subtracted: one more multiplication,
one rounding of large numbers fewer. Positions are bottom-right aligned: query i is at key position i + Lk - Lq
("shift").

Kernels take pointers as records and numbers as flat arguments: Triton specialises a pointer in a record like any other,
but ignores `do_not_specialize` for integers in a record. A returned tuple must not contain None or compile-time values.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import LOG2_E, from_fp32, keep_by_column, tanh, to_fp32

SCORE_FLOOR = tl.constexpr(-3.4028234e38)
"""Lower bound of biased scores: a row biased by finfo.min everywhere remains finite in base 2."""


DROPOUT_LEVELS = tl.constexpr(1 << 16)
"""A weight is kept where its 16-bit random number is at least the threshold."""


SCANNED = tl.constexpr(1024)
"""Keys of a padding mask that a program reads per step."""


class Options(NamedTuple):
    """Compile-time options of a kernel. Options that are implied by a pointer that is None are not repeated here."""

    GROUP: int  # query heads that share a key head
    HEAD_DIM: int
    BLOCK_D: int  # the head dimension padded to a power of two
    BLOCK_M: int  # queries per tile
    BLOCK_N: int  # keys per tile
    MASKED: int  # step of the masked loop, in keys or queries
    CAUSAL: bool
    WINDOW: bool
    BIAS: str  # shape within a head: "full", "row" (one row for all queries), "column", "scalar"; or "slope" (ALiBi)
    BIAS_ALIGNMENT: int
    ALIGNMENT: int  # a divisor of all strides, in elements; 0 if offsets within a tile overflow 32 bits
    SOFTCAP: float  # 0: none
    PAIRS: int  # number of rotated pairs of columns; 0: no rotation
    INTERLEAVED: bool  # pairs are (2 i, 2 i + 1), else (i, i + PAIRS)
    OWN_ANGLES: bool  # angles differ between sequences of the batch
    NEGATE: bool  # the scale is negative
    NATURAL: bool
    PRECISION: str  # of fp32 products


class Inputs(NamedTuple):
    """Pointers to queries, keys and values."""

    q: Any  # (B, Hq, Lq, D)
    k: Any  # (B, Hk, Lk, D)
    v: Any  # (B, Hk, Lk, D)


class Extras(NamedTuple):
    """Pointers to optional inputs, None if absent."""

    padding: Any  # (B, Lk), contiguous
    sequences: Any  # (2, Lk), contiguous
    bias: Any  # (B, Hq, Lq, Lk), broadcast
    seed: Any  # (1,)
    cos: Any  # (1 or B, L, pairs), fp32, contiguous
    sin: Any  # the same


class Rows(NamedTuple):
    """The rows of one head."""

    pointer: Any  # to the first one
    stride: Any
    length: Any


class Mask(NamedTuple):
    """Padding, packed sequences, lengths and window of one sequence of the batch."""

    padding: Any  # pointer to (B, Lk), or None
    batch: Any
    sequences: Any  # pointer to (2, Lk), or None
    query_length: Any
    key_length: Any
    left: Any  # visible keys before the query's position
    right: Any  # visible keys after it


class Bias(NamedTuple):
    """The additive bias of one head."""

    pointer: Any  # or None
    offset: Any  # to the head
    stride: Any  # between queries


class Dropout(NamedTuple):
    """The dropout of one head."""

    seed: Any  # or None
    head: Any  # index in (B, Hq)
    threshold: Any


class Span(NamedTuple):
    """Positions that a tile visits: [full_start, full_end) without a mask, the remainder of [start, end) masked."""

    start: Any
    full_start: Any
    full_end: Any
    end: Any


@triton.jit
def tile_of_program(blocks, section):
    """(block, head) of this program: heads in sections whose keys fit the L2 cache, blocks in order in a section."""
    program = tl.program_id(0)
    heads = tl.num_programs(0) // blocks
    first_head = program // (blocks * section) * section
    width = tl.minimum(section, heads - first_head)
    rank = program - first_head * blocks
    return rank // width, first_head + rank % width


@triton.jit
def query_tile_of_program(query_heads, query_length, section, OPTIONS: tl.constexpr):
    """(batch, head, first row) of this program; causal tiles run longest first, so that short tiles fill the tail."""
    blocks = tl.cdiv(query_length, OPTIONS.BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if OPTIONS.CAUSAL:
        block = blocks - 1 - block
    return batch_head // query_heads, batch_head % query_heads, block * OPTIONS.BLOCK_M


@triton.jit
def wide(stride, ALIGNMENT: tl.constexpr):
    """`stride` as int64, annotated as a multiple of ALIGNMENT."""
    stride = tl.cast(stride, tl.int64)
    if ALIGNMENT > 1:
        stride = tl.multiple_of(stride, ALIGNMENT)
    return stride


@triton.jit
def head_offset(batch, head, batch_stride, head_stride, ALIGNMENT: tl.constexpr):
    """Offset of a head, in elements."""
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
    """Offsets of a tile's rows from its first row, in 32 bits to save registers, in 64 if ALIGNMENT is 0."""
    if ALIGNMENT == 0:
        offsets = tl.cast(rows, tl.int64) * stride
    elif ALIGNMENT == 1:
        offsets = rows * tl.cast(stride, tl.int32)
    else:
        offsets = tl.multiple_of(rows * tl.cast(stride, tl.int32), (ALIGNMENT, ALIGNMENT))
    return offsets


@triton.jit
def load_rows(source, start, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """Rows [start, start + ROWS) of one head, zeros beyond length and HEAD_DIM. Not BOUNDED: all rows are in range."""
    return load_columns(source, start, tl.arange(0, OPTIONS.BLOCK_D)[None, :], ROWS, BOUNDED, OPTIONS)


@triton.jit
def load_columns(source, start, columns, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """`load_rows` restricted to `columns` [1, C]."""
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
    """Store `tile`, fp32 [ROWS, BLOCK_D], to rows of one head starting at `start`."""
    store_columns(target, tile, start, tl.arange(0, OPTIONS.BLOCK_D)[None, :], OPTIONS)


@triton.jit
def store_columns(target, tile, start, columns, OPTIONS: tl.constexpr):
    """`store_rows` restricted to `columns` [1, C]; `tile` is fp32 [ROWS, C]."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    pointers = target.pointer + tl.cast(start, tl.int64) * target.stride
    pointers += row_offsets(rows, target.stride, OPTIONS.ALIGNMENT) + columns
    tile = from_fp32(tile, target.pointer.dtype.element_ty)
    tl.store(pointers, tile, mask=(start + rows < target.length) & (columns < OPTIONS.HEAD_DIM))


@triton.jit
def visible_pairs(rows, columns, mask, OPTIONS: tl.constexpr):
    """Visibility by position; `rows` (queries) and `columns` (keys) broadcast in either order."""
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
    """Whether each of `keys` is a real token, not padding."""
    padding = mask.padding + tl.cast(mask.batch, tl.int64) * mask.key_length
    return tl.load(padding + keys, mask=keys < mask.key_length, other=0) != 0


@triton.jit
def without_padding(tile, real):
    """`tile`, rows of keys, with padding set to zero: 0 * NaN is NaN."""
    return tl.where(tl.reshape(real, (tile.shape[0], 1)), tile, tl.zeros_like(tile))


@triton.jit
def within_sequence(mask, tokens, others):
    """Whether `others` belong to the sequences of `tokens`; False for tokens out of range."""
    exists = tokens < mask.key_length
    starts = tl.load(mask.sequences + tokens, mask=exists, other=0)
    ends = tl.load(mask.sequences + mask.key_length + tokens, mask=exists, other=0)
    return (others >= starts) & (others < ends)


@triton.jit
def sequence_range(mask, first, last):
    """For tokens first..last: the union [some_start, some_end) and the intersection [all_start, all_end) of their
    sequences."""
    some_start = tl.load(mask.sequences + first)
    some_end = tl.load(mask.sequences + mask.key_length + last)
    all_start = tl.load(mask.sequences + last)
    all_end = tl.load(mask.sequences + mask.key_length + first)
    return some_start, some_end, all_start, all_end


@triton.jit
def visible_keys(first_row, last_row, mask, OPTIONS: tl.constexpr):
    """For queries first_row..last_row: the union [some_start, some_end) and the intersection [all_start, all_end) of
    their visible keys."""
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
    """Among keys [start, end): the first real key, one past the last, and whether no padding is between them.
    More than SCANNED keys are read in steps of CHUNK."""
    if CHUNK == SCANNED:  # noqa: SIM114 -- this condition is compile-time, the next is not
        first_real, end_real, count = scan_keys(mask, start, end, CHUNK)
    elif end - start > SCANNED:
        first_real, end_real, count = scan_keys(mask, start, end, CHUNK)
    else:
        first_real, end_real, count = scan_keys(mask, start, end, SCANNED)
    return first_real, end_real, count == end_real - first_real


@triton.jit
def scan_keys(mask, start, end, CHUNK: tl.constexpr):
    """Among keys [start, end): the first real key, one past the last, and their number, read in steps of CHUNK."""
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
    """Whether any of the keys [start, start + BLOCK) is real."""
    return tl.max(load_padding(mask, start + tl.arange(0, BLOCK)).to(tl.int32), 0) > 0


@triton.jit
def key_blocks(first_row, mask, OPTIONS: tl.constexpr):
    """The key span of a query tile, in blocks of BLOCK_N without a mask and MASKED with a mask."""
    last_row = tl.minimum(first_row + OPTIONS.BLOCK_M, mask.query_length) - 1
    start, end, full_start, full_end = visible_keys(first_row, last_row, mask, OPTIONS)
    if mask.sequences is not None:
        some_start, some_end, all_start, all_end = sequence_range(mask, first_row, last_row)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    if mask.padding is not None:
        narrow: tl.constexpr = OPTIONS.BLOCK_D <= 64 and not OPTIONS.NATURAL  # otherwise it spills
        LONG: tl.constexpr = 4 * SCANNED if narrow else SCANNED
        first_real, end_real, contiguous = real_keys(mask, start, end, LONG)
        start = tl.maximum(start, first_real)
        end = tl.minimum(end, end_real)
        full_start = tl.maximum(full_start, first_real)
        full_end = tl.where(contiguous, tl.minimum(full_end, end_real), 0)
    return whole_blocks(start, full_start, full_end, end, OPTIONS.BLOCK_N, OPTIONS.MASKED)


@triton.jit
def query_blocks(first_key, mask, OPTIONS: tl.constexpr):
    """The query span of a key tile, the counterpart of `key_blocks`."""
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
    """Ranges aligned to blocks: `start` is rounded down to MASKED, [full_start, full_end) inwards to BLOCK."""
    end = tl.where(end > start, end, 0)
    start = start // MASKED * MASKED
    end = tl.maximum(end, start)
    full_start = tl.minimum((full_start + BLOCK - 1) // BLOCK * BLOCK, end)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK * BLOCK, full_start)
    return Span(start, full_start, full_end, end)


@triton.jit
def masked_length(span):
    """Number of positions in the masked loop, before and after the full blocks."""
    return span.full_start - span.start + tl.maximum(span.end - span.full_end, 0)


@triton.jit
def masked_position(span, offset):
    """Position of the block at `offset` of the masked loop."""
    before = span.full_start - span.start
    return tl.where(offset < before, span.start + offset, span.full_end + offset - before)


@triton.jit
def score_unit(NATURAL: tl.constexpr):
    """Factor from natural scores to the kernel's unit."""
    return 1.0 if NATURAL else LOG2_E


@triton.jit
def exponential(scores, NATURAL: tl.constexpr):
    """exp of scores in the kernel's unit."""
    return tl.exp2(scores * LOG2_E) if NATURAL else tl.exp2(scores)


@triton.jit
def capped(scores, OPTIONS: tl.constexpr):
    """softcap * tanh(scores / softcap), before the bias; unchanged without a softcap."""
    if OPTIONS.SOFTCAP > 0.0:
        limit = OPTIONS.SOFTCAP * score_unit(OPTIONS.NATURAL)
        scores = limit * tanh(scores / limit, OPTIONS.NATURAL)
    return scores


@triton.jit
def load_bias(bias, first_row, start, rows, columns, mask, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """The additive bias of the tile at (first_row, start); `rows` and `columns` are offsets within the tile, in either
    order of axes. Not BOUNDED: all keys are in range."""
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
    """Scores plus a natural bias, at least SCORE_FLOOR; -inf where the bias is -inf."""
    total = tl.maximum(scores + bias * score_unit(NATURAL), SCORE_FLOOR)
    return tl.where(bias == float("-inf"), float("-inf"), total)


@triton.jit
def keep_tile(dropout, start, rows, BLOCK_N: tl.constexpr):
    """The dropout mask of `rows` [M, 1] by keys [start, start + BLOCK_N), True where kept: int1 [M, BLOCK_N]."""
    groups = start // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    return keep_by_column(dropout.seed, groups, rows, dropout.head, dropout.threshold)


@triton.jit
def dropout_scale(dropout):
    """The factor of kept weights: 1 / (1 - p), 0 if p = 1."""
    kept = DROPOUT_LEVELS - dropout.threshold
    scale = 1.0
    if dropout.seed is not None:
        scale = tl.where(kept == 0, 0.0, DROPOUT_LEVELS / tl.maximum(kept, 1).to(tl.float32))
    return scale


@triton.jit
def finite_rows(tile):
    """`tile` with inf and NaN set to zero, and for each row 0, or NaN if the row was not finite."""
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
