"""Every operation by every candidate, over the sweeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.conftest import REPLAY
from benchmarks.measure import Row
from benchmarks.plan import Task

KIND = "operation"


@pytest.mark.benchmark(timer=REPLAY, warmup=False)
def test_operation(task: Task, show: Callable[[Task], Row]) -> None:
    show(task)
