"""Interruptions of a training program from outside: signals before and after the loop, and the loss of its launcher.

Python raises KeyboardInterrupt wherever the main thread is: it can be lost in a callback, and it waits for code that
waits for another process. So a thread ends the process as soon as a signal has arrived.
"""

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

LIMIT = 40.0
"""Seconds without a sign of life after which a run ends; TRANSFORMER_KERNELS_PROCESS_TIMEOUT sets another value."""

_ends = threading.Lock()


def limit() -> float:
    """The limit of this run in seconds."""
    text = os.environ.get("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", "")
    try:
        seconds = float(text or LIMIT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"TRANSFORMER_KERNELS_PROCESS_TIMEOUT must be a positive number of seconds; got {text!r}")
    return seconds


class Launcher:
    """The process that started this one. It is lost when it has ended, or was stopped for half of the limit."""

    def __init__(self) -> None:
        self._pid = os.getppid()
        self._checked, self._stopped = time.monotonic(), 0.0
        self._lost_at: float | None = None

    def is_lost(self) -> bool:
        """Whether this process must end by itself. Reads the state of the launcher at most once a second."""
        now = time.monotonic()
        ended = os.getppid() != self._pid
        if not ended and (elapsed := now - self._checked) >= 1:
            self._checked = now  # this process may have been stopped, too
            self._stopped = self._stopped + min(elapsed, 2.0) if is_stopped(self._pid) else 0.0
        if not ended and self._stopped < limit() / 2:
            self._lost_at = None
            return False
        self._lost_at = self._lost_at or now
        return True

    def responds(self) -> bool:
        """Whether it runs now, and with it the store of its processes."""
        return os.getppid() == self._pid and not is_stopped(self._pid)

    @property
    def seconds_lost(self) -> float:
        """Seconds since it was found to be lost."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at


launcher = Launcher()


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended by a signal; False if this system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def process_of_rank(rank: int) -> int | None:
    """The id of the process of a rank that the same launcher has started on this machine."""
    for children in Path(f"/proc/{os.getppid()}").glob("task/*/children"):
        for pid in children.read_text().split():
            try:
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return int(pid)
            except OSError:
                continue
    return None


def is_training() -> bool:
    """Whether this program is `transformer-kernels train`, or `python -m transformer_kernels train`."""
    if sys.argv[1:2] != ["train"]:  # which is empty in a program that embeds Python
        return False
    name = sys.orig_argv[-len(sys.argv)] if sys.argv[0] == "-m" else Path(sys.argv[0]).stem
    return name in ("transformer_kernels", "transformer-kernels")


def end_on_signals() -> None:
    """From now on SIGINT and SIGTERM end this process with one line and status 130 or 143, unless it handles them.

    The loss of torchrun, which started this process, counts as SIGTERM.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for signum in SIGNALS:
        signal.signal(signum, _end)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _watch(reader: int) -> None:
    """End the process when a signal arrives that nothing else handles, even while the main thread waits."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    while True:
        found, _, _ = select.select([reader], [], [], 1.0 if launched else None)
        received = [*os.read(reader, 64)] if found else []
        if launched and launcher.is_lost():
            received.append(signal.SIGTERM)
            if launcher.seconds_lost > 0.75 * limit():
                _end_with("the launcher has ended or is stopped, and this process waits for it", signal.SIGTERM)
        for signum in [number for number in received if number in SIGNALS and signal.getsignal(number) is _end]:
            _end(signum)


def _end(signum: int, frame: Any = None) -> None:
    name = signal.Signals(signum).name
    _end_with(f"stopped by {name} outside of the training loop; no checkpoint was written", signum)


def _end_with(message: str, signum: int) -> None:
    if not _ends.acquire(blocking=False):  # the other thread ends the process
        return
    if _is_first_to_end():
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"transformer-kernels: {message}\n".encode())
    os._exit(128 + signum)


def _is_first_to_end() -> bool:
    """Whether this process is the first one to end of those that torchrun has started together here."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own:
        return True
    try:  # attempt_N/RANK/error.json
        os.close(os.open(Path(own).parents[1] / "stopped", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _forget() -> None:
    """In a forked process, which shares the pipe."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
