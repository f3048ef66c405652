"""A pytest plugin that writes each test result as it is reported, and the verdict per kernel.

Used as `pytest -p benchmarks.evidence`; BENCHMARK_EVIDENCE names the file. An interrupted run keeps its results.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.compilers.status import BACKENDS, OPERATIONS, kernel_hash
from benchmarks.measure import DEVICE_LOST, is_device_lost

VARIABLE = "BENCHMARK_EVIDENCE"
TESTS = "tests.jsonl"
FINISHED = "finished"
RAN = ("passed", "failed", "skipped")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result; after a lost device the worker exits, because all of its later tests would fail."""
    if VARIABLE not in os.environ:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        if report.failed and is_device_lost(report.longrepr):
            os._exit(DEVICE_LOST)
        return
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        elif report.failed:
            reason = str(report.longrepr).strip()[-400:]
        _write({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 4), "why": reason})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if VARIABLE in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        _write({"test": FINISHED, "outcome": str(int(exitstatus)), "seconds": 0.0, "why": ""})


def _write(record: dict[str, Any]) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps(record) + "\n")


def kernel_of(test: str) -> str | None:
    """The kernel of a test: tests/ops/test_softmax.py::test_masks[triton-float32] -> softmax/triton."""
    found = re.search(r"test_(\w+?)(?:_(?:triton|cuda|backward|forward)\w*)?\.py::", test)
    if found is None or found.group(1) not in OPERATIONS:
        return None
    words = re.split(r"[\[\]\-/:._]+", test)
    named = [backend for backend in BACKENDS if backend in words]
    return f"{found.group(1)}/{named[0]}" if len(named) == 1 else None


def verdicts(tests: Iterable[dict[str, Any]], environment: dict[str, Any], sessions: int = 1) -> list[dict[str, Any]]:
    """For each kernel: its current hash, the number of passed and failed tests on this device, and completeness.

    A run is complete if all expected pytest sessions ended, with tests failed (1), none found (5) or all passed (0).
    """
    tests = list(tests)
    ended = [test for test in tests if test["test"] == FINISHED and test["outcome"] in ("0", "1", "5")]
    complete = len(ended) >= sessions
    counts: dict[str, Counter[str]] = {}
    for test in tests:
        if (kernel := kernel_of(test["test"])) is not None:
            counts.setdefault(kernel, Counter())[test["outcome"]] += 1
    return [
        {
            "kernel": kernel,
            "hash": kernel_hash(kernel.split("/")[0], kernel.split("/")[1]),
            **{outcome: counted[outcome] for outcome in RAN},
            "complete": complete,
            **{name: environment[name] for name in ("device", "torch", "triton", "driver", "commit", "date")},
        }
        for kernel, counted in sorted(counts.items())
    ]


def summary(tests: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by outcome, and the failures."""
    tests = [test for test in tests if test["test"] != FINISHED]
    failed = [test for test in tests if test["outcome"] == "failed"]
    return {**Counter(test["outcome"] for test in tests), "failures": [[test["test"], test["why"]] for test in failed]}
