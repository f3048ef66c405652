"""A pytest plugin that writes each test result as it is reported, and the verdict per kernel and dtype.

Used as `pytest -p benchmarks.evidence`; BENCHMARK_EVIDENCE names the file. An interrupted run keeps its results. The
plugin runs one test of each kernel and dtype before the others, notes the kernels that each test executed, and leaves
out tests of kernels that are struck.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.compilers.status import BACKENDS, OPERATIONS, kernel_hash
from benchmarks.measure import DEVICE_LOST, is_device_lost
from transformer_kernels.backends import dispatch
from transformer_kernels.verification import DTYPES

VARIABLE = "BENCHMARK_EVIDENCE"
STRUCK = "BENCHMARK_STRUCK"
"""A variable with a JSON list of [operation, backend, dtype] whose tests are left out."""
KNOWN = "BENCHMARK_KNOWN"
"""A variable that names a file with a JSON list of tests, which are left out: they have a result."""
KERNELS = "kernels"
"""The property of a test's report with the kernels that it executed."""
TESTS = "tests.jsonl"
FINISHED = "finished"
RAN = ("passed", "failed", "skipped")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out known tests and tests of struck kernels; put the first of each kernel and dtype before the others."""
    struck = {tuple(kernel) for kernel in json.loads(os.environ.get(STRUCK, "[]"))}
    known = set(json.loads(Path(os.environ.get(KNOWN, os.devnull)).read_text() or "[]"))
    left_out = [item for item in items if item.nodeid in known or _named(item.nodeid) & struck]
    config.hook.pytest_deselected(items=left_out)
    first, rest, seen = [], [], set()
    for item in items:
        if item in left_out:
            continue
        new = _named(item.nodeid) - seen
        seen |= new
        (first if new else rest).append(item)
    items[:] = first + rest


def _named(test: str) -> set[tuple[str, str, str]]:
    """The kernel and dtype that the name of a test has; float32 where it names none."""
    kernel = kernel_of(test)
    if kernel is None:
        return set()
    dtype = next((name for name in DTYPES if re.search(rf"\b{name}\b", test)), "float32")
    op, _, backend = kernel.partition("/")
    return {(op, backend, dtype)}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note which kernels the test executes: no call is planned before it, so each is selected once."""
    executed: set[str] = set()
    select = dispatch.select

    def noted(operation: Any, backend: str | None, call: Any) -> Any:
        selected = select(operation, backend, call)
        name = dispatch.requested(backend)
        if name == "auto":
            name = dispatch._automatic(operation, call, call[0].device)[0]
        if name in BACKENDS:
            dtypes = (str(value.dtype).removeprefix("torch.") for value in call if hasattr(value, "is_floating_point"))
            executed.update(f"{operation.name}/{name}/{dtype}" for dtype in dtypes if dtype in DTYPES)
        return selected

    for operation in dispatch.OPERATIONS.values():
        operation.forget_plans()
    with mock.patch.object(dispatch, "select", noted):
        yield
    item.user_properties.append((KERNELS, sorted(executed)))


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
        seconds, executed = round(report.duration, 4), dict(report.user_properties).get(KERNELS, [])
        _write({"test": report.nodeid, "outcome": report.outcome, "seconds": seconds, "why": reason, KERNELS: executed})


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


def verdicts(
    tests: Iterable[dict[str, Any]],
    environment: dict[str, Any],
    smoke: Iterable[dict[str, Any]] = (),
    whole: bool = True,
) -> list[dict[str, Any]]:
    """For each kernel and dtype: the current hash, and the number of passed, failed and skipped tests on this device.

    A test counts for the kernel in its name and for all that it executed. A smoke verdict counts as two tests, its
    passes. The last result of a test counts. A record is complete if the kernel's smoke cases and a test passed, and
    if the suite was run as a `whole`.
    """
    last = {test["test"]: test for test in tests if test["test"] != FINISHED}
    counts: dict[tuple[str, str], Counter[str]] = {}
    for test in last.values():
        named = {f"{op}/{backend}/{dtype}" for op, backend, dtype in _named(test["test"])}
        for kernel in named | set(test.get(KERNELS, ())):
            op, backend, dtype = kernel.split("/")
            counts.setdefault((f"{op}/{backend}", dtype), Counter())[test["outcome"]] += 1
    smoked: dict[tuple[str, str], Counter[str]] = {}
    for line in smoke:
        outcome = (
            line["outcome"] if line["outcome"] in RAN else "skipped" if line["outcome"] == "unsupported" else "failed"
        )
        smoked.setdefault((f"{line['op']}/{line['backend']}", line["dtype"]), Counter())[outcome] += 1
    return [
        {
            "kernel": kernel,
            "dtype": dtype,
            "hash": kernel_hash(*kernel.split("/")),
            **{outcome: counts.get(key, Counter())[outcome] + smoked.get(key, Counter())[outcome] for outcome in RAN},
            "complete": bool(whole and smoked.get(key, Counter())["passed"] and counts.get(key, Counter())["passed"]),
            **{name: environment[name] for name in ("device", "torch", "triton", "driver", "commit", "date")},
        }
        for key in sorted(counts.keys() | smoked.keys())
        for kernel, dtype in (key,)
    ]


def summary(tests: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by outcome, and the failures."""
    tests = [test for test in tests if test["test"] != FINISHED]
    failed = [test for test in tests if test["outcome"] == "failed"]
    return {**Counter(test["outcome"] for test in tests), "failures": [[test["test"], test["why"]] for test in failed]}
