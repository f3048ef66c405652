"""Reports of `patch` and `accelerate`: the backend of each module or call, or the reason why it was not replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEADINGS = ("module", "class", "computed by", "count")
CALL_HEADINGS = ("operation", "computed by", "calls")


@dataclass(frozen=True)
class Row:
    """One module: its name in the model, its class, the operation that computes it, or why it was not patched."""

    name: str
    kind: str
    operation: str | None
    reason: str | None = None


@dataclass(frozen=True)
class PatchReport:
    """A row for each module that `patch` considers. It prints as a table, equal layers on one line.

    Attributes:
        backend: the requested backend, None for the default at each call.
        rows: one `Row` for each module, in the model's order.
    """

    backend: str | None
    rows: tuple[Row, ...]

    @property
    def patched(self) -> tuple[Row, ...]:
        """The rows that an operation computes."""
        return tuple(row for row in self.rows if row.operation is not None)

    @property
    def left(self) -> tuple[Row, ...]:
        """The rows that were not patched."""
        return tuple(row for row in self.rows if row.operation is None)

    def __str__(self) -> str:
        summary = f"{len(self.patched)} modules patched, {len(self.left)} not patched; {_named(self.backend)}"
        return _table(HEADINGS, self._lines(), summary)

    def _lines(self) -> Iterator[tuple[str, str, str, str]]:
        counts: dict[tuple[str, str, str], int] = {}
        for row in self.rows:
            name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name) or "(the model)"
            key = (name, row.kind, row.operation or f"not patched: {row.reason}")
            counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            yield (*key, str(count))


class CallRow(NamedTuple):
    """Calls of one function of torch: how many, and the backend that computed them or the reason why none did."""

    operation: str
    backend: str | None
    reason: str | None
    calls: int = 0


@dataclass(frozen=True)
class CallReport:
    """The calls in a block of `accelerate`. It prints as a table.

    Attributes:
        backend: the requested backend, None for the default at each call.
        rows: one `CallRow` for each operation, backend and reason; the rerouted ones first.
    """

    backend: str | None
    rows: tuple[CallRow, ...]

    @property
    def rerouted(self) -> tuple[CallRow, ...]:
        """The rows that this package computed."""
        return tuple(row for row in self.rows if row.backend is not None)

    @property
    def left(self) -> tuple[CallRow, ...]:
        """The rows that PyTorch computed."""
        return tuple(row for row in self.rows if row.backend is None)

    def __str__(self) -> str:
        lines = [(row.operation, row.backend or f"PyTorch: {row.reason}", f"{row.calls:,}") for row in self.rows]
        return _table(CALL_HEADINGS, lines, f"{self._totals()}; {_named(self.backend)}")

    def line(self) -> str:
        """The report on one line."""
        groups = [f"{row.operation} {row.calls:,} ({row.backend or row.reason})" for row in self.rows]
        return f"{self._totals()}" + (": " if groups else "") + ", ".join(groups)

    def _totals(self) -> str:
        rerouted, left = (sum(row.calls for row in rows) for rows in (self.rerouted, self.left))
        return f"{rerouted:,} calls rerouted, {left:,} left to PyTorch"


def _named(backend: str | None) -> str:
    return "the default backend" if backend is None else f"backend {backend!r}"


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]], summary: str) -> str:
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([table[0], "-" * max(map(len, table)), *table[1:], summary])
