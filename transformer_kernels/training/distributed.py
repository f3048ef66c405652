"""Several processes that train one model, as torchrun starts them, and what ends a run early."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process and how many there are; alone, every method does nothing."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Block until all processes have arrived."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes that torchrun started, connected: gloo on the CPU, NCCL for gradients on GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), local_rank)
    finally:
        dist.destroy_process_group()


def choose_device(name: str, processes: Processes) -> torch.device:
    """The device called `name`; "auto" is this process's GPU where there is one, else the CPU."""
    if name != "auto":
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: this PyTorch sees no GPU; use --device cpu")
        return device
    return torch.device("cuda", processes.local_rank) if torch.cuda.is_available() else torch.device("cpu")


class TrainingDiverged(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


class Interrupted(Exception):
    """A signal ended the run, after a checkpoint was written."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum = signum


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is recorded; the second one ends the process at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum = 0

    def __enter__(self) -> StopRequest:
        self._handlers = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._note) for signum in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
