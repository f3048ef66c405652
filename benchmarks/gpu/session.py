"""A call: steps in order, each with a time limit, in a folder that the next call continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, evidence, fast_paths
from benchmarks.gpu import LOG, STEPS, VERDICTS
from benchmarks.gpu.summary import summary
from benchmarks.runner import ENVIRONMENT, ROWS, append, read_lines
from transformer_kernels import verification
from transformer_kernels.verification import BAD

FILES = (ENVIRONMENT, STEPS, VERDICTS, evidence.TESTS, ROWS, fast_paths.RESULTS, LOG)
"""The seven files that are copied to $OUT. `merge` derives kernels.json and summary.txt from them."""
MAX_LOG = 8 << 20
WORKERS = min(14, os.cpu_count() or 1)
FACTOR = float(os.environ.get("BENCHMARK_SECONDS_FACTOR", "1"))
"""Multiplies the steps' time limits, for a rehearsal on a slow machine."""


@dataclass
class Session:
    """One call: the device, the folder it works in, when it must be over, and the operations it is restricted to."""

    device: torch.device
    folder: Path
    deadline: float
    struck: set[tuple[str, str, str]] = field(default_factory=set)
    """(operation, backend, dtype) that a smoke case found to be wrong or dangerous: later steps leave them out."""
    operations: tuple[str, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def run(self, command: Sequence[str], seconds: float, **variables: str) -> int | None:
        """Run a command with its output in the log; its exit status, or None where its time ended first."""
        with open(self.folder / LOG, "a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = self.start(command, log, **variables)
            try:
                return process.wait(max(0.1, min(seconds, self.left())))
            except subprocess.TimeoutExpired:
                log.write(f"ended after {seconds:.0f} s\n")
                return None
            finally:
                end_group(process)

    def start(self, command: Sequence[str], log: Any, **variables: str) -> subprocess.Popen[Any]:
        """A process in a group of its own that verifies nothing by itself."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        return subprocess.Popen(
            command,
            cwd=environment.ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**outer, verification.VARIABLE: "0", **variables},
            **verification.OWN_GROUP,
        )

    def run_all(self, commands: Mapping[str, Sequence[str]], seconds: float, **variables: str) -> list[str]:
        """Run commands, as many at a time as there are workers; the names of those that failed, with the reason."""
        until = time.monotonic() + seconds

        def one(name: str) -> str:
            status = self.run(commands[name], until - time.monotonic(), **variables)
            return "" if status == 0 else f"{name}: {ending(status)}"

        with ThreadPoolExecutor(WORKERS) as pool:
            return [found for found in pool.map(one, commands) if found]

    def keep(self, verdict: dict[str, Any]) -> None:
        """Write a verdict, and strike its kernel if it is bad."""
        with self.lock:
            append(self.folder / VERDICTS, verdict)
            self.struck |= struck_by([verdict])


def ending(status: int | None) -> str:
    return "its time ended" if status is None else f"status {status}"


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started, whether it still runs or not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(2)
            time.sleep(0.05)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def struck_by(verdicts: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(line["op"], line["backend"], line["dtype"]) for line in verdicts if line["outcome"] in BAD}


class Unfinished(str):
    """The error of a step that the next call continues."""


@dataclass(frozen=True)
class Step:
    """A part of a call: its planned seconds, and what does it; it returns what went wrong, or ""."""

    name: str
    seconds: float
    do: Callable[[Session, float], str]


def record(
    steps: Sequence[Step],
    device: torch.device,
    folder: Path,
    seconds: float | None = None,
    operations: Sequence[str] = (),
    out: Path | None = None,
) -> int:
    """Run the steps that have not ended in this folder; 1 if one of them reports something wrong.

    A step may use what those before it left of their time. A step that cannot begin is left to the next call.

    Args:
        steps: of the call, in order.
        device: the GPU.
        folder: holds the results of earlier calls and receives the results of this one.
        seconds: the limit of the call; the sum of its steps' unless given.
        operations: only these; all unless given.
        out: where the files are copied after each step, so that a call that is killed leaves them there.
    """
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    describe(device, folder)
    ended = {line["step"] for line in read_lines(folder / STEPS) if line["event"] == "ended"}
    steps = [step for step in steps if step.name not in ended]
    limit = FACTOR * (seconds or sum(step.seconds for step in steps))
    session = Session(device, folder, begun + limit, operations=tuple(operations))
    session.struck = struck_by(read_lines(folder / VERDICTS))
    worst, planned = 0, begun
    for step in steps:
        planned += FACTOR * step.seconds
        left = min(planned - time.monotonic(), session.left())
        if left < min(2.0, step.seconds / 2):
            print(f"== {step.name}: not begun, the time of the call is over", flush=True)
            continue
        worst |= bool(_do(step, session, left))
        if out is not None:
            copy_out(folder, out)
    print(summary(folder), flush=True)
    return int(worst)


def _do(step: Step, session: Session, seconds: float) -> str:
    """Run one step; returns its error, or an empty string."""
    begun = time.monotonic()
    append(session.folder / STEPS, {"step": step.name, "event": "begun"})
    try:
        wrong = step.do(session, seconds)
    except Exception as error:  # a step must not cost those after it
        wrong = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    event = "unfinished" if isinstance(wrong, Unfinished) else "ended"
    append(session.folder / STEPS, {"step": step.name, "event": event, "seconds": round(took, 1), "wrong": wrong})
    print(f"== {step.name}: {took:.0f} s{f', {wrong[:400]}' if wrong else ''}", flush=True)
    return wrong


def describe(device: torch.device, folder: Path) -> None:
    """Write the device and the versions, once."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        path.write_text(json.dumps(environment.environment(device), indent=2) + "\n")


def copy_out(folder: Path, out: Path) -> None:
    """Copy the files, the last part of a long log."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            (out / name).write_bytes(content[-MAX_LOG:] if name == LOG else content)
