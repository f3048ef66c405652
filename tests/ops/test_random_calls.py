"""Random calls of every operation, different each day, against an oracle that shares no code with the package.

TRANSFORMER_KERNELS_RANDOM is the day, or one call as printed by a failure: `2026-11-22:17`.
TRANSFORMER_KERNELS_RANDOM_SECONDS is the time per operation and backend.
"""

from __future__ import annotations

import datetime
import itertools
import os
import time

import pytest
import torch

import transformer_kernels as tk
from tests.support import random_calls
from tests.support.operations import EXAMPLES
from tests.support.parity import backend_fixture
from tests.support.random_calls import DRAWN, Draw

DAY, _, ONE = os.environ.get("TRANSFORMER_KERNELS_RANDOM", datetime.date.today().isoformat()).partition(":")
SECONDS = float(os.environ.get("TRANSFORMER_KERNELS_RANDOM_SECONDS", "0.4"))
backend = backend_fixture(*tk.BACKENDS)


def test_every_operation_is_drawn() -> None:
    assert DRAWN.keys() == EXAMPLES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("op", DRAWN)
def test_random_calls(op: str, backend: str, device: torch.device) -> None:
    check(op, backend, device, int(ONE or 0))
    end = time.monotonic() + SECONDS  # the first call also compiles and imports
    for number in () if ONE else itertools.count(1):
        if time.monotonic() > end:
            break
        check(op, backend, device, number)


def check(op: str, backend: str, device: torch.device, number: int) -> None:
    """One call; a failure prints the command that repeats it."""
    draw = Draw(f"{DAY}:{op}:{number}")
    if draw.dtype is torch.bfloat16 and backend == "triton" and "attention" in op and device.type == "cpu":
        return  # see parity.require
    try:
        random_calls.check(op, backend, draw)
    except AssertionError as error:
        again = f"TRANSFORMER_KERNELS_RANDOM={DAY}:{number} pytest {__file__} -k '[{backend}-{op}]'"
        raise AssertionError(f"{error}\n{again}") from error
