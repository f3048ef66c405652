"""Charts and texts for a terminal: curves in block characters, bars, two texts side by side."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"
LOWER, BETWEEN = "█", "░"
BAR = 40


def can_draw() -> bool:
    """Whether standard output can encode block characters."""
    try:
        (EIGHTHS + BETWEEN).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(value: float, largest: float) -> str:
    """A bar of up to 40 characters; empty for NaN."""
    return ("█" if can_draw() else "#") * max(1, round(BAR * value / largest)) if value == value else ""


def means(points: Sequence[tuple[float, float]], end: float, columns: int) -> list[float]:
    """The mean value in each of `columns` equal parts of the time from 0 to `end`; an empty part repeats the last."""
    parts: list[list[float]] = [[] for _ in range(columns)]
    for time, value in points:
        parts[min(columns - 1, int(columns * time / end))].append(value)
    first = next((part for part in parts if part), [math.nan])
    filled = itertools.accumulate(parts, lambda before, part: part or before, initial=first)
    return [statistics.fmean(part) for part in itertools.islice(filled, 1, None)]


def curves(lower: Sequence[float], upper: Sequence[float], rows: int = 8) -> list[str]:
    """Two curves as one chart: full blocks up to `lower`, light shade from there to `upper`, a label at each row."""
    lowest, highest = min([*lower, *upper]), max([*lower, *upper])
    span = highest - lowest or 1.0
    blocks = can_draw()
    edge = "│" if blocks else "|"
    lines = []
    for row in range(rows, 0, -1):
        cells = []
        for below, above in zip(lower, upper, strict=True):
            filled, shaded = (rows * (value - lowest) / span - (row - 1) for value in (below, above))
            eighth = min(8, max(0, round(8 * filled)))
            if eighth or shaded < 0.5:
                cells.append(EIGHTHS[eighth] if blocks else " #"[eighth >= 4])
            else:
                cells.append(BETWEEN if blocks else ".")
        lines.append(f"{lowest + span * (row - 0.5) / rows:6.2f} {edge}{''.join(cells).rstrip()}")
    return lines


def beside(left: str, right: str, width: int, rows: int) -> list[str]:
    """The first lines of two texts in two columns of `width` characters; long lines are wrapped."""
    columns = []
    for text in (left, right):
        wrapped = [textwrap.wrap(line, width) or [""] for line in text.split("\n")]
        columns.append(list(itertools.chain.from_iterable(wrapped))[:rows])
    mark = "│" if can_draw() else "|"
    pairs = itertools.zip_longest(*columns, fillvalue="")
    return [f"{one:<{width}} {mark} {other}".rstrip() for one, other in pairs]
