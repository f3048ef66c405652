"""Tile sizes of the Triton row kernels: one rule for each loop structure, and tuned exceptions.

The rules give a thread about 16 elements: two to four 16-byte loads per input in flight. `TUNED` has exceptions with
the measurement or compiler report that justifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Capability, Launch, ceil_div, next_power_of_2

ELEMENTS = 2048
"""Elements of a tile on four warps."""

MAX_ROW = 2**31 - 1 - 2**16
"""Kernels index the columns of a row in 32 bits, up to the end of the last block."""


@dataclass(frozen=True)
class RowTile:
    """The tile of one program of a row kernel: `rows` x `columns` elements on `num_warps` warps.

    If `columns` is at least the width, a row is read once into registers; otherwise the kernel loops over blocks of
    `columns`. `num_stages`: tiles of a persistent loop in flight. `programs`: persistent programs per multiprocessor.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1
    programs: int = 1

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of tiles that cover so many rows and columns."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns)

    def shares(self, rows: int, device: torch.device, blocks: int = 1) -> int:
        """The number of persistent programs that share the rows, of each of so many blocks of columns."""
        programs = ceil_div(self.programs * _triton.multiprocessors(device), blocks)
        return min(ceil_div(rows, self.rows), programs)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float | None, ...], constants: tuple[Any, ...]
    ) -> Launch:
        """A launch whose last constants are the rows and columns of the tile."""
        return Launch(kernel, grid, numbers, (*constants, self.rows, self.columns), self.num_warps, self.num_stages)

    def launch_rows(
        self, kernels: tuple[Any, Any], numbers: tuple[float | None, ...], constants: tuple[Any, ...]
    ) -> Launch:
        """A launch over M rows of N columns, the first two numbers, by the kernel whose tiles hold whole rows, or, if
        a tile is narrower, by the second one, whose programs loop over a row."""
        M, N = int(numbers[0] or 0), int(numbers[1] or 0)
        if self.columns < N:
            return Launch(kernels[1], (M,), numbers, (*constants, self.columns), self.num_warps)
        return self.launch(kernels[0], (ceil_div(M, self.rows),), numbers, constants)


Rule = Callable[[int, int, int], RowTile]
"""The tile for (columns, itemsize, widest); columns are a power of two; above `widest`: any larger width."""


def whole_rows(columns: int, itemsize: int, widest: int) -> RowTile:
    """Whole rows in registers; for wider rows blocks of 16 KiB on 16 warps."""
    if columns > widest:
        return RowTile(1, 16384 // itemsize, 16)
    return RowTile(max(1, ELEMENTS // columns), columns, min(32, max(4, columns // 512)))


def persistent_rows(columns: int, itemsize: int, widest: int) -> RowTile:
    """Whole rows in persistent programs that prefetch the next tile, 16 warps per multiprocessor."""
    tile = whole_rows(columns, itemsize, widest)
    if columns > widest:
        return tile
    if columns * itemsize > 16384:  # three stages of two rows exceed shared memory
        return replace(tile, num_warps=32)
    return replace(tile, num_stages=3, programs=max(1, 16 // tile.num_warps))


def column_blocks(columns: int, itemsize: int, widest: int) -> RowTile:
    """Rows split into blocks of up to 512 columns."""
    columns = min(columns, 512)
    return RowTile(ELEMENTS // columns, columns, 4)


def persistent_blocks(columns: int, itemsize: int, widest: int) -> RowTile:
    """`column_blocks` in persistent programs that loop over rows and prefetch."""
    return replace(column_blocks(columns, itemsize, widest), num_stages=3, programs=4)


def flat(columns: int, itemsize: int, widest: int) -> RowTile:
    """Flat elements: two 16-byte loads per input and thread."""
    return RowTile(1, 4096 // itemsize, 4)


@dataclass(frozen=True)
class Tiles:
    """The tiles of one kernel: from `TUNED`, or by `rule`, for widths from `narrowest` to `widest` and above."""

    name: str
    rule: Rule
    widest: int
    narrowest: int = 32
    _found: dict[tuple[Capability, int, int], RowTile] = field(default_factory=dict, compare=False, repr=False)

    def find(self, capability: Capability, itemsize: int, width: int) -> RowTile:
        """The tile for rows of `width` elements of `itemsize` bytes on a device.

        Raises:
            ValueError: rows longer than MAX_ROW, which does not apply to `flat`.
        """
        if width > MAX_ROW and self.rule is not flat:
            raise ValueError(f"the triton backend supports rows of up to {MAX_ROW} elements; got {width}")
        key = capability, itemsize, min(max(next_power_of_2(width), self.narrowest), 2 * self.widest)
        tile = self._found.get(key)
        if tile is None:
            tile = self._found[key] = self._choose(*key)
        return tile

    def of_rows(self, x: Tensor) -> tuple[RowTile, int, int]:
        """The tile for the rows of a tensor (..., N) on its device, their number and N."""
        N = x.shape[-1]
        return self.find(_triton.capability(x.device), x.element_size(), N), x.numel() // N, N

    def _choose(self, capability: Capability, itemsize: int, columns: int) -> RowTile:
        """The tuned tile for the newest capability up to the device's, or the rule's."""
        known = sorted(key[1] for key in TUNED if key[0] == self.name and key[2:] == (itemsize, columns))
        if older := [measured for measured in known if measured <= capability]:
            return TUNED[self.name, older[-1], itemsize, columns][0]
        return self.rule(columns, itemsize, self.widest)

    def widths(self) -> list[int]:
        """One width for each possible tile, the last above `widest`."""
        widths = [self.narrowest]
        while widths[-1] <= self.widest:
            widths.append(2 * widths[-1])
        return widths


# Written by benchmarks/tune_triton.py, which replaces all that follows.
TUNED: dict[tuple[str, Capability, int, int], tuple[RowTile, str]] = {
    ("cross_entropy forward", (8, 0), 2, 32768): (
        RowTile(rows=1, columns=8192, num_warps=32),
        "ptxas: on 16 warps the walk that writes the gradient spills 2 registers",
    ),
    ("cross_entropy forward", (9, 0), 4, 8192): (
        RowTile(rows=1, columns=8192, num_warps=32),
        "ptxas: on 16 warps rows that are padded spill 2 registers where the gradient is written",
    ),
    ("embedding backward", (8, 0), 2, 1024): (
        RowTile(rows=2, columns=1024, num_warps=8, num_stages=3, programs=2),
        "ptxas: on four warps fp16 spills 2 registers on sm_90",
    ),
    ("embedding backward", (8, 0), 4, 64): (
        RowTile(rows=16, columns=64, num_warps=4, num_stages=3, programs=4),
        "ptxas: on 32 rows LayerNorm's gradient spills 2 registers on sm_80",
    ),
    ("embedding backward", (8, 0), 4, 4096): (
        RowTile(rows=1, columns=4096, num_warps=16, num_stages=2),
        "ptxas: three stages are more than 99 KiB",
    ),
    ("layer_norm backward", (8, 0), 2, 512): (
        RowTile(rows=4, columns=512, num_warps=8, num_stages=3, programs=2),
        "ptxas: on four warps fp16 with dropout spills 3 to 5 registers on sm_90",
    ),
    ("layer_norm backward", (8, 0), 2, 8192): (
        RowTile(rows=1, columns=8192, num_warps=32, num_stages=3),
        "ptxas: on 16 warps fp16 with dropout spills 2 registers on sm_90",
    ),
    ("layer_norm backward", (8, 0), 4, 4096): (
        RowTile(rows=1, columns=4096, num_warps=16, num_stages=2),
        "ptxas: three stages are more than 99 KiB; on 8 warps RMSNorm's spills 6 registers on sm_80",
    ),
}
"""Tiles by (name, capability, itemsize, columns), each with its measurement."""
