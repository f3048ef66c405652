"""Tables for tests: a tile that makes narrow rows take the road of wide ones."""

from __future__ import annotations

from transformer_kernels.backends.triton import RowTile, Table


def every_width(tile: RowTile) -> Table[RowTile]:
    """A table whose only tile serves all widths; rows wider than its columns are walked in blocks."""
    return Table("test", {((8, 0), itemsize): ((None, tile),) for itemsize in (2, 4)})
