"""What `patch` tells: for each module what answers it now, or why it was left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HEADINGS = ("module", "class", "answered by", "count")


@dataclass(frozen=True)
class Row:
    """One module: its name in the model, its class, the operation that answers it, or why it was left."""

    name: str
    kind: str
    answered: str | None
    reason: str | None = None


@dataclass(frozen=True)
class PatchReport:
    """What became of each module that `patch` knows. It prints as a table, equal layers on one line.

    Attributes:
        backend: the backend that was asked for, None for the default at each call.
        rows: one `Row` for each module, in the model's order.
    """

    backend: str | None
    rows: tuple[Row, ...]

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows that an operation answers."""
        return tuple(row for row in self.rows if row.answered is not None)

    @property
    def left(self) -> tuple[Row, ...]:
        """The rows that stayed as they were."""
        return tuple(row for row in self.rows if row.answered is None)

    def __str__(self) -> str:
        lines = [HEADINGS, *self._lines()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        backend = "the default backend" if self.backend is None else f"backend {self.backend!r}"
        summary = f"{len(self.patched)} modules patched, {len(self.left)} left; {backend}"
        return "\n".join([table[0], "-" * max(map(len, table)), *table[1:], summary])

    def _lines(self) -> Iterator[tuple[str, str, str, str]]:
        counts: dict[tuple[str, str, str], int] = {}
        for row in self.rows:
            name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name) or "(the model)"
            key = (name, row.kind, row.answered or f"left: {row.reason}")
            counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            yield (*key, str(count))
