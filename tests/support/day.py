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


def turn(parts):
    """The number below `parts` that this day draws."""
    return random.Random(day()).randrange(parts)


def on_turn(number, parts=2):
    """Marks a test that takes minutes: where the gates take a part, it runs on the days that draw this number."""
    return pytest.mark.skipif(EVERY > 1 and turn(parts) != number, reason=f"runs on one day in {parts}")
