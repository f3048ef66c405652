"""The seed of random calls and samples, which a commit always draws alike, and which of their cases the gates take."""

import datetime
import functools
import os
import random
import subprocess
from pathlib import Path

import pytest

EVERY = int(os.environ.get("TRANSFORMER_KERNELS_GATES_EVERY", "1"))
"""The gates take every n-th case; 1: all."""


@functools.cache
def day():
    """TRANSFORMER_KERNELS_RANDOM up to a colon; else the day of the last commit; without git, today."""
    if given := os.environ.get("TRANSFORMER_KERNELS_RANDOM"):
        return given.partition(":")[0]
    command = ["git", "log", "-1", "--format=%cs"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or datetime.date.today().isoformat()


def in_turn(cases, parts=2):
    """Of cases that take minutes the part whose turn it is on this day; all where the gates take all."""
    cases = list(cases)
    return cases if EVERY == 1 else random.Random(day()).sample(cases, -(-len(cases) // parts))


def on_day(number, parts=2):
    """Marks a test that takes minutes: it runs on every day whose number, below `parts`, is this one."""
    its_turn = EVERY == 1 or random.Random(day()).randrange(parts) == number
    return pytest.mark.skipif(not its_turn, reason=f"runs on one day in {parts}")
