"""Host time per call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.conftest import REPLAY
from benchmarks.measure import Row
from benchmarks.plan import Task

KIND = "call"


@pytest.mark.benchmark(timer=REPLAY, warmup=False)
def test_call(task: Task, show: Callable[[Task], Row]) -> None:
    show(task)
