"""The seed of random calls and samples: they change with each day, and a commit always draws the same ones."""

import datetime
import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def day():
    """TRANSFORMER_KERNELS_RANDOM up to a colon; else the day of the last commit; without git, today."""
    if given := os.environ.get("TRANSFORMER_KERNELS_RANDOM"):
        return given.partition(":")[0]
    command = ["git", "log", "-1", "--format=%cs"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or datetime.date.today().isoformat()
