"""A record as one Markdown page: tables, fits, figures, and skipped rows with reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Row, identity
from benchmarks.results import Growth, against_headline, against_peers, growth, timed
from benchmarks.steps import HEADLINE

LINEAR = 1.15
"""Maximum memory exponent considered linear: small tensors affect the fit."""


def report(rows: Sequence[Row], pictures: Iterable[Path] = (), tests: dict[str, Any] | None = None) -> str:
    """The page; figures are linked as given."""
    from benchmarks.plots import caption  # imports matplotlib

    if not timed(rows):
        return "# Benchmarks\n\nNothing has been timed.\n"
    sections = [
        f"# Benchmarks\n\n{caption(timed(rows))}",
        _how(rows),
        *(f"![{path.stem}]({path.as_posix()})" for path in pictures if path.suffix == ".png"),
        _tests(tests),
        _against_peers(rows),
        _fastest(rows),
        *(_operation_table(rows, op) for op in dict.fromkeys(row["op"] for row in timed(rows, "operation"))),
        _steps(rows),
        _calls(rows),
        growth_text(growth(rows)),
        _without_time(rows),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:" for _ in head[1:]]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def _how(rows: Sequence[Row]) -> str:
    limits = [row for row in rows if row["kind"] == "limit"]
    text = (
        "Medians; the spread is the interquartile range. Every candidate matched `python_ref` in float64 before it was "
        "timed. Input sets and outputs rotate, so that none is in the cache. The fraction is the least time that the "
        "bytes and FLOPs can take on this device, divided by the measured time; work that fits in the cache has no "
        "fraction of the memory bandwidth."
    )
    if limits:
        newest = max(limits, key=lambda row: row["date"])
        products = ", ".join(f"{dtype} {rate / 1e12:,.3g} TFLOP/s" for dtype, rate in newest["compute"].items())
        text += f" Limits measured in the run: memory {newest['memory'] / 1e9:,.0f} GB/s; multiplications {products}."
        text += " On a CPU the copy includes the read that allocates a line before its write."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _tests(tests: dict[str, Any] | None) -> str:
    if not tests:
        return ""
    counts = ", ".join(f"{tests.get(outcome, 0)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    failures = "".join(f"\n- `{name}`" for name, _ in tests["failures"])
    return f"## Tests on the device\n\n{counts}{failures}"


def _operation_table(rows: Sequence[Row], op: str) -> str:
    found = [row for row in timed(rows, "operation") if row["op"] == op]
    ratios = against_peers(found)
    lines = []
    for row in sorted(found, key=_place):
        rate = f"{row['tflops']:.2f} TFLOP/s" if op == "attention" else f"{row['gbps']:,.0f} GB/s"
        fraction = f"{row['fraction']:.0%} {row['bound']}" if "fraction" in row else ""
        lines.append(
            (
                f"{row['case']} {row['direction']} {row['dtype']} {_sizes(row)}",
                row["candidate"],
                microseconds(row["seconds"]),
                f"{row['spread']:.0%}",
                f"{ratios[identity(row)]:.2f}" if identity(row) in ratios else "",
                rate,
                fraction,
                mebibytes(row.get("peak_memory")),
            )
        )
    head = (
        "workload",
        "candidate",
        "median us",
        "spread",
        "speedup over the fastest peer",
        "rate",
        "of the limit",
        "memory MiB",
    )
    return f"## {op}\n\n{_table(head, lines)}"


def _place(row: Row) -> tuple[Any, ...]:
    return row["case"], row["direction"], row["dtype"], row["shape"].get(row.get("axis", "L"), 0), row["candidate"]


def _sizes(row: Row) -> str:
    return " ".join(f"{name}{size}" for name, size in row["shape"].items())


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-2 else f"{seconds * 1e6:,.0f}"


def mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f}"


def _against_peers(rows: Sequence[Row]) -> str:
    """The speedup of each of our backends over the fastest peer, over the workloads of a kind."""
    ratios = against_peers(rows)
    kinds: dict[tuple[str, ...], list[float]] = {}
    for row in timed(rows, "operation"):
        if identity(row) in ratios:
            name = f"{row['op']} {row['case']}" if row["op"] == "attention" else row["op"]
            kinds.setdefault((name, row["direction"], row["dtype"], row["candidate"]), []).append(ratios[identity(row)])
    if not kinds:
        return ""
    lines = [
        (*kind, str(len(values)), f"{min(values):.2f}", f"{median(values):.2f}", f"{max(values):.2f}")
        for kind, values in kinds.items()
    ]
    head = ("operation", "direction", "dtype", "candidate", "workloads", "minimum", "median", "maximum")
    return f"## Speedup over the fastest peer\n\n{_table(head, lines)}"


def _fastest(rows: Sequence[Row]) -> str:
    """How often each of our backends is the fastest of ours, which suggests the order of `auto`."""
    best: dict[tuple[str, ...], Row] = {}
    for row in timed(rows, "operation"):
        if row["candidate"].startswith("ours"):
            key = (row["op"], row["case"], row["direction"], row["dtype"], _sizes(row))
            if key not in best or row["seconds"] < best[key]["seconds"]:
                best[key] = row
    counts: dict[str, dict[str, int]] = {}
    for row in best.values():
        wins = counts.setdefault(row["op"], {})
        wins[row["candidate"]] = wins.get(row["candidate"], 0) + 1
    names = sorted({name for wins in counts.values() for name in wins})
    if len(names) < 2:
        return ""
    lines = [(op, *(str(wins.get(name, 0)) for name in names)) for op, wins in counts.items()]
    return f"## Fastest of ours, number of workloads\n\n{_table(('operation', *names), lines)}"


def _steps(rows: Sequence[Row]) -> str:
    found = timed(rows, "step")
    if not found:
        return ""
    lines = [
        (
            f"{row['op']}{row['case'].removeprefix('training step')} {_sizes(row)}",
            row["candidate"],
            f"{row['seconds'] * 1e3:,.2f}",
            f"{row['spread']:.0%}",
            f"{row['tokens_per_second']:,.0f}",
            "" if (ratio := against_headline(row, found)) is None else f"{ratio:.2f}",
            f"{row['tflops']:.2f}",
            f"{row['fraction']:.0%}" if "fraction" in row else "",
            mebibytes(row.get("peak_memory")),
        )
        for row in sorted(found, key=lambda row: (row["op"], row["shape"]["L"], row["shape"]["B"]))
    ]
    head = ("step", "configuration", "median ms", "spread", "tokens/s", f"speedup over {HEADLINE}")
    head += ("model TFLOP/s", "of the limit", "memory MiB")
    return f"## Training steps\n\n{_table(head, lines)}"


def _calls(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in timed(rows, "call"):
        found.setdefault((row["op"], row["candidate"]), {})[row["direction"]] = f"{row['seconds'] * 1e6:.1f}"
    if not found:
        return ""
    routes = ("raw", "recorded", "there and back")
    lines = [(op, candidate, *(times.get(route, "") for route in routes)) for (op, candidate), times in found.items()]
    head = ("call", "candidate", "no gradients", "forward with gradients", "forward + backward")
    return f"## Host time per call, in microseconds\n\n{_table(head, lines)}"


def growth_text(fits: Sequence[Growth]) -> str:
    """The fits as a table, and whether our memory is linear."""
    if not fits:
        return ""
    lines = []
    for fit in fits:
        memory = fit.memory_exponent
        judged = "" if memory is None else f"{memory:.2f}"
        if memory is not None and fit.candidate.startswith("ours"):
            judged += " linear" if memory <= LINEAR else " NOT LINEAR"
        lines.append((f"{fit.case} {fit.direction} {fit.dtype}", fit.candidate, f"{fit.time_exponent:.2f}", judged))
    head = ("sweep", "candidate", "time grows as length^", "memory grows as length^")
    return f"## Growth of attention with the length of a sequence\n\n{_table(head, lines)}"


def _without_time(rows: Sequence[Row]) -> str:
    lines: dict[tuple[str, ...], int] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["op"], row["candidate"], row["status"], " ".join(row["reason"].split()).replace("|", "/"))
            lines[key] = lines.get(key, 0) + 1
    if not lines:
        return ""
    table = _table(
        ("operation", "candidate", "rows", "reason"), [(a, b, str(n), f"{c}: {d}") for (a, b, c, d), n in lines.items()]
    )
    return f"## Rows without a time\n\n{table}"
