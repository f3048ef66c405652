"""Triton: rotation of queries and keys during loading, and of their gradients during storing.

Scores do not depend on the order of columns if queries and keys share it. Both conventions are therefore loaded with
the two columns of a pair adjacent: a thread owns whole pairs and rotates them without a shuffle.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import from_fp32, rotated, round_to, settled, to_fp32
from transformer_kernels.ops.attention._triton_tile import load_columns, load_rows, store_columns, store_rows


class Angles(NamedTuple):
    """The angles of one sequence of the batch."""

    cos: Any  # pointer to (1 or B, L, OPTIONS.PAIRS), or None
    sin: Any
    token: Any  # row of the first token


@triton.jit
def first_token(batch, length, OPTIONS: tl.constexpr):
    """The row of a sequence's first token in the tables of angles."""
    return tl.cast(batch if OPTIONS.OWN_ANGLES else 0, tl.int64) * length


@triton.jit
def first_columns(OPTIONS: tl.constexpr):
    """First column of each pair [1, BLOCK_D / 2], rotated pairs first, if pairs are (i, i + PAIRS)."""
    pair = tl.arange(0, OPTIONS.BLOCK_D // 2)[None, :]
    if OPTIONS.PAIRS < OPTIONS.BLOCK_D // 2:
        pair = in_vectors(tl.where(pair < OPTIONS.PAIRS, pair, pair + OPTIONS.PAIRS), OPTIONS)
    return pair


@triton.jit
def second_columns(OPTIONS: tl.constexpr):
    """Second column of each pair."""
    pair = tl.arange(0, OPTIONS.BLOCK_D // 2)[None, :]
    column = pair + OPTIONS.BLOCK_D // 2
    if OPTIONS.PAIRS < OPTIONS.BLOCK_D // 2:
        column = tl.where(pair < OPTIONS.PAIRS, pair + OPTIONS.PAIRS, column)
    return in_vectors(column, OPTIONS)


@triton.jit
def in_vectors(columns, OPTIONS: tl.constexpr):
    """`columns`, annotated as contiguous in groups of eight where they are."""
    if OPTIONS.PAIRS % 8 == 0:
        columns = tl.max_contiguous(tl.multiple_of(columns, (1, 8)), (1, 8))
    return columns


@triton.jit
def load_angles(table, angles, start, length, ROWS: tl.constexpr, BOUNDED: tl.constexpr, other, OPTIONS: tl.constexpr):
    """cos or sin of tokens [start, start + ROWS), `other` for pairs without rotation: [ROWS, BLOCK_D / 2]."""
    rows = tl.arange(0, ROWS)[:, None]
    pairs = tl.arange(0, OPTIONS.BLOCK_D // 2)[None, :]
    pointers = table + (angles.token + start) * OPTIONS.PAIRS + rows * OPTIONS.PAIRS + pairs
    if BOUNDED:
        values = tl.load(pointers, mask=(start + rows < length) & (pairs < OPTIONS.PAIRS), other=other)
    elif OPTIONS.PAIRS < OPTIONS.BLOCK_D // 2:
        values = tl.load(pointers, mask=pairs < OPTIONS.PAIRS, other=other)
    else:
        values = tl.load(pointers)
    return to_fp32(values)


@triton.jit
def load_rotated(source, angles, start, ROWS: tl.constexpr, BOUNDED: tl.constexpr, OPTIONS: tl.constexpr):
    """`load_rows` of queries or keys; with angles the rows are rotated and pairs are adjacent."""
    if angles.cos is None:
        tile = load_rows(source, start, ROWS, BOUNDED, OPTIONS)
    else:
        if OPTIONS.INTERLEAVED:
            tile = load_rows(source, start, ROWS, BOUNDED, OPTIONS)
            first, second = tl.split(tl.reshape(tile, (ROWS, OPTIONS.BLOCK_D // 2, 2)))
        else:
            first = load_columns(source, start, first_columns(OPTIONS), ROWS, BOUNDED, OPTIONS)
            second = load_columns(source, start, second_columns(OPTIONS), ROWS, BOUNDED, OPTIONS)
        cos = load_angles(angles.cos, angles, start, source.length, ROWS, BOUNDED, 1.0, OPTIONS)
        sin = load_angles(angles.sin, angles, start, source.length, ROWS, BOUNDED, 0.0, OPTIONS)
        first, second = rotated(to_fp32(first), to_fp32(second), cos, sin)
        element = source.pointer.dtype.element_ty
        tile = tl.join(from_fp32(first, element), from_fp32(second, element))  # [ROWS, BLOCK_D / 2, 2]
        tile = tl.reshape(tile, (ROWS, OPTIONS.BLOCK_D))
        if not OPTIONS.NATURAL:
            tile = settled(tile)
    return tile


@triton.jit
def store_unrotated(target, tile, angles, start, OPTIONS: tl.constexpr):
    """`store_rows` for the gradient `tile`, fp32 [ROWS, BLOCK_D], of rows loaded by `load_rotated`.

    Rounded before and after the rotation, as by `rotary` on the gradient of attention.
    """
    if angles.cos is None:
        store_rows(target, tile, start, OPTIONS)
    else:
        ROWS: tl.constexpr = tile.shape[0]
        tile = round_to(tile, target.pointer.dtype.element_ty)
        first, second = tl.split(tl.reshape(tile, (ROWS, OPTIONS.BLOCK_D // 2, 2)))
        cos = load_angles(angles.cos, angles, start, target.length, ROWS, True, 1.0, OPTIONS)
        sin = load_angles(angles.sin, angles, start, target.length, ROWS, True, 0.0, OPTIONS)
        first, second = rotated(first, second, cos, -sin)
        if OPTIONS.INTERLEAVED:
            store_rows(target, tl.reshape(tl.join(first, second), (ROWS, OPTIONS.BLOCK_D)), start, OPTIONS)
        else:
            store_columns(target, first, start, first_columns(OPTIONS), OPTIONS)
            store_columns(target, second, start, second_columns(OPTIONS), OPTIONS)
