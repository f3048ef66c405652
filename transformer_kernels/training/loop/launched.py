"""State shared by the processes of one launch: options, code and data, and the folder of a restarted run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

from transformer_kernels._version import __version__
from transformer_kernels.backends import cpu
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.distributed import Processes, environment_number

OWN = {"out", "device", "threads", "progress", "tensorboard"}
"""Options that may differ between processes."""

PATHS = {"corpus", "text", "data", "test_data", "data_dir", "vocab_dir", "init"}
"""Options that name files, whose contents are compared instead."""


class ProcessesDisagree(ValueError):
    """The processes of a run were started with other options, code or data."""


def check_agreement(
    config: TrainingConfig, device: torch.device, data: str, vocabulary: dict[str, Any], processes: Processes
) -> None:
    """Compare what decides the numbers of a run, in all processes.

    Raises:
        ProcessesDisagree: in every process, names the first difference.
    """
    if processes.count == 1:
        return
    facts = {
        "transformer_kernels": f"{__version__} ({_sources():.12})",
        "PyTorch": torch.__version__,
        "recipe": config.recipe,
        "the type of the device": device.type,
        **{name: value for name, value in dataclasses.asdict(config).items() if name not in OWN | PATHS},
        "the hash of the training data": data,
        "the hash of the vocabulary": hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest(),
        "the instruction set of the backend cpu": _instruction_set(device),
    }
    everywhere = processes.gather(facts)
    for name in facts:
        for rank, theirs in enumerate(everywhere):
            if theirs.get(name) != everywhere[0].get(name):
                raise ProcessesDisagree(
                    f"the processes do not agree: {name} is {everywhere[0].get(name)} in process 0 and"
                    f" {theirs.get(name)} in process {rank}; start all with the same options, code and data"
                )


@functools.cache
def _sources() -> str:
    """The hash of this package's Python files."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[2].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _instruction_set(device: torch.device) -> str:
    if device.type != "cpu" or cpu.unavailable(device) is not None:
        return "none"
    return f"{cpu.load().instruction_set()}, PyTorch's {torch.backends.cpu.get_cpu_capability()}"


def launch_name() -> str:
    """Identifies the launcher of this process across its restarts; empty if torchrun did not start it."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{launch} of process {os.getppid()} on {socket.gethostname()}" if launch else ""


def restarted_run(folder: str, recipe: str, processes: Processes) -> Path | None:
    """The run folder of an earlier attempt, if torchrun has restarted this run; None if there is none.

    Args:
        folder: of the run; empty for the numbered folders of the recipe.
        recipe: name of the recipe.
        processes: of the run; the first one finds the folder for all.
    """
    if environment_number("TORCHELASTIC_RESTART_COUNT") == 0:
        return None
    found = None
    if processes.first:
        folders = [Path(folder)] if folder else sorted(Path("runs").glob(f"{recipe}*"))
        found = next((path for path in folders if _is_of_this_launch(path)), None)
    return processes.gather(found)[0]


def _is_of_this_launch(folder: Path) -> bool:
    log = folder / "log.jsonl"
    return log.is_file() and f'"launch": {json.dumps(launch_name())}' in log.read_text("utf-8", errors="replace")
