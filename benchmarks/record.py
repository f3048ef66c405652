"""The record of a processor: its description and the rows of the plan, within a time budget, on disk as they come.

It needs no network. `merge` in results.py reads the folder. A GPU is recorded by gpu.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import environment
from benchmarks.runner import ENVIRONMENT, ROWS, read_lines, supervise

LOG = "record.log"
BUDGET = 720.0


def record(device: torch.device, out: Path, seconds: float, options: Sequence[str]) -> int:
    """Benchmark into a folder; 1 if there is no row."""
    out.mkdir(parents=True, exist_ok=True)
    described = environment.environment(device) | {"budget": seconds}
    (out / ENVIRONMENT).write_text(json.dumps(described, indent=2) + "\n")
    with open(out / LOG, "a") as log:
        supervise(device, out, seconds - 3.0, options, log)
    rows = len(read_lines(out / ROWS))
    print(f"{rows} rows recorded in {out}")
    return int(not rows)
