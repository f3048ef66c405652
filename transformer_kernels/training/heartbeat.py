"""Notices a process of a run that is stopped or cannot be reached."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from transformer_kernels._interruption import is_stopped, process_of_rank

JOINING = 5
"""Multiple of the limit for a process that has not begun, unless it is stopped: it may still import its libraries."""


class Heartbeat(threading.Thread):
    """Counts in the store of the process group, and ends this process if another one stops counting.

    Args:
        store: with a connection of its own, whose calls wait for each other; each returns at once.
        rank, count: of this process, and of all.
        limit: in seconds.
        end: called with the error message in one process and an empty one in the others, and with the lost ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        count: int,
        limit: float,
        end: Callable[[str, Sequence[int]], None] | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._rank, self._count, self._limit = store, rank, count, limit
        self._end = end or _end
        self._done = threading.Event()

    def run(self) -> None:
        interval = self._limit / 12
        begun = time.monotonic()
        seen = dict.fromkeys(set(range(self._count)) - {self._rank}, (0, begun))
        last = begun
        while not self._done.wait(interval):
            now = time.monotonic()
            try:
                self._store.add(f"beats of {self._rank}", 1)
                beats = {rank: self._store.add(f"beats of {rank}", 0) for rank in seen}
                left = {rank for rank in seen if self._store.add(f"{rank} has left", 0)}
            except RuntimeError:  # the launcher, which has the store, has ended: the run saves and ends by itself
                if not self._done.wait(self._limit):
                    self._end(f"the launcher has ended, and this process has not for {self._limit:.0f} s", ())
                return
            suspended = now - last > self._limit / 2  # this process was stopped, and perhaps all were
            last = now
            for rank, number in beats.items():
                if suspended or number != seen[rank][0] or rank in left:
                    seen[rank] = number, now
            late = [rank for rank, (_, when) in seen.items() if now - when > self._limit]
            limits = {rank: self._limit_of(rank, seen[rank][0]) for rank in late}
            lost = sorted(rank for rank in late if now - seen[rank][1] > limits[rank])
            if lost:
                speaker = min(set(range(self._count)) - set(lost) - left)
                names = ", ".join(map(str, lost))
                self._end(
                    f"process {names} has not responded for {limits[lost[0]]:.0f} s: it is stopped or cannot be"
                    " reached; continue the run with --resume"
                    if speaker == self._rank
                    else "",
                    lost,
                )
                return

    def _limit_of(self, rank: int, beats: int) -> float:
        """The seconds after which another process is lost."""
        pid = None if beats else process_of_rank(rank)
        return self._limit if beats or (pid is not None and is_stopped(pid)) else JOINING * self._limit

    def leave(self) -> None:
        """Say that this process needs no longer be watched."""
        self._done.set()
        self.join(1)
        if self.is_alive():  # the launcher, which has the store, does not respond
            return
        try:
            self._store.add(f"{self._rank} has left", 1)
        except RuntimeError:  # the launcher has ended
            return


def _end(message: str, lost: Sequence[int]) -> None:
    """End the process, whose main thread may wait for a lost one, and lost ones on this machine.

    A launcher would wait for half a minute before it kills a process that is stopped.
    """
    if message:
        print(f"transformer-kernels: error: {message}", file=sys.stderr, flush=True)
    for rank in lost:
        if (pid := process_of_rank(rank)) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    os._exit(1)
