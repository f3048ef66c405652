"""Recorded rows: reading, merging into benchmarks/results, comparing two records, fitting growth."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment, evidence, fast_paths, gpu
from benchmarks.gpu.summary import broken_off, is_whole, summary
from benchmarks.measure import Row, identity
from benchmarks.runner import ENVIRONMENT, ROWS, read_lines
from benchmarks.steps import HEADLINE, LABELS

RESULTS = environment.ROOT / "benchmarks" / "results"
TEST_SUMMARY = "tests.json"
KERNELS = "kernels.json"
THRESHOLD = 0.05
"""A median this much longer is a regression, unless the spreads of the two explain it."""


def load_rows(path: Path) -> list[Row]:
    """The rows of a record's folder, of a rows.jsonl, or of a pytest-benchmark file."""
    if path.is_dir():
        path = path / ROWS
    if not path.is_file():
        raise FileNotFoundError(f"no benchmark rows at {path}")
    if path.suffix == ".jsonl":
        return read_lines(path)
    content = json.loads(path.read_text())
    if isinstance(content, dict) and "benchmarks" in content:
        return [entry["extra_info"]["row"] for entry in content["benchmarks"] if "row" in entry["extra_info"]]
    if isinstance(content, list):
        return content
    raise ValueError(f"{path}: neither benchmark rows nor a pytest-benchmark file")


def timed(rows: Iterable[Row], kind: str | None = None) -> list[Row]:
    """The rows that have a time."""
    return [row for row in rows if row["status"] == "ok" and row["kind"] in ((kind,) if kind else KINDS)]


KINDS = ("operation", "step", "call")


def against_headline(row: Row, rows: Iterable[Row]) -> float | None:
    """The speedup of a training step over PyTorch's own kernels in the same precision, on the same batch."""
    named = identity(row | {"candidate": f"{HEADLINE}, {LABELS[row['dtype']]}"})
    found = [candidate for candidate in timed(rows, "step") if identity(candidate) == named]
    return found[0]["seconds"] / row["seconds"] if found else None


def against_peers(rows: Iterable[Row]) -> dict[str, float]:
    """For each row of ours, by identity: the speedup over the fastest other candidate of the workload."""
    workloads: dict[str, list[Row]] = {}
    for row in timed(rows, "operation"):
        workloads.setdefault(identity(row | {"candidate": ""}), []).append(row)
    ratios = {}
    for found in workloads.values():
        peers = [row["seconds"] for row in found if not row["candidate"].startswith("ours")]
        ours = [row for row in found if peers and row["candidate"].startswith("ours")]
        ratios.update({identity(row): min(peers) / row["seconds"] for row in ours})
    return ratios


# Merging


def merge(source: Path, results: Path | None = None) -> Path:
    """Merge a run's folder into `results/<device>/`; for equal identities the newer row is kept."""
    described = json.loads((source / ENVIRONMENT).read_text())
    folder = (results or RESULTS) / environment.folder_name(described)
    folder.mkdir(parents=True, exist_ok=True)
    commit = described["commit"]
    if commit is None and described["sources"] == environment.source_hash():
        commit = described["commit"] = environment.commit()  # measured where there was no git, on these very sources
    new = [row | {"commit": row["commit"] or commit} for row in read_lines(source / ROWS)]
    rows = merged_rows(read_lines(folder / ROWS), new)
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / ENVIRONMENT).write_text(json.dumps(described, indent=2) + "\n")
    tests, smoke = read_lines(source / evidence.TESTS), read_lines(source / gpu.VERDICTS)
    if tests or smoke:
        verdicts = evidence.verdicts(tests, described, smoke, is_whole(source))
        merged = merged_verdicts(_json_list(folder / KERNELS), verdicts)
        (folder / KERNELS).write_text(json.dumps(merged, indent=2) + "\n")
        described_tests = evidence.summary(tests) | {"broken off": broken_off(source)}
        (folder / TEST_SUMMARY).write_text(json.dumps(described_tests, indent=2) + "\n")
        (folder / gpu.SUMMARY).write_text(summary(source) + "\n")
    if (source / fast_paths.RESULTS).is_file():
        shutil.copy(source / fast_paths.RESULTS, folder)
    return folder


def merged_rows(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Old rows updated by new ones, further new ones appended; a time is not replaced by a row without one."""
    rows = {identity(row): row for row in old}
    for row in new:
        key = identity(row)
        before = rows.get(key)
        if before is not None and before["status"] == "ok" and row["status"] in ("skipped", "out of memory"):
            continue
        if before is None or row["date"] >= before["date"]:
            rows[key] = row
    return list(rows.values())


def merged_verdicts(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One verdict for each kernel, dtype and hash, the newest; verdicts on older sources are kept."""
    verdicts = {(entry["kernel"], entry["dtype"], entry["hash"]): entry for entry in [*old, *new]}
    return sorted(verdicts.values(), key=lambda entry: (entry["kernel"], entry["dtype"], entry["date"]))


def _json_list(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.is_file() else []


# Comparing


@dataclass(frozen=True)
class Comparison:
    """A measurement in two records: seconds in each, their ratio, and the spread of that ratio."""

    name: str
    before: float
    after: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def verdict(self) -> str:
        """Slower or faster by more than the threshold and the spread; else the same."""
        margin = max(THRESHOLD, self.spread)
        if self.ratio > 1.0 + margin:
            return "SLOWER"
        return "faster" if self.ratio < 1.0 / (1.0 + margin) else "same"


def compare(before: Iterable[Row], after: Iterable[Row]) -> list[Comparison]:
    """Every timed row that occurs in both records, worst first."""
    old = {identity(row): row for row in timed(before)}
    found = []
    for row in timed(after):
        if (base := old.get(identity(row))) is not None:
            spread = math.hypot(base["spread"], row["spread"])
            found.append(Comparison(row_name(row), base["seconds"], row["seconds"], spread))
    return sorted(found, key=lambda comparison: -comparison.ratio)


def row_name(row: Row) -> str:
    sizes = " ".join(f"{name}{size}" for name, size in row["shape"].items())
    return f"{row['op']} {row['case']} {row['direction']} {row['dtype']} {sizes} {row['candidate']}"


# Growth


@dataclass(frozen=True)
class Growth:
    """Power-law exponents of time and memory per sequence against its length."""

    case: str
    direction: str
    dtype: str
    candidate: str
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def time_exponent(self) -> float:
        return exponent(self.lengths, self.seconds)

    @property
    def memory_exponent(self) -> float | None:
        return exponent(self.lengths, self.memory) if all(size > 0 for size in self.memory) else None


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x, by least squares over the upper half of x, where overheads weigh least."""
    first = min(len(x) // 2, len(x) - 3) if len(x) > 3 else 0
    logs = [(math.log(a), math.log(b)) for a, b in sorted(zip(x, y, strict=True))[first:]]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - mean_x) * (b - mean_y) for a, b in logs) / sum((a - mean_x) ** 2 for a, _ in logs)


def growth(rows: Iterable[Row]) -> list[Growth]:
    """The fits of all attention sweeps with at least three lengths."""
    sweeps: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in timed(rows, "operation"):
        if row["op"] == "attention" and not row["case"].startswith("decode"):
            key = (row["case"], row["direction"], row["dtype"], row["candidate"])
            sweeps.setdefault(key, []).append(row)
    fits = []
    for key, sweep in sweeps.items():
        sweep.sort(key=lambda row: row["shape"]["L"])
        if len({row["shape"]["L"] for row in sweep}) >= 3:
            lengths = tuple(row["shape"]["L"] for row in sweep)
            seconds = tuple(row["seconds"] / row["shape"]["B"] for row in sweep)
            memory = tuple(row["peak_memory"] / row["shape"]["B"] for row in sweep)
            fits.append(Growth(*key, lengths, seconds, memory))
    return fits
