"""Triton attention: masks by position, packed sequences and padding, and the positions that a tile visits.

Positions are bottom-right aligned: query i is at key position i + Lk - Lq ("shift"). Of packed sequences one small
kernel writes start and end (2, T) for each token. Both are monotonic, so the first and last token of a tile bound the
ranges of all its tokens, and nothing is read on the host. A token after the last sequence has an empty range.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import to_fp32
from transformer_kernels.ops.attention._triton_tile import tile_of_program

SCANNED = tl.constexpr(1024)
"""Keys of a padding mask that a program reads per step."""


class Span(NamedTuple):
    """Positions that a tile visits: [full_start, full_end) without a mask, the remainder of [start, end) masked."""

    start: Any
    full_start: Any
    full_end: Any
    end: Any


@triton.jit
def query_tile_of_program(query_heads, query_length, section, OPTIONS: tl.constexpr):
    """(batch, head, first row) of this program; causal tiles run longest first, so that short tiles fill the tail."""
    blocks = tl.cdiv(query_length, OPTIONS.BLOCK_M)
    block, batch_head = tile_of_program(blocks, section)
    if OPTIONS.SCORES.CAUSAL:
        block = blocks - 1 - block
    return batch_head // query_heads, batch_head % query_heads, block * OPTIONS.BLOCK_M


@triton.jit
def visible_pairs(rows, columns, stage, OPTIONS: tl.constexpr):
    """Visibility by position; `rows` (queries) and `columns` (keys) broadcast in either order."""
    positions = rows + (stage.numbers.key_length - stage.numbers.query_length)
    if OPTIONS.SCORES.CAUSAL:
        visible = columns < tl.minimum(positions + 1, stage.numbers.key_length)
    elif OPTIONS.SCORES.WINDOW:
        visible = columns < tl.minimum(positions + stage.numbers.right + 1, stage.numbers.key_length)
    else:
        visible = (columns < stage.numbers.key_length) & (rows >= 0)
    if OPTIONS.SCORES.WINDOW:
        visible = visible & (columns >= positions - stage.numbers.left)
    return visible


@triton.jit
def load_padding(stage, keys):
    """Whether each of `keys` is a real token, not padding."""
    padding = stage.inputs.padding + tl.cast(stage.numbers.batch, tl.int64) * stage.numbers.key_length
    return tl.load(padding + keys, mask=keys < stage.numbers.key_length, other=0) != 0


@triton.jit
def real_columns(stage, keys):
    """Whether each of `keys` is a real token; all are without a padding mask."""
    return load_padding(stage, keys) if stage.inputs.padding is not None else keys >= 0


@triton.jit
def visible_tile(stage, real, rows, columns, PADDED: tl.constexpr, OPTIONS: tl.constexpr):
    """Visibility by position, padding and packed sequences; `rows` (queries) and `columns` (keys) broadcast in either
    order. `real` is that of `columns`; not PADDED: the caller applies it."""
    visible = visible_pairs(rows, columns, stage, OPTIONS)
    if PADDED and stage.inputs.padding is not None:
        visible = visible & real
    if stage.inputs.sequences is not None:
        if rows.shape[1] == 1:
            visible = visible & within_sequence(stage, rows, columns)
        else:
            visible = visible & within_sequence(stage, columns, rows)
    return visible


@triton.jit
def finite_rows(tile):
    """`tile` with inf and NaN set to zero, and for each row 0, or NaN if the row was not finite."""
    values = to_fp32(tile)
    trace = values * 0.0
    return tl.where(trace == 0.0, tile, tl.zeros_like(tile)), tl.sum(trace, 1)


@triton.jit
def isolated_padding(stage, tile, real):
    """`tile`, rows of keys, with padding set to zero: 0 * NaN is NaN."""
    if stage.inputs.padding is not None:
        tile = tl.where(tl.reshape(real, (tile.shape[0], 1)), tile, tl.zeros_like(tile))
    return tile


@triton.jit
def isolated_keys(stage, tile, real):
    """`tile`, rows of keys, with padding set to zero and, in packed sequences, inf and NaN; and the trace of the latter
    for `add_trace`: the product of a weight of zero with them is NaN."""
    trace = tl.zeros([tile.shape[0]], tl.float32)
    tile = isolated_padding(stage, tile, real)
    if stage.inputs.sequences is not None:
        tile, trace = finite_rows(tile)
    return tile, trace


@triton.jit
def add_trace(stage, total, trace, visible):
    """`total` [M, D], with NaN in the queries that see a key whose row was not finite."""
    if stage.inputs.sequences is not None:
        total += tl.sum(tl.where(visible, trace[None, :], 0.0), 1)[:, None]
    return total


@triton.jit
def isolated_queries(stage, q, dout, dk, dv, first_row, first_key):
    """q and dout [M, D], in packed sequences without inf and NaN; and dk and dv [N, D] with NaN in the keys of the
    sequence of a query that had one."""
    if stage.inputs.sequences is not None:
        rows = (first_row + tl.arange(0, q.shape[0]))[None, :]
        columns = (first_key + tl.arange(0, dk.shape[0]))[:, None]
        q, q_trace = finite_rows(q)
        dout, dout_trace = finite_rows(dout)
        traces = tl.where(within_sequence(stage, columns, rows), (q_trace + dout_trace)[None, :], 0.0)
        trace = tl.sum(traces, 1)[:, None]
        dk += trace
        dv += trace
    return q, dout, dk, dv


@triton.jit
def has_keys(stage, start, BLOCK: tl.constexpr):
    """Whether any of the keys [start, start + BLOCK) is real."""
    found = True
    if stage.inputs.padding is not None:
        found = any_real(stage, start, BLOCK)
    return found


@triton.jit
def read_length(stage, real):
    """Where the keys of a tile end: their number, or 0 if all in the tile are padding and none is to be read."""
    length = stage.numbers.key_length
    if stage.inputs.padding is not None:
        length = tl.where(tl.max(real.to(tl.int32), 0) > 0, length, 0)
    return length


@triton.jit
def sequence_queries(stage, first_key, OPTIONS: tl.constexpr):
    """The range of queries in the sequences of a key tile; all, if none are packed."""
    start = 0
    end = stage.numbers.query_length
    if stage.inputs.sequences is not None:
        last_key = tl.minimum(first_key + OPTIONS.BLOCK_N, stage.numbers.key_length) - 1
        start, end, _, _ = sequence_range(stage, first_key, last_key)
    return start, end


@triton.jit
def has_queries(stage, first_row, start, end, OPTIONS: tl.constexpr):
    """Whether a query tile intersects `sequence_queries`."""
    found = True
    if stage.inputs.sequences is not None:
        found = (first_row < end) & (first_row + OPTIONS.BLOCK_M > start)
    return found


@triton.jit
def within_sequence(stage, tokens, others):
    """Whether `others` belong to the sequences of `tokens`; False for tokens out of range."""
    exists = tokens < stage.numbers.key_length
    starts = tl.load(stage.inputs.sequences + tokens, mask=exists, other=0)
    ends = tl.load(stage.inputs.sequences + stage.numbers.key_length + tokens, mask=exists, other=0)
    return (others >= starts) & (others < ends)


@triton.jit
def sequence_range(stage, first, last):
    """For tokens first..last: the union [some_start, some_end) and the intersection [all_start, all_end) of their
    sequences."""
    some_start = tl.load(stage.inputs.sequences + first)
    some_end = tl.load(stage.inputs.sequences + stage.numbers.key_length + last)
    all_start = tl.load(stage.inputs.sequences + last)
    all_end = tl.load(stage.inputs.sequences + stage.numbers.key_length + first)
    return some_start, some_end, all_start, all_end


@triton.jit
def visible_keys(first_row, last_row, stage, OPTIONS: tl.constexpr):
    """For queries first_row..last_row: the union [some_start, some_end) and the intersection [all_start, all_end) of
    their visible keys."""
    shift = stage.numbers.key_length - stage.numbers.query_length
    first, last = shift + first_row, shift + last_row
    some_start = 0
    all_start = 0
    some_end = stage.numbers.key_length
    all_end = stage.numbers.key_length
    if OPTIONS.SCORES.WINDOW:
        some_start = tl.maximum(0, first - stage.numbers.left)
        all_start = tl.maximum(0, last - stage.numbers.left)
    if OPTIONS.SCORES.CAUSAL:
        some_end = tl.minimum(stage.numbers.key_length, last + 1)
        all_end = tl.minimum(stage.numbers.key_length, first + 1)
    elif OPTIONS.SCORES.WINDOW:
        some_end = tl.minimum(stage.numbers.key_length, last + stage.numbers.right + 1)
        all_end = tl.minimum(stage.numbers.key_length, first + stage.numbers.right + 1)
    return some_start, some_end, all_start, all_end


@triton.jit
def real_keys(stage, start, end, CHUNK: tl.constexpr):
    """Among keys [start, end): the first real key, one past the last, and whether no padding is between them.
    More than SCANNED keys are read in steps of CHUNK."""
    if CHUNK == SCANNED:  # noqa: SIM114 -- this condition is compile-time, the next is not
        first_real, end_real, count = scan_keys(stage, start, end, CHUNK)
    elif end - start > SCANNED:
        first_real, end_real, count = scan_keys(stage, start, end, CHUNK)
    else:
        first_real, end_real, count = scan_keys(stage, start, end, SCANNED)
    return first_real, end_real, count == end_real - first_real


@triton.jit
def scan_keys(stage, start, end, CHUNK: tl.constexpr):
    """Among keys [start, end): the first real key, one past the last, and their number, read in steps of CHUNK."""
    columns = tl.arange(0, CHUNK)
    first = tl.zeros([CHUNK], tl.int32) + end
    last = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for chunk in range(start, end, CHUNK):
        keys = chunk + columns
        real = load_padding(stage, keys) & (keys < end)
        first = tl.where(real, tl.minimum(first, keys), first)
        last = tl.where(real, keys + 1, last)
        count += real.to(tl.int32)
    return tl.min(first, 0), tl.max(last, 0), tl.sum(count, 0)


@triton.jit
def split_range(first, count, stage, OPTIONS: tl.constexpr):
    """Of the keys [first, first + count), few, the range of blocks that any query sees."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    start, end, _, _ = visible_keys(0, stage.numbers.query_length - 1, stage, OPTIONS)
    start = tl.maximum(start // BLOCK_N * BLOCK_N, first)
    end = tl.minimum(end, first + count)
    if stage.inputs.padding is not None:
        first_real, end_real, _ = scan_keys(stage, start, end, SCANNED)
        start, end = tl.maximum(start, first_real // BLOCK_N * BLOCK_N), tl.minimum(end, end_real)
    return start, end


@triton.jit
def any_real(stage, start, BLOCK: tl.constexpr):
    """Whether any of the keys [start, start + BLOCK) is real."""
    return tl.max(load_padding(stage, start + tl.arange(0, BLOCK)).to(tl.int32), 0) > 0


@triton.jit
def key_blocks(first_row, stage, OPTIONS: tl.constexpr):
    """The key span of a query tile, in blocks of BLOCK_N without a mask and MASKED with a mask."""
    last_row = tl.minimum(first_row + OPTIONS.BLOCK_M, stage.numbers.query_length) - 1
    start, end, full_start, full_end = visible_keys(first_row, last_row, stage, OPTIONS)
    if stage.inputs.sequences is not None:
        some_start, some_end, all_start, all_end = sequence_range(stage, first_row, last_row)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    if stage.inputs.padding is not None:
        narrow: tl.constexpr = OPTIONS.BLOCK_D <= 64 and not OPTIONS.NATURAL  # otherwise it spills
        LONG: tl.constexpr = 4 * SCANNED if narrow else SCANNED
        first_real, end_real, contiguous = real_keys(stage, start, end, LONG)
        start = tl.maximum(start, first_real)
        end = tl.minimum(end, end_real)
        full_start = tl.maximum(full_start, first_real)
        full_end = tl.where(contiguous, tl.minimum(full_end, end_real), 0)
    return whole_blocks(start, full_start, full_end, end, OPTIONS.BLOCK_N, OPTIONS.MASKED)


@triton.jit
def query_blocks(first_key, read, stage, OPTIONS: tl.constexpr):
    """The query span of a key tile, the counterpart of `key_blocks`; empty if `read_length` is 0."""
    last_key = tl.minimum(first_key + OPTIONS.BLOCK_N, stage.numbers.key_length) - 1
    shift = stage.numbers.key_length - stage.numbers.query_length
    start = 0
    full_start = 0
    end = stage.numbers.query_length
    full_end = stage.numbers.query_length
    if OPTIONS.SCORES.CAUSAL:
        start = tl.maximum(0, first_key - shift)
        full_start = tl.maximum(0, last_key - shift)
    elif OPTIONS.SCORES.WINDOW:
        start = tl.maximum(0, first_key - shift - stage.numbers.right)
        full_start = tl.maximum(0, last_key - shift - stage.numbers.right)
    if OPTIONS.SCORES.WINDOW:
        end = tl.minimum(stage.numbers.query_length, last_key - shift + stage.numbers.left + 1)
        full_end = tl.minimum(stage.numbers.query_length, first_key - shift + stage.numbers.left + 1)
    if stage.inputs.sequences is not None:
        some_start, some_end, all_start, all_end = sequence_range(stage, first_key, last_key)
        start, end = tl.maximum(start, some_start), tl.minimum(end, some_end)
        full_start, full_end = tl.maximum(full_start, all_start), tl.minimum(full_end, all_end)
    if stage.inputs.padding is not None:
        end = tl.where(read == 0, 0, end)
        full_end = tl.where(read == 0, 0, full_end)
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


@triton.jit(do_not_specialize=["cu_seqlens_pointer", "entries", "steps", "tokens"])
def attention_sequences_kernel(
    cu_seqlens_pointer,  # (entries,)
    sequences_pointer,  # (2, tokens), int32, contiguous
    entries, steps, tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK tokens and finds the sequence of each by bisection; `steps` halvings leave one entry."""
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # cu_seqlens[low] <= token < cu_seqlens[high]
    high = low + entries
    for _ in range(steps):
        middle = (low + high) // 2
        reached = tl.load(cu_seqlens_pointer + middle) <= positions
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    start = tl.load(cu_seqlens_pointer + low)
    end = tl.load(cu_seqlens_pointer + tl.minimum(high, entries - 1))
    inside = positions < tokens
    tl.store(sequences_pointer + positions, tl.minimum(tl.maximum(start, 0), tokens), mask=inside)
    tl.store(sequences_pointer + tokens + positions, tl.minimum(tl.maximum(end, 0), tokens), mask=inside)
