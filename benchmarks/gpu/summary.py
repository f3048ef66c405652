"""The summary of a record: verdicts, failed tests, interrupted steps, rates next to the peers' rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.gpu import BACKENDS, STEPS, VERDICTS
from benchmarks.runner import ROWS, read_lines
from transformer_kernels import verification
from transformer_kernels.verification import BAD

MAX_CHARACTERS = 11_000
"""Maximum length of the summary: the last 12,000 of a call's output are returned."""


def broken_off(folder: Path) -> list[str]:
    """The steps that began and did not end: the call was killed, or their time ended."""
    events: dict[str, str] = {line["step"]: line["event"] for line in read_lines(folder / STEPS)}
    return [step for step, event in events.items() if event != "ended"]


PARITY_STEPS = ("parity", "remaining parity")


def is_whole(folder: Path) -> bool:
    """Whether the parity suite ended by itself: with failed tests or without, not by its time or a crash."""
    ended = [line for line in read_lines(folder / STEPS) if line["step"] in PARITY_STEPS and line["event"] == "ended"]
    return bool(ended) and ended[-1]["wrong"] in ("", "pytest ended with 1")


def failed_tests(tests: Iterable[dict[str, Any]]) -> list[str]:
    """The tests whose last result is a failure."""
    last = {test["test"]: test["outcome"] for test in tests if test["test"] != evidence.FINISHED}
    return [test for test, outcome in last.items() if outcome == "failed"]


def summary(folder: Path) -> str:
    """Verdicts per backend and dtype, bad ones, tests, and a line per workload; at most MAX_CHARACTERS."""
    lines = ["", "verdicts of the smoke cases"]
    verdicts = read_lines(folder / VERDICTS)
    for backend in BACKENDS:
        for dtype in verification.DTYPES:
            found = [line for line in verdicts if (line["backend"], line["dtype"]) == (backend, dtype)]
            lines.append(f"  {backend:<7} {dtype:<9} {counted(found)}")
    lines += [line[:160] for line in bad_kernels(verdicts)[:40]]
    tests = [test for test in read_lines(folder / evidence.TESTS) if test["test"] != evidence.FINISHED]
    lines.append(f"tests: {counted(tests)}")
    lines += [f"  failed: {test}"[:160] for test in failed_tests(tests)[:20]]
    if broken := broken_off(folder):
        lines.append(f"broken off: {', '.join(broken)}")
    kept, used = [], sum(len(line) + 1 for line in lines)
    for line in table(read_lines(folder / ROWS)):  # the most valuable first
        used += len(line) + 1
        if used > MAX_CHARACTERS:
            break
        kept.append(line)
    return "\n".join([*lines, *kept])


def bad_kernels(verdicts: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each kernel and dtype with a bad verdict: the first one, and how many there are."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for verdict in verdicts:
        if verdict["outcome"] in BAD:
            found.setdefault((verdict["backend"], verdict["op"], verdict["dtype"]), []).append(verdict)
    return [
        f"  {backend} {first['case']} {first['direction']}: {first['outcome']} ({1 + len(others)}): {first['why']}"[
            :160
        ]
        for (backend, _, _), (first, *others) in found.items()
    ]


def counted(results: Iterable[dict[str, Any]]) -> str:
    """The number of each outcome."""
    counts = Counter(result["outcome"] for result in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per workload: the TFLOP/s or GB/s or tokens/s of each candidate; training steps first."""
    workloads: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["status"] != "ok" or row["kind"] in ("limit", "call"):
            continue
        shape = " ".join(f"{name}{size}" for name, size in row["shape"].items())
        key = (row["op"], row["case"], row["direction"], row["dtype"], shape)
        name = row["candidate"].removeprefix("ours ")
        if row["kind"] == "step":
            key, rate = (*key[:3], "", shape), f"{row['tokens_per_second']:,.0f} tokens/s"
        elif "attention" in row["op"]:
            rate = f"{row['tflops']:.0f} TFLOP/s"
        else:
            rate = f"{row['gbps']:.0f} GB/s"
        workloads.setdefault(key, {})[name] = rate
    ordered = sorted(workloads, key=lambda key: key[2] != "step")
    return [f"{' '.join(filter(None, key))}: " + ", ".join(f"{name} {rate}" for name, rate in workloads[key].items())
            for key in ordered]  # fmt: skip
