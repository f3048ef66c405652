"""Triton attention: which tile each kernel runs with, in static tables.

Chosen from the machine code, without a GPU at hand: no spills, at least eight warps on a multiprocessor, and tiles that
fill the matrix instructions.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import NamedTuple

AMPERE, HOPPER = (8, 0), (9, 0)
HALF, SINGLE = 2, 4
"""Element sizes in bytes."""

MAXIMUM_HEAD_DIM = 256

SHORT_QUERIES = 256
"""The short-sequence path takes up to as many queries, and as many keys as its tables have tiles for."""

DECODE_QUERIES = 16
DECODE_MINIMUM_KEYS = 512
DECODE_MAXIMUM_ROWS = 64
"""The decode path takes up to 16 queries, 64 rows with all query heads of a group, that face at least 512 keys."""

MAXIMUM_SPLITS = 64
"""Most parts that the keys of a decode step, or the tiles of a bias gradient, are shared out in."""

LONG_KEYS = 2048
"""From how many keys a causal call is long."""

COMBINED_SPLITS = 16
"""Parts of a decode step that the combining kernel reads at a time."""

SEQUENCES_TOKENS = 256
"""Tokens whose sequence one program finds."""

TURNED_HEAD_DIM = 64
"""Of 16 bits. Wider rows, rotated as they are loaded, leave no room for a second stage on 8.0; those of fp32 spill."""

TURNED_KEYS = 1024
"""How many keys a query may see, on average, where kernels turn rows as they load them.

By issue slots and bytes of sm_90, not measured: to turn 64 keys of 64 columns takes about 200 clocks for each tile of
128 queries that walks over them, and to turn queries as much again in the backward pass. To write and read rotated
copies of 64 queries and keys takes 2,400 clocks, and 4,700 in the backward pass: as much as 11 tiles, besides launches.
"""

L2_BYTES = 16 << 20
"""What heads that run side by side may keep in the L2 cache: less than half of an A100's or an H100's."""


class Tile(NamedTuple):
    """A launch configuration: queries and keys of a tile, and of a tile of the loop that masks, which is cut finer
    along the axis that is walked over, both because its body needs more registers and to hug the diagonal."""

    queries: int
    keys: int
    masked: int
    num_warps: int
    num_stages: int


class Kernel(Enum):
    """The kernels that have tables."""

    FORWARD = "forward"
    QUERY_GRADIENT = "query gradient"
    KEY_GRADIENT = "key gradient"
    BIAS_GRADIENT = "bias gradient"
    DECODE = "decode"
    SHORT_FORWARD = "short forward"
    SHORT_BACKWARD = "short backward"


class Body(Enum):
    """What the masks of a call make of a kernel's body: a bias, dropout, a window, packed sequences or rotary positions
    need more registers."""

    LIGHT = "light"
    CAUSAL = "causal"
    LONG = "causal over many keys"
    PADDED = "causal and padded"
    HEAVY = "heavy"
    PACKED = "packed"
    ROTATED = "rotated"


Rows = dict[tuple[tuple[int, int], int], tuple[tuple[int, Tile], ...]]
"""Tiles by the largest padded head dimension that they serve, for a compute capability and an element size."""

FORWARD: Rows = {
    (HOPPER, HALF): (
        (64, Tile(128, 128, 64, 8, 3)),
        (128, Tile(128, 128, 64, 8, 2)),
        (256, Tile(64, 64, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (64, Tile(128, 64, 32, 4, 3)),
        (128, Tile(128, 32, 16, 8, 3)),
        (256, Tile(64, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): (
        (32, Tile(32, 64, 32, 4, 2)),
        (64, Tile(32, 32, 16, 4, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

FORWARD_CAUSAL: Rows = FORWARD | {
    (HOPPER, HALF): (
        (64, Tile(128, 64, 64, 4, 3)),
        (128, Tile(128, 128, 128, 8, 2)),
        (256, Tile(64, 64, 16, 8, 2)),
    ),
}
"""With half of the warps a short tile spends less on its beginning and end, which weighs more than its longer loop. At
head dimension 128 one masked block on the diagonal takes 736 instructions where two of 64 keys take 888."""

FORWARD_LONG: Rows = FORWARD_CAUSAL | {
    (HOPPER, HALF): (FORWARD[HOPPER, HALF][0], *FORWARD_CAUSAL[HOPPER, HALF][1:]),
}
"""Over many keys the longer loop weighs more."""

FORWARD_PADDED: Rows = FORWARD_CAUSAL | {
    (HOPPER, HALF): (FORWARD_CAUSAL[HOPPER, HALF][0], *FORWARD[HOPPER, HALF][1:]),
}
"""Beside a padding mask that block of 128 keys spills."""

FORWARD_HEAVY: Rows = {
    (HOPPER, HALF): (
        (128, Tile(128, 64, 32, 8, 3)),
        (256, Tile(64, 32, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 16, 4, 3)),
        (128, Tile(128, 32, 16, 8, 3)),
        (256, Tile(64, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): FORWARD[AMPERE, SINGLE],
}

QUERY_GRADIENT: Rows = {
    (HOPPER, HALF): (
        (128, Tile(128, 64, 64, 8, 3)),
        (256, Tile(32, 32, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (64, Tile(64, 64, 32, 4, 2)),
        (128, Tile(64, 64, 32, 8, 2)),
        (256, Tile(32, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): (
        (64, Tile(32, 32, 32, 8, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

QUERY_GRADIENT_HEAVY: Rows = {
    (HOPPER, HALF): (
        (64, Tile(128, 64, 32, 8, 3)),
        (128, Tile(128, 32, 32, 8, 2)),
        (256, Tile(16, 32, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 32, 4, 2)),
        (64, Tile(128, 32, 16, 8, 2)),
        (128, Tile(64, 64, 32, 8, 2)),
        (256, Tile(16, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): (
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

QUERY_GRADIENT_PACKED: Rows = QUERY_GRADIENT_HEAVY | {(AMPERE, SINGLE): QUERY_GRADIENT[AMPERE, SINGLE]}

KEY_GRADIENT: Rows = {
    (HOPPER, HALF): (
        (64, Tile(64, 128, 32, 8, 2)),
        (128, Tile(32, 128, 32, 8, 2)),
        (256, Tile(64, 32, 32, 8, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 32, 4, 2)),
        (64, Tile(32, 128, 16, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(32, 32, 16, 8, 1)),
    ),
    (AMPERE, SINGLE): (
        (64, Tile(16, 32, 16, 8, 2)),
        (128, Tile(16, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

KEY_GRADIENT_HEAVY: Rows = {
    (HOPPER, HALF): (
        (32, Tile(64, 128, 32, 8, 2)),
        (64, Tile(64, 64, 32, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(64, 32, 32, 8, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(32, 64, 16, 4, 2)),
        (64, Tile(32, 64, 16, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(32, 32, 16, 8, 1)),
    ),
    (AMPERE, SINGLE): KEY_GRADIENT[AMPERE, SINGLE],
}

KEY_GRADIENT_PACKED: Rows = {
    (HOPPER, HALF): (
        (32, Tile(64, 128, 32, 8, 2)),
        (64, Tile(64, 64, 32, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(32, 16, 16, 8, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(32, 64, 16, 4, 2)),
        (64, Tile(32, 64, 16, 8, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(32, 16, 16, 8, 1)),
    ),
    (AMPERE, SINGLE): KEY_GRADIENT[AMPERE, SINGLE],
}

KEY_GRADIENT_TURNED: Rows = KEY_GRADIENT | {(AMPERE, HALF): KEY_GRADIENT_HEAVY[AMPERE, HALF]}

BIAS_GRADIENT: Rows = {
    (HOPPER, HALF): ((64, Tile(32, 64, 32, 4, 1)), (128, Tile(32, 64, 32, 8, 1)), (256, Tile(32, 16, 16, 8, 1))),
    (AMPERE, HALF): ((64, Tile(32, 64, 32, 4, 1)), (128, Tile(16, 64, 16, 8, 1)), (256, Tile(32, 16, 16, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 32, 32, 8, 1)), (256, Tile(16, 16, 16, 8, 1))),
}

DECODE: Rows = {
    (AMPERE, HALF): ((128, Tile(16, 64, 64, 8, 2)), (256, Tile(16, 32, 32, 8, 2))),
    (AMPERE, SINGLE): ((64, Tile(16, 32, 32, 8, 2)), (256, Tile(16, 16, 16, 8, 1))),
}
"""The number of queries is that of the call: 16, 32 or 64 rows."""

SHORT_FORWARD: Rows = {
    (HOPPER, HALF): (
        (32, Tile(64, 64, 64, 4, 1)),
        (32, Tile(64, 128, 128, 4, 1)),
        (64, Tile(64, 64, 64, 4, 1)),
        (64, Tile(64, 128, 128, 4, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 64, 4, 1)),
        (32, Tile(32, 128, 128, 4, 1)),
        (64, Tile(64, 64, 64, 4, 1)),
        (64, Tile(32, 128, 128, 4, 1)),
    ),
    (AMPERE, SINGLE): ((32, Tile(16, 64, 64, 8, 1)), (64, Tile(16, 64, 64, 8, 1))),
}
"""The short path takes these head dimensions alone, and all keys in one tile."""

SHORT_FORWARD_HEAVY: Rows = {
    (HOPPER, HALF): (
        (32, Tile(64, 64, 64, 4, 1)),
        (32, Tile(64, 128, 128, 4, 1)),
        (64, Tile(64, 64, 64, 4, 1)),
        (64, Tile(64, 128, 128, 8, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 64, 4, 1)),
        (32, Tile(16, 128, 128, 4, 1)),
        (64, Tile(64, 64, 64, 4, 1)),
        (64, Tile(32, 128, 128, 4, 1)),
    ),
    (AMPERE, SINGLE): SHORT_FORWARD[AMPERE, SINGLE],
}

SHORT_BACKWARD: Rows = {
    (HOPPER, HALF): (
        (32, Tile(32, 64, 64, 4, 1)),
        (32, Tile(32, 128, 128, 8, 1)),
        (64, Tile(32, 64, 64, 4, 1)),
        (64, Tile(32, 128, 128, 8, 1)),
    ),
    (AMPERE, HALF): (
        (32, Tile(32, 64, 64, 4, 1)),
        (32, Tile(32, 128, 128, 8, 1)),
        (64, Tile(32, 64, 64, 4, 1)),
        (64, Tile(16, 128, 128, 8, 1)),
    ),
    (AMPERE, SINGLE): ((32, Tile(16, 64, 64, 8, 1)), (64, Tile(16, 64, 64, 8, 1))),
}

SHORT_BACKWARD_HEAVY: Rows = {
    (HOPPER, HALF): SHORT_BACKWARD[HOPPER, HALF],
    (AMPERE, HALF): (
        (32, Tile(32, 64, 64, 4, 1)),
        (32, Tile(32, 128, 128, 8, 1)),
        (64, Tile(16, 64, 64, 4, 1)),
        (64, Tile(16, 128, 128, 8, 1)),
    ),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

TABLES: dict[tuple[Kernel, Body], Rows] = {
    (Kernel.FORWARD, Body.LIGHT): FORWARD,
    (Kernel.FORWARD, Body.CAUSAL): FORWARD_CAUSAL,
    (Kernel.FORWARD, Body.LONG): FORWARD_LONG,
    (Kernel.FORWARD, Body.PADDED): FORWARD_PADDED,
    (Kernel.FORWARD, Body.HEAVY): FORWARD_HEAVY,
    (Kernel.QUERY_GRADIENT, Body.LIGHT): QUERY_GRADIENT,
    (Kernel.QUERY_GRADIENT, Body.HEAVY): QUERY_GRADIENT_HEAVY,
    (Kernel.QUERY_GRADIENT, Body.PACKED): QUERY_GRADIENT_PACKED,
    (Kernel.KEY_GRADIENT, Body.LIGHT): KEY_GRADIENT,
    (Kernel.KEY_GRADIENT, Body.HEAVY): KEY_GRADIENT_HEAVY,
    (Kernel.KEY_GRADIENT, Body.PACKED): KEY_GRADIENT_PACKED,
    (Kernel.KEY_GRADIENT, Body.ROTATED): KEY_GRADIENT_TURNED,
    (Kernel.BIAS_GRADIENT, Body.LIGHT): BIAS_GRADIENT,
    (Kernel.DECODE, Body.LIGHT): DECODE,
    (Kernel.SHORT_FORWARD, Body.LIGHT): SHORT_FORWARD,
    (Kernel.SHORT_FORWARD, Body.HEAVY): SHORT_FORWARD_HEAVY,
    (Kernel.SHORT_BACKWARD, Body.LIGHT): SHORT_BACKWARD,
    (Kernel.SHORT_BACKWARD, Body.HEAVY): SHORT_BACKWARD_HEAVY,
}

LIGHTER = {
    Body.PACKED: Body.HEAVY, Body.HEAVY: Body.LIGHT, Body.ROTATED: Body.CAUSAL, Body.PADDED: Body.CAUSAL,
    Body.LONG: Body.CAUSAL, Body.CAUSAL: Body.LIGHT,
}  # fmt: skip
"""A body without a table of its own takes that of a lighter one."""


def rows(kernel: Kernel, body: Body, capability: tuple[int, int], itemsize: int) -> tuple[tuple[int, Tile], ...]:
    """The rows of the table for a kernel's body, for the newest capability that is not newer than the device's."""
    while (kernel, body) not in TABLES:
        body = LIGHTER[body]
    table = TABLES[kernel, body]
    newest = max(known for known, size in table if size == itemsize and known <= capability)
    return table[newest, itemsize]


@functools.cache
def find(kernel: Kernel, body: Body, capability: tuple[int, int], itemsize: int, head_dim: int) -> Tile:
    """The tile for a padded head dimension."""
    return next(tile for largest, tile in rows(kernel, body, capability, itemsize) if head_dim <= largest)


@functools.cache
def find_short(
    kernel: Kernel, body: Body, capability: tuple[int, int], itemsize: int, head_dim: int, keys: int
) -> Tile | None:
    """The tile that holds all keys of a head, None where there is none."""
    fitting = (tile for width, tile in rows(kernel, body, capability, itemsize) if width == head_dim)
    return next((tile for tile in fitting if keys <= tile.keys), None)
