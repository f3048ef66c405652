"""Whole training steps, by configuration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.conftest import REPLAY
from benchmarks.measure import Row
from benchmarks.plan import Task

KIND = "step"


@pytest.mark.benchmark(timer=REPLAY, warmup=False)
def test_step(task: Task, show: Callable[[Task], Row]) -> None:
    show(task)
