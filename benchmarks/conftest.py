"""`pytest benchmarks` with pytest-benchmark: the harness measures, pytest-benchmark tabulates, groups and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.measure import SAMPLES, Bench, Row
from benchmarks.plan import Task, chosen, plan
from benchmarks.runner import SECONDS_PER_ROW, describe, find_or_measure_limits


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transformer_kernels")
    group.addoption("--op", action="append", default=[], help="only this operation (repeatable)")
    group.addoption("--backend", action="append", default=[], help="of our backends, only this one; peers are kept")
    group.addoption("--quick", action="store_true", help="small sizes and few rows")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each task of the plan with the test module's kind."""
    if "task" in metafunc.fixturenames:
        config = metafunc.config
        tasks = chosen(plan(_device(), config.getoption("quick")), config.getoption("op"), config.getoption("backend"))
        wanted = [task for task in tasks if task.key.startswith(metafunc.module.KIND)]
        metafunc.parametrize("task", wanted, ids=[task.key.replace("|", " ") for task in wanted])


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    device = _device()
    made = Bench(device, SECONDS_PER_ROW[device.type])
    path = tmp_path_factory.mktemp("limits") / "rows.jsonl"
    made.limits = find_or_measure_limits(made, path, request.config.getoption("quick"))
    return made


class Replay:
    """A clock that returns the harness's measurements, so that pytest-benchmark takes its samples from there."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def runs(self, samples: list[float]) -> Callable[[], None]:
        remaining: Iterator[float] = iter(samples)

        def run() -> None:
            self.now += next(remaining, 0.0)

        return run


REPLAY = Replay()


@pytest.fixture
def show(benchmark: object, bench: Bench) -> Callable[[Task], Row]:
    """Measure a task and pass its samples and row to pytest-benchmark; without a time, skip or fail."""

    def measure(task: Task) -> Row:
        row = task.run(bench)
        if row["status"] in ("skipped", "out of memory"):
            pytest.skip(row["reason"])
        assert row["status"] == "ok", row["reason"]
        benchmark.group = f"{row['op']} {row['direction']}"  # type: ignore[attr-defined]
        print(describe(row))
        samples = row.pop(SAMPLES)
        benchmark.extra_info["row"] = row  # type: ignore[attr-defined]
        benchmark.pedantic(REPLAY.runs(samples), rounds=len(samples), iterations=1)  # type: ignore[attr-defined]
        return row

    return measure
