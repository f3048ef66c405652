"""Matches of the graph route in a program, and where the time of its forward pass goes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from transformer_kernels.patching._report import _table
from transformer_kernels.patching.graph._rewrite import Outcome

HEADINGS = ("operation", "computed by", "count")


class GraphRow(NamedTuple):
    """Operations of one kind: how many this package computes, or why PyTorch does."""

    operation: str
    reason: str | None
    operations: int


@dataclass(frozen=True)
class GraphReport:
    """Matches in the graphs that PyTorch compiled. It prints as a table.

    Attributes:
        graphs: how many graphs there are; a program in one piece has one for inference and one for training.
        rows: one `GraphRow` for each operation and reason; operations of this package first.
        breaks: why the program was cut into several graphs.
    """

    graphs: int
    rows: tuple[GraphRow, ...]
    breaks: tuple[str, ...] = ()

    @property
    def matched(self) -> dict[str, int]:
        """How many of each operation this package computes."""
        return {row.operation: row.operations for row in self.rows if row.reason is None}

    @property
    def left(self) -> tuple[GraphRow, ...]:
        """The rows that PyTorch computes."""
        return tuple(row for row in self.rows if row.reason is not None)

    def __str__(self) -> str:
        lines = [
            (
                row.operation,
                "transformer_kernels" if row.reason is None else f"PyTorch: {row.reason}",
                str(row.operations),
            )
            for row in self.rows
        ]
        return _table(HEADINGS, lines, self.line())

    def line(self) -> str:
        """The totals in one line."""
        matched, left = sum(self.matched.values()), sum(row.operations for row in self.left)
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        return f"{matched} operations replaced, {left} left to PyTorch; {graphs}"


def report_of(outcomes: list[Outcome]) -> GraphReport:
    """The report of several graphs."""
    matched: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        matched.update(outcome.matched)
        left.update((operation, reason) for (operation, _), reason in outcome.left.items())
    rows = [GraphRow(operation, None, count) for operation, count in sorted(matched.items())]
    rows += [GraphRow(operation, reason, count) for (operation, reason), count in sorted(left.items())]
    return GraphReport(len(outcomes), tuple(rows))


@dataclass(frozen=True)
class Shares:
    """Where the time of one forward pass went, in seconds by operation. It prints as a sentence.

    Attributes:
        ours: operations of this package.
        rest: PyTorch's.
    """

    ours: dict[str, float]
    rest: dict[str, float]

    @property
    def share(self) -> float:
        """The part of the time that this package's operations took, in [0, 1]."""
        ours, rest = sum(self.ours.values()), sum(self.rest.values())
        return ours / (ours + rest) if ours + rest else 0.0

    def __str__(self) -> str:
        text = f"{self.share:.0%} of the forward pass runs on these kernels"
        if not self.rest:
            return text
        name, seconds = max(self.rest.items(), key=lambda item: item[1])
        return f"{text}; the largest rest: {name}, {seconds / sum([*self.ours.values(), *self.rest.values()]):.0%}"


class Timed(fx.Interpreter):
    """Runs a graph node by node and adds up the time of this thread by operation."""

    def __init__(self, module: fx.GraphModule, ours: dict[str, float], rest: dict[str, float]) -> None:
        super().__init__(module)
        self._ours, self._rest = ours, rest

    def run_node(self, n: fx.Node) -> Any:
        start = time.thread_time()
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module"):
            name = getattr(n.target, "__name__", str(n.target))
            own = str(getattr(n.target, "__module__", "")).startswith("transformer_kernels")
            name = n.name.rstrip("0123456789").rstrip("_") if own else name
            (self._ours if own else self._rest)[name] += time.thread_time() - start
        return result


def timed(modules: list[fx.GraphModule], run: Callable[[], Any], switch: dict[str, Any]) -> Shares:
    """The shares of one call of `run`, whose graphs look up how to run in `switch`."""
    ours: dict[str, float] = defaultdict(float)
    rest: dict[str, float] = defaultdict(float)
    switch["run"] = lambda module, *arguments: Timed(module, ours, rest).run(*arguments)
    try:
        run()
    finally:
        switch.pop("run")
    return Shares(dict(ours), dict(rest))
