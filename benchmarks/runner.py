"""Runs a plan within a time budget and writes every finished row to disk immediately.

A worker process measures and appends rows; a supervisor monitors it. If a worker dies or hangs, its current row records
that, and a new worker continues: a faulty kernel costs one row, not the record.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, timing
from benchmarks.measure import DEVICE_LOST, SAMPLES, Bench, Row, identity, is_device_lost
from benchmarks.plan import PARTS, Task, chosen, plan

ROWS = "rows.jsonl"
ENVIRONMENT = "environment.json"
MAX_TASK_SECONDS = 150.0
"""Seconds after which a task counts as hung, unless given."""
SECONDS_PER_ROW = {"cuda": 0.1, "cpu": 0.2}


class Budget:
    """The remaining seconds of a time budget; `clock` is monotonic."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def share(self, fraction: float, at_most: float = float("inf")) -> float:
        """A fraction of the remaining time."""
        return min(fraction * self.left(), at_most)


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line and flush it to disk."""
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file; an incomplete last line is dropped."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def work(
    tasks: Iterable[Task],
    bench: Bench,
    budget: Budget,
    path: Path,
    started: Callable[[Task], None] = lambda task: None,
    known: Iterable[Row] = (),
) -> int:
    """Measure the tasks that have no row yet until the budget is spent; returns the number not reached.

    Rows in `path` count, and rows in `known` that have a time.

    A candidate that was skipped for a reason is tried once, not for each row.
    """
    rows = read_lines(path)
    done = {identity(row) for row in rows} | {identity(row) for row in known if row["status"] == "ok"}
    reported = {(row["op"], row["candidate"], row.get("reason")) for row in rows if row["status"] == "skipped"}
    remaining = [task for task in tasks if task.key not in done]
    for count, task in enumerate(remaining):
        if budget.left() <= 0.0:
            return len(remaining) - count
        started(task)
        row = task.run(bench)
        assert identity(row) == task.key, (identity(row), task.key)
        reason = (row["op"], row["candidate"], row.get("reason"))
        if row["status"] == "skipped" and reason in reported:
            continue
        reported.add(reason)
        row.pop(SAMPLES, None)
        append(path, row)
        print(describe(row), flush=True)
    return 0


def describe(row: Row) -> str:
    """One line about a row."""
    sizes = " ".join(f"{name}{size}" for name, size in row["shape"].items())
    what = (
        f"{row['op']:<14} {row['case']:<13} {row['direction']:<14} {row['dtype']:<8} {sizes:<34} {row['candidate']:<26}"
    )
    if row["status"] != "ok":
        return f"{what} {row['status']}: {row['reason']}"
    rate = f"{row['seconds'] * 1e6:12,.1f} us +-{row['spread'] / 2:4.0%}"
    if row["kind"] == "step":
        rate += f"  {row['tokens_per_second']:,.0f} tokens/s"
    elif row["kind"] == "operation":
        rate += f"  {row['tflops']:7.2f} TFLOP/s  {row['gbps']:8.1f} GB/s"
    if "fraction" in row:
        rate += f"  {row['fraction']:4.0%} of the {row['bound']} limit"
    return f"{what} {rate}"


def limits_row(bench: Bench, limits: timing.Limits) -> Row:
    row = bench.row("limit", "device", "limits", "-", "measured", "-", status="ok")
    return row | asdict(limits)


def find_or_measure_limits(bench: Bench, path: Path, quick: bool) -> timing.Limits | None:
    """The limits that an earlier worker of this run measured, or new ones; none in quick mode."""
    for row in read_lines(path):
        if row["kind"] == "limit":
            return timing.Limits(row["memory"], row["compute"])
    if quick:
        return None
    dtypes = [torch.float32, torch.bfloat16] + [torch.float16] * (bench.device.type == "cuda")
    limits = timing.measure_limits(bench.device, dtypes, bench.seconds)
    append(path, limits_row(bench, limits))
    return limits


def worker(arguments: argparse.Namespace) -> int:
    """A measuring process; its deadline is wall-clock time."""
    device = torch.device(arguments.device)
    path = Path(arguments.out) / ROWS
    current = Path(arguments.current)
    bench = Bench(device, arguments.seconds or SECONDS_PER_ROW[device.type])
    bench.limits = find_or_measure_limits(bench, path, arguments.quick)
    tasks = chosen(plan(device, arguments.quick, arguments.part), arguments.op, arguments.backend, arguments.strike)
    gc.collect()
    gc.freeze()  # each row collects garbage: without this it takes 0.2 s
    budget = Budget(arguments.deadline - time.time())

    def started(task: Task) -> None:
        current.write_text(task.key)

    try:
        missed = work(tasks, bench, budget, path, started, recorded_rows(device) if arguments.missing else ())
    except Exception as error:
        if not is_device_lost(error):
            raise
        print(f"the device is lost: {error}", file=sys.stderr)
        return DEVICE_LOST
    if missed:
        print(f"time budget exceeded: {missed} rows were not reached")
    current.unlink(missing_ok=True)
    return 0


def recorded_rows(device: torch.device) -> list[Row]:
    """The rows of this device in benchmarks/results."""
    folder = environment.folder_name({"device": environment.device_name(device)})
    return read_lines(environment.ROOT / "benchmarks" / "results" / folder / ROWS)


def supervise(
    device: torch.device,
    out: Path,
    seconds: float,
    options: Sequence[str] = (),
    log: Any = None,
    most_deaths: int = 12,
    longest: float = MAX_TASK_SECONDS,
) -> None:
    """Run workers until the plan is finished or `seconds` have passed; a task of more than `longest` counts as hung."""
    budget = Budget(seconds)
    deadline = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        current = Path(folder) / "current"
        command = [sys.executable, "-m", "benchmarks.runner", "--device", str(device), "--out", str(out)]
        command += ["--deadline", repr(deadline), "--current", str(current), *options]
        for _ in range(most_deaths):
            process = subprocess.Popen(command, cwd=environment.ROOT, stderr=log)
            reason = watch(process, current, budget, longest)
            if reason is None or budget.left() <= 0.0:
                return
            if not current.is_file():
                print(f"a worker ended before its first row: {reason}", file=sys.stderr)
                return
            append(out / ROWS, died_row(current.read_text(), reason, Bench(device).stamp))
            current.unlink()


def watch(process: subprocess.Popen[Any], current: Path, budget: Budget, longest: float) -> str | None:
    """Wait for a worker that writes the file `current` before each task; the reason of its failure, or None."""
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if budget.left() <= 0.0:
                return None
            if current.is_file() and time.time() - current.stat().st_mtime > longest:
                return f"took more than {longest:.0f} seconds"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return None
    return "lost the device" if process.returncode == DEVICE_LOST else f"ended its process ({process.returncode})"


def died_row(key: str, reason: str, stamp: dict[str, Any]) -> Row:
    """The row of a task that terminated its worker."""
    kind, op, case, direction, candidate, dtype, sizes = key.split("|")
    shape = {name: int(size) for name, size in (pair.split("=") for pair in sizes.split(",") if pair)}
    row = {"kind": kind, "op": op, "case": case, "direction": direction, "candidate": candidate, "dtype": dtype}
    return {**row, "shape": shape, **stamp, "status": "failed", "reason": reason}


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that select the measurements."""
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="only this operation (repeatable)")
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="of our backends, only this one; peers are kept"
    )
    parser.add_argument("--part", choices=PARTS, help="on a GPU: only this part of the plan")
    parser.add_argument(
        "--strike", type=json.loads, default=[], metavar="JSON", help="[[operation, backend, dtype], ...] to leave out"
    )
    parser.add_argument("--quick", action="store_true", help="smoke test: small sizes and few rows")
    parser.add_argument("--missing", action="store_true", help="only rows missing in benchmarks/results")
    parser.add_argument("--seconds", type=float, default=0.0, help="timing seconds per row (default: 0.1 or 0.2)")


def selection(arguments: argparse.Namespace) -> list[str]:
    """The same options as command-line arguments, for a worker."""
    options = [text for name in arguments.op for text in ("--op", name)]
    options += [text for name in arguments.backend for text in ("--backend", name)]
    options += ["--part", arguments.part] if arguments.part else []
    options += ["--strike", json.dumps(arguments.strike)] if arguments.strike else []
    options += ["--quick"] if arguments.quick else []
    options += ["--missing"] if arguments.missing else []
    return [*options, "--seconds", str(arguments.seconds)]


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.runner", description="One worker; see benchmarks.cli.")
    for name in ("--device", "--out", "--current"):
        parser.add_argument(name, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    add_selection(parser)
    return worker(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
