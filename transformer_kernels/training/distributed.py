"""Multi-process training, as launched by torchrun, and the signals that stop a run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from transformer_kernels._interruption import SIGNALS, launcher, limit
from transformer_kernels.training.heartbeat import Heartbeat

_agreements = itertools.count()


LAUNCHED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets beside WORLD_SIZE."""


def environment_number(name: str, default: int = 0) -> int:
    """The whole number in an environment variable."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number; got {text!r}")
    return int(text)


def _store() -> dist.Store:
    """Key-value store of the process group."""
    return dist.PrefixStore("transformer_kernels", dist.distributed_c10d._get_default_store())


@dataclass(frozen=True)
class Processes:
    """This process's rank and the number of processes; for a single process, every method is a no-op."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def parts(self, items: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        """This process's share of the items, at most `size` at a time."""
        return (part for part in items[self.rank :: self.count].split(size) if len(part))

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def agree(self, holds: bool) -> bool:
        """Whether something holds in every process; waits for the others only if it holds in this one."""
        if self.count == 1:
            return holds
        store, call = _store(), next(_agreements)
        store.set(f"{call}/{self.rank}", str(holds))
        return holds and all(store.get(f"{call}/{rank}") == b"True" for rank in range(self.count))

    def note(self, key: str, value: str) -> None:
        """Keep a text that other processes can read when this one has ended; a later one does not replace it."""
        if self.count > 1:
            _store().compare_set(key, "", value)

    def noted(self, key: str) -> str:
        """The text that a process has kept; empty if none has."""
        if self.count > 1:
            with contextlib.suppress(RuntimeError):  # the launcher, which has the store, has ended
                return _store().get(key).decode() if _store().check([key]) else ""
        return ""

    def wait(self) -> None:
        """Block until all processes have arrived."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """Initialise the process group of torchrun's processes: gloo on the CPU, NCCL for gradients on GPUs."""
    if environment_number("WORLD_SIZE", 1) == 1:
        yield Processes()
        return
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start with torchrun, or unset WORLD_SIZE")
    local_rank = environment_number("LOCAL_RANK")
    backend = "gloo"
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    store, rank, count = _rendezvous()
    heartbeat = Heartbeat(dist.PrefixStore("heartbeat", store.clone()), rank, count, limit())
    heartbeat.start()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
        yield Processes(rank, count, local_rank)
    except Exception as error:
        lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in _first_line(error))
        shown = ProcessLost("another process ended or cannot be reached") if lost else error
        if launcher.responds():
            _report_once(shown)
        else:
            shown.reported = rank > 0  # type: ignore[attr-defined]
        if shown is error:
            raise
        raise shown from error
    finally:
        heartbeat.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rendezvous() -> tuple[Any, int, int]:
    """A part of the launcher's store that no earlier attempt has used, the rank and the number of processes.

    A restarted launch keeps its store, in which PyTorch would find the addresses of processes that have ended.
    """
    store, rank, count = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, count


def _report_once(error: Exception) -> None:
    """Set `error.reported` if another process raises it too, and prints it."""
    topic = type(error).__name__ if isinstance(error, ProcessLost | TrainingDiverged | Interrupted) else str(error)
    with contextlib.suppress(RuntimeError, ValueError):  # the launcher, which has the store, has ended; or none joined
        number = _store().add(f"reported {hashlib.sha256(topic.encode()).hexdigest()}", 1)
        error.reported = number > 1  # type: ignore[attr-defined]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `transformer-kernels` with these arguments in `count` processes, like torchrun.

    Returns:
        The exit status: 0, 128 + the signal that ended the run, or the status of the first process that failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the error is printed below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "transformer_kernels", *arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"status {failure.exitcode}" if failure.exitcode > 0 else signal.Signals(-failure.exitcode).name
        if failure.exitcode not in (1, *(128 + number for number in SIGNALS)):  # the process has said why
            print(f"transformer-kernels: error: process {rank} ended with {ended}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def choose_device(name: str, processes: Processes) -> torch.device:
    """The device called `name`; "auto" is this process's GPU if there is one, else the CPU."""
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and 0 < torch.cuda.device_count() <= processes.local_rank:
        seen = torch.cuda.device_count()
        raise ValueError(f"each process needs a GPU, and PyTorch sees {seen}; use --processes {seen} or --device cpu")
    if name == "auto":
        return torch.device("cuda", processes.local_rank)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1, ...; got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this PyTorch sees no GPU; use --device cpu")
    try:
        torch.zeros((), device=device).item()  # fails on "meta", too
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
    return device


class ProcessLost(RuntimeError):
    """A process of the group ended, or its connection was lost."""


class TrainingDiverged(RuntimeError):
    """The loss or a gradient became NaN or infinite."""


class Interrupted(Exception):
    """A signal stopped the run after a checkpoint was saved."""

    def __init__(self, signum: int, step: int, checkpoint: Path, resume: str) -> None:
        """The message names the checkpoint and `resume`, the command that continues."""
        reason = f"stopped by {signal.Signals(signum).name} after step {step}"
        super().__init__(f"{reason}; checkpoint: {checkpoint}; resume with: transformer-kernels {resume}")
        self.signum, self.step, self.checkpoint = signum, step, checkpoint


class StopRequest:
    """A context in which the first SIGINT or SIGTERM is recorded; a second one ends the process immediately.

    With several processes the loss of their launcher counts as SIGTERM, and a second SIGTERM is ignored: the launcher
    sends one when another process has ended.

    Attributes:
        agreed: the signal that all processes know of since the last `agree`; 0 if there is none. What a process alone
            has received meanwhile must not decide what it does next.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self._signum = self.agreed = 0
        self._processes = processes or Processes()
        self._handlers: dict[int, Any] = {}

    @property
    def signum(self) -> int:
        """The signal that was received; 0 if none was."""
        if self._processes.count > 1 and launcher.is_lost():
            self._signum = self._signum or signal.SIGTERM
        return self._signum

    def agree(self, seconds: float) -> float:
        """Set `agreed` to the signal that any process has received; returns the first process's seconds."""
        received = [float(self.signum == number) for number in SIGNALS]
        *received, seconds = self._processes.sum([*received, seconds if self._processes.first else 0.0])
        for signum, count in zip(SIGNALS, received, strict=True):
            if count:
                self._note(signum, None)
                self.agreed = signum
        return seconds

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            ended = self._signum or error[0] is not None  # the launcher sends SIGTERM when another process has ended
            if not (ended and self._processes.count > 1 and signum == signal.SIGTERM):
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        for number in self._handlers:
            again = signal.SIG_IGN if self._processes.count > 1 and number == signal.SIGTERM else signal.SIG_DFL
            signal.signal(number, again)
