"""Writes the order of the backends on a GPU from its record: which one `auto` asks first for each operation.

    python -m benchmarks.order benchmarks/results/<gpu>

An operation is listed where the median of its workloads is faster by a twentieth in another backend than the usual
first one, and every dtype that was timed has a complete verdict without a failed test there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import identity
from benchmarks.results import KERNELS
from benchmarks.runner import ENVIRONMENT, ROWS, read_lines
from transformer_kernels.backends import _order, dispatch

MIN_GAIN = 1.05
FIRST, *OTHERS = dispatch.AUTO_ORDER["cuda"][:-1]
"""The usual first backend of a GPU, and the other kernels; the last is PyTorch's."""


def fastest(rows: Iterable[dict[str, Any]], verdicts: Iterable[dict[str, Any]]) -> dict[str, str]:
    """By operation, the backend that is faster than the usual first one, verified in all dtypes that were timed."""
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    dtypes: dict[str, set[str]] = {}
    for row in rows:
        if row["kind"] == "operation" and row["status"] == "ok" and row["candidate"].startswith("ours "):
            backend, workload = row["candidate"].removeprefix("ours "), identity(row | {"candidate": ""})
            seconds.setdefault(row["op"], {}).setdefault(backend, {})[workload] = row["seconds"]
            dtypes.setdefault(row["op"], set()).add(row["dtype"])
    last = {(verdict["kernel"], verdict["dtype"]): verdict for verdict in verdicts}  # a record has the newest last
    verified = {key for key, verdict in last.items() if verdict["complete"] and not verdict["failed"]}
    found = {}
    for op, by_backend in seconds.items():
        gains = {}
        for backend in OTHERS:
            usual, other = by_backend.get(FIRST, {}), by_backend.get(backend, {})
            if usual.keys() & other.keys() and all((f"{op}/{backend}", dtype) in verified for dtype in dtypes[op]):
                gains[backend] = statistics.median(usual[key] / other[key] for key in usual.keys() & other.keys())
        best = max(gains, key=gains.__getitem__, default=None)
        if best is not None and gains[best] >= MIN_GAIN:
            found[op] = best
    return dict(sorted(found.items()))


def write(path: Path, measured: dict[tuple[int, int], dict[str, str]]) -> None:
    """Replace the table at the end of the file."""
    head, sign, _ = path.read_text().partition("MEASURED: dict[Capability, dict[str, str]] = ")
    lines = [f"    {capability}: {json.dumps(found)},\n" for capability, found in sorted(measured.items())]
    path.write_text(head + sign + ("{\n" + "".join(lines) + "}\n" if lines else "{}\n"))


def main(arguments: list[str] | None = None) -> int:
    """Write the table; 1 if the record is not of a GPU."""
    parser = argparse.ArgumentParser("python -m benchmarks.order", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--file", type=Path, default=Path(_order.__file__), help="the table (default: the package's)")
    chosen = parser.parse_args(arguments)
    described = json.loads((chosen.record / ENVIRONMENT).read_text())
    if not described.get("capability"):
        print(f"{chosen.record} is not the record of a GPU")
        return 1
    found = fastest(read_lines(chosen.record / ROWS), json.loads((chosen.record / KERNELS).read_text()))
    write(chosen.file, _order.MEASURED | {tuple(described["capability"]): found})
    print(found or f"{FIRST} stays first for every operation")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
