"""Triton attention: which tile each kernel runs with, in static tables.

Chosen from the machine code, without a GPU at hand: no spills, at least eight warps on a multiprocessor, and tiles that
fill the matrix instructions. A table is named after its kernel; with a bias, dropout or a window, whose bodies
need more registers, a call looks into the table "<name> heavy"; so it does with packed sequences, except for the key
gradient, which has a table of its own then.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformer_kernels.backends.triton import Table

AMPERE, HOPPER = (8, 0), (9, 0)
HALF, SINGLE = 2, 4
"""Element sizes in bytes."""

MAXIMUM_HEAD_DIM = 256

SHORT_QUERIES = 256
SHORT_HEAD_DIMS = (32, 64)
"""The short-sequence path takes these padded head dimensions, and as many keys as its tables have tiles for."""

DECODE_QUERIES = 16
DECODE_MINIMUM_KEYS = 512
DECODE_MAXIMUM_ROWS = 64
"""The decode path takes up to 16 queries, 64 rows with all query heads of a group, that face at least 512 keys."""

MAXIMUM_SPLITS = 64
"""Most parts that the keys of a decode step, or the tiles of a bias gradient, are shared out in."""

COMBINED_SPLITS = 16
"""Parts of a decode step that the combining kernel reads at a time."""

DESCRIPTOR_HEAD_DIMS = (64, 128)
DESCRIPTOR_PADDED_HEAD_DIMS = (64,)
DESCRIPTOR_MINIMUM_QUERIES = 1024
"""Tensor descriptors cost the host some microseconds each, which shorter sequences do not win back. At head dimension
128 the branch around blocks of padding spills beside them."""

SEQUENCES_TOKENS = 256
"""Tokens whose sequence one program finds."""

L2_BYTES = 16 << 20
"""What heads that run side by side may keep in the L2 cache: less than half of an A100's or an H100's."""


@dataclass(frozen=True)
class Tile:
    """A launch configuration: queries and keys of a tile, and of a tile of the loop that masks, which is cut finer
    along the axis that is walked over, both because its body needs more registers and to hug the diagonal."""

    queries: int
    keys: int
    masked: int
    num_warps: int
    num_stages: int


Rows = dict[tuple[tuple[int, int], int], tuple[tuple[int | None, Tile], ...]]

FORWARD: Rows = {
    (HOPPER, HALF): (
        (64, Tile(128, 128, 32, 8, 3)),
        (128, Tile(128, 64, 32, 8, 3)),
        (256, Tile(64, 64, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (64, Tile(128, 64, 16, 4, 3)),
        (128, Tile(128, 32, 16, 8, 3)),
        (256, Tile(64, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): (
        (64, Tile(32, 32, 16, 4, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

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

FORWARD_DESCRIPTORS: Rows = {
    (HOPPER, HALF): (
        (64, Tile(128, 64, 64, 8, 3)),
        (128, Tile(128, 64, 64, 8, 3)),
    ),
}
"""K and V have one descriptor each, so both loops cut them alike."""

QUERY_GRADIENT: Rows = {
    (HOPPER, HALF): (
        (128, Tile(128, 64, 32, 8, 3)),
        (256, Tile(32, 32, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (64, Tile(64, 64, 32, 4, 2)),
        (128, Tile(64, 64, 32, 8, 2)),
        (256, Tile(32, 32, 16, 4, 2)),
    ),
    (AMPERE, SINGLE): (
        (64, Tile(32, 32, 16, 8, 2)),
        (128, Tile(32, 32, 16, 8, 2)),
        (256, Tile(16, 16, 16, 8, 1)),
    ),
}

QUERY_GRADIENT_HEAVY: Rows = {
    (HOPPER, HALF): (
        (64, Tile(128, 64, 32, 8, 3)),
        (128, Tile(128, 32, 16, 8, 2)),
        (256, Tile(16, 32, 16, 8, 2)),
    ),
    (AMPERE, HALF): (
        (32, Tile(64, 64, 32, 4, 2)),
        (64, Tile(128, 32, 16, 8, 2)),
        (128, Tile(64, 64, 32, 8, 2)),
        (256, Tile(16, 32, 16, 8, 2)),
    ),
    (AMPERE, SINGLE): QUERY_GRADIENT[AMPERE, SINGLE],
}

KEY_GRADIENT: Rows = {
    (HOPPER, HALF): (
        (64, Tile(64, 128, 32, 8, 2)),
        (128, Tile(32, 128, 16, 8, 2)),
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

SHORT_FORWARD_32: Rows = {
    (HOPPER, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(64, 128, 128, 4, 1)), (256, Tile(64, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 4, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}
"""Here the width is the number of keys, and the head dimension stands in the name."""

SHORT_FORWARD_32_HEAVY: Rows = {
    (HOPPER, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(64, 128, 128, 4, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(16, 128, 128, 4, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

SHORT_FORWARD_64: Rows = {
    (HOPPER, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(64, 128, 128, 4, 1)), (256, Tile(32, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 4, 1)), (256, Tile(32, 256, 256, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

SHORT_FORWARD_64_HEAVY: Rows = {
    (HOPPER, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(64, 128, 128, 8, 1)), (256, Tile(32, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(64, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 4, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

SHORT_BACKWARD_32: Rows = {
    (HOPPER, HALF): ((64, Tile(32, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 8, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(32, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

SHORT_BACKWARD_32_HEAVY: Rows = {**SHORT_BACKWARD_32, (AMPERE, SINGLE): ()}

SHORT_BACKWARD_64: Rows = {
    (HOPPER, HALF): ((64, Tile(32, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 8, 1)), (256, Tile(16, 256, 256, 8, 1))),
    (AMPERE, HALF): ((64, Tile(32, 64, 64, 4, 1)), (128, Tile(16, 128, 128, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

SHORT_BACKWARD_64_HEAVY: Rows = {
    (HOPPER, HALF): ((64, Tile(32, 64, 64, 4, 1)), (128, Tile(32, 128, 128, 8, 1))),
    (AMPERE, HALF): ((64, Tile(16, 64, 64, 4, 1)), (128, Tile(16, 128, 128, 8, 1))),
    (AMPERE, SINGLE): ((64, Tile(16, 64, 64, 8, 1)),),
}

TABLES: dict[str, Table[Tile]] = {
    name: Table(f"attention {name}", rows)
    for name, rows in {
        "forward": FORWARD,
        "forward heavy": FORWARD_HEAVY,
        "forward descriptors": FORWARD_DESCRIPTORS,
        "query gradient": QUERY_GRADIENT,
        "query gradient heavy": QUERY_GRADIENT_HEAVY,
        "key gradient": KEY_GRADIENT,
        "key gradient heavy": KEY_GRADIENT_HEAVY,
        "key gradient packed": KEY_GRADIENT_PACKED,
        "bias gradient": BIAS_GRADIENT,
        "decode": DECODE,
        "short forward 32": SHORT_FORWARD_32,
        "short forward 32 heavy": SHORT_FORWARD_32_HEAVY,
        "short forward 64": SHORT_FORWARD_64,
        "short forward 64 heavy": SHORT_FORWARD_64_HEAVY,
        "short backward 32": SHORT_BACKWARD_32,
        "short backward 32 heavy": SHORT_BACKWARD_32_HEAVY,
        "short backward 64": SHORT_BACKWARD_64,
        "short backward 64 heavy": SHORT_BACKWARD_64_HEAVY,
    }.items()
}
