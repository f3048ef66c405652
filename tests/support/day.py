"""The seed of random calls and samples, which a commit always draws alike, and how many of the cases the gates take."""

import datetime
import functools
import os
import random
import subprocess
from pathlib import Path

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


def in_turn(cases):
    """Of cases that take minutes the half whose turn it is on this day; all where the gates take all."""
    cases = list(cases)
    return cases if EVERY == 1 else random.Random(day()).sample(cases, (len(cases) + 1) // 2)
