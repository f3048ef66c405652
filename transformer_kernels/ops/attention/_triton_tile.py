"""Device functions of all Triton attention kernels on tiles of rows: loads, stores, products, the tile of a program.

Kernels take pointers as records and numbers as flat arguments: Triton specialises a pointer in a record like any other,
but ignores `do_not_specialize` for integers in a record. A returned tuple must not contain None or compile-time values.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import from_fp32


class Options(NamedTuple):
    """Compile-time options of a kernel. Options that are implied by a pointer that is None are not repeated here."""

    GROUP: int  # query heads that share a key head
    HEAD_DIM: int
    BLOCK_D: int  # the head dimension padded to a power of two
    BLOCK_M: int  # queries per tile
    BLOCK_N: int  # keys per tile
    MASKED: int  # step of the masked loop, in keys or queries
    SCORES: Any  # ScoreOptions: everything between q k^T and the softmax
    ALIGNMENT: int  # a divisor of all strides, in elements; 0 if offsets within a tile overflow 32 bits
    PAIRS: int  # number of rotated pairs of columns; 0: no rotation
    INTERLEAVED: bool  # pairs are (2 i, 2 i + 1), else (i, i + PAIRS)
    OWN_ANGLES: bool  # angles differ between sequences of the batch
    NATURAL: bool  # unit of scores: natural instead of base 2, for fp32 operands
    PRECISION: str  # of fp32 products


class Inputs(NamedTuple):
    """Pointers to queries, keys and values."""

    q: Any  # (B, Hq, Lq, D)
    k: Any  # (B, Hk, Lk, D)
    v: Any  # (B, Hk, Lk, D)


class Rows(NamedTuple):
    """The rows of one head."""

    pointer: Any  # to the first one
    stride: Any
    length: Any


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
def multiply(a, b, OPTIONS: tl.constexpr):
    """a @ b in fp32."""
    return tl.dot(a, b, input_precision=OPTIONS.PRECISION)


@triton.jit
def accumulate(a, b, total, OPTIONS: tl.constexpr):
    """total + a @ b."""
    return tl.dot(a, b, total, input_precision=OPTIONS.PRECISION)
