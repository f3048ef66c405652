"""Random calls of every operation against an oracle that shares no code with the package.

They change with each day, and a commit always draws the same ones. TRANSFORMER_KERNELS_RANDOM is another day, or one
call as printed by a failure: `2026-11-22:17`. TRANSFORMER_KERNELS_RANDOM_CALLS is their number per operation in
`torch` and `cpu`; the other backends, which run on emulations, get a quarter. The quick suite runs an eighth of those
of `torch` and `cpu`.
"""

import os

import pytest
import torch

import transformer_kernels as tk
from tests.support import random_calls
from tests.support.day import day
from tests.support.operations import EXAMPLES
from tests.support.parity import backend_fixture
from tests.support.random_calls import DRAWN, Draw

ONE = os.environ.get("TRANSFORMER_KERNELS_RANDOM", "").partition(":")[2]
CALLS = int(os.environ.get("TRANSFORMER_KERNELS_RANDOM_CALLS", "24"))
backend = backend_fixture(*tk.BACKENDS)
quick_backend = backend_fixture("torch", "cpu")


def test_every_operation_is_drawn():
    assert DRAWN.keys() == EXAMPLES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("op", DRAWN)
def test_random_calls(op, backend, device):
    calls = CALLS if backend in ("torch", "cpu") else CALLS // 4
    for number in [int(ONE)] if ONE else range(calls):
        check(op, backend, device, number)


@pytest.mark.skipif(ONE != "", reason="one call is named")
@pytest.mark.parametrize("op", DRAWN)
def test_some_random_calls(op, quick_backend, device):
    for number in range(CALLS // 8):
        check(op, quick_backend, device, number)


def check(op, backend, device, number):
    """One call; a failure prints the command that repeats it."""
    draw = Draw(f"{day()}:{op}:{number}")
    if draw.dtype is torch.bfloat16 and backend == "triton" and "attention" in op and device.type == "cpu":
        return  # see parity.require
    try:
        random_calls.check(op, backend, draw)
    except AssertionError as error:
        again = f"TRANSFORMER_KERNELS_RANDOM={day()}:{number} pytest {__file__} -k '[{backend}-{op}]'"
        raise AssertionError(f"{error}\n{again}") from error
