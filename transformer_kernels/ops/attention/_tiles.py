"""Triton attention: static tables of tile sizes.

Chosen from machine code, not timed on a GPU: no spills, at least eight warps per multiprocessor, full matrix
instructions.
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
"""Maximum number of queries on the short-sequence path; its tables limit the number of keys."""

DECODE_QUERIES = 16
DECODE_MINIMUM_KEYS = 512
DECODE_MAXIMUM_ROWS = 64
"""Limits of the decode path: at most 16 queries, 64 rows over the query heads of a group, at least 512 keys."""

MAXIMUM_SPLITS = 64
"""Maximum number of splits of the keys in decoding, and of the tiles of a bias gradient."""

LONG_KEYS = 2048
"""Minimum number of keys for `Body.LONG`."""

COMBINED_SPLITS = 16
"""Splits that the combine kernel reads per step."""

SEQUENCES_TOKENS = 256
"""Tokens per program of the kernel that finds each token's sequence."""

ROTATED_HEAD_DIM = 64
"""Maximum head dimension, in 16 bits, for rotation during loading: wider rows prevent a second stage on sm_80, and fp32
spills."""

ROTATED_KEYS = 1024
"""Maximum number of visible keys per query, on average, for rotation during loading.

Estimated from issue slots and bytes on sm_90, not measured: rotating 64 keys of 64 columns takes about 200 clocks per
tile of 128 queries, twice that in backward. Rotated copies of 64 queries and keys cost 2,400 clocks forward and 4,700
backward, as much as 11 tiles, plus launches.
"""

L2_BYTES = 16 << 20
"""L2 bytes for the keys and values of concurrent heads: less than half of an A100's or H100's cache."""


class Tile(NamedTuple):
    """A launch configuration: queries and keys per tile, and the step of the masked loop, which may be smaller: its
    body needs more registers, and smaller steps waste less along the diagonal."""

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
    """Variants of a kernel's body by register pressure: bias, dropout, windows, packing and rotation add registers."""

    LIGHT = "light"
    CAUSAL = "causal"
    LONG = "causal over many keys"
    PADDED = "causal and padded"
    HEAVY = "heavy"
    PACKED = "packed"
    ROTATED = "rotated"


Rows = dict[tuple[tuple[int, int], int], tuple[tuple[int, Tile], ...]]
"""Tiles by maximum padded head dimension, for each (compute capability, element size)."""

FORWARD: Rows = {
    (HOPPER, HALF): ((64, Tile(128, 128, 64, 8, 3)), (128, Tile(128, 128, 64, 8, 2)), (256, Tile(64, 64, 16, 8, 2))),
    (AMPERE, HALF): ((64, Tile(128, 64, 32, 4, 3)), (128, Tile(128, 32, 16, 8, 3)), (256, Tile(64, 32, 16, 8, 2))),
    (AMPERE, SINGLE): (
        (32, Tile(32, 64, 32, 4, 2)),
        (64, Tile(32, 32, 16, 4, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

FORWARD_CAUSAL: Rows = FORWARD | {
    (HOPPER, HALF): ((64, Tile(128, 64, 64, 4, 3)), (128, Tile(128, 128, 128, 8, 2)), (256, Tile(64, 64, 16, 8, 2)))
}
"""Half the warps reduce prologue and epilogue by more than the longer loop costs. At head dimension 128, one masked
block on the diagonal takes 736 instructions, two blocks of 64 keys take 888."""

FORWARD_LONG: Rows = FORWARD_CAUSAL | {(HOPPER, HALF): (FORWARD[HOPPER, HALF][0], *FORWARD_CAUSAL[HOPPER, HALF][1:])}
"""Many keys: the loop dominates."""

FORWARD_PADDED: Rows = FORWARD_CAUSAL | {(HOPPER, HALF): (FORWARD_CAUSAL[HOPPER, HALF][0], *FORWARD[HOPPER, HALF][1:])}
"""With a padding mask, a masked block of 128 keys spills."""

FORWARD_HEAVY: Rows = {
    (HOPPER, HALF): ((128, Tile(128, 64, 32, 8, 3)), (256, Tile(64, 32, 16, 8, 2))),
    (AMPERE, HALF): ((32, Tile(64, 64, 16, 4, 3)), (128, Tile(128, 32, 16, 8, 3)), (256, Tile(64, 32, 16, 8, 2))),
    (AMPERE, SINGLE): FORWARD[AMPERE, SINGLE],
}

QUERY_GRADIENT: Rows = {
    (HOPPER, HALF): ((128, Tile(128, 64, 64, 8, 3)), (256, Tile(32, 32, 16, 8, 2))),
    (AMPERE, HALF): ((64, Tile(64, 64, 32, 4, 2)), (128, Tile(64, 64, 32, 8, 2)), (256, Tile(32, 32, 16, 8, 2))),
    (AMPERE, SINGLE): ((64, Tile(32, 32, 32, 8, 2)), (128, Tile(32, 32, 16, 8, 2)), (256, Tile(16, 16, 16, 8, 1))),
}

QUERY_GRADIENT_HEAVY: Rows = {
    (HOPPER, HALF): ((64, Tile(128, 64, 32, 8, 3)), (128, Tile(128, 32, 32, 8, 2)), (256, Tile(16, 32, 16, 8, 2))),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 32, 4, 2)),
        (64, Tile(128, 32, 16, 8, 2)),
        (128, Tile(64, 64, 32, 8, 2)),
        (256, Tile(16, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): ((128, Tile(32, 32, 16, 8, 2)), (256, Tile(16, 16, 16, 8, 1))),
}

QUERY_GRADIENT_PACKED: Rows = QUERY_GRADIENT_HEAVY | {(AMPERE, SINGLE): QUERY_GRADIENT[AMPERE, SINGLE]}

KEY_GRADIENT: Rows = {
    (HOPPER, HALF): ((64, Tile(64, 128, 32, 8, 2)), (128, Tile(32, 128, 32, 8, 2)), (256, Tile(64, 32, 32, 8, 1))),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 32, 4, 2)),
        (64, Tile(32, 128, 16, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(32, 32, 16, 8, 1)),
    ),
    (AMPERE, SINGLE): ((128, Tile(16, 32, 16, 8, 2)), (256, Tile(16, 16, 16, 8, 1))),
}

KEY_GRADIENT_HEAVY: Rows = {
    (HOPPER, HALF): (
        (32, Tile(64, 128, 32, 8, 2)),
        (64, Tile(64, 64, 32, 8, 2)),
        (128, Tile(32, 64, 16, 8, 2)),
        (256, Tile(64, 32, 32, 8, 1)),
    ),
    (AMPERE, HALF): ((32, Tile(32, 64, 16, 4, 2)), (128, Tile(32, 64, 16, 8, 2)), (256, Tile(32, 32, 16, 8, 1))),
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

KEY_GRADIENT_ROTATED: Rows = KEY_GRADIENT | {(AMPERE, HALF): KEY_GRADIENT_HEAVY[AMPERE, HALF]}

BIAS_GRADIENT: Rows = {
    (HOPPER, HALF): ((64, Tile(32, 64, 32, 4, 1)), (128, Tile(32, 64, 32, 8, 1)), (256, Tile(32, 16, 16, 8, 1))),
    (AMPERE, HALF): ((64, Tile(32, 64, 32, 4, 1)), (128, Tile(16, 64, 16, 8, 1)), (256, Tile(32, 16, 16, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 32, 32, 8, 1)), (256, Tile(16, 16, 16, 8, 1))),
}

DECODE: Rows = {
    (AMPERE, HALF): ((128, Tile(16, 64, 64, 8, 2)), (256, Tile(16, 32, 32, 8, 2))),
    (AMPERE, SINGLE): ((64, Tile(16, 32, 32, 8, 2)), (256, Tile(16, 16, 16, 8, 1))),
}
"""The number of rows depends on the call: 16, 32 or 64."""

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
"""The short path supports only these head dimensions, with all keys in one tile."""

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
    (Kernel.KEY_GRADIENT, Body.ROTATED): KEY_GRADIENT_ROTATED,
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
"""A body without a table uses the table of a lighter body."""


def rows(kernel: Kernel, body: Body, capability: tuple[int, int], itemsize: int) -> tuple[tuple[int, Tile], ...]:
    """The table of a kernel's body for the newest capability up to the device's."""
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
    """The smallest tile that covers all keys of a head, or None."""
    fitting = (tile for width, tile in rows(kernel, body, capability, itemsize) if width == head_dim)
    return next((tile for tile in fitting if keys <= tile.keys), None)
