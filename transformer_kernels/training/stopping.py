"""Why a run ends before its last step."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class TrainingDiverged(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


class Interrupted(Exception):
    """A signal ended the run, after a checkpoint was written."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum = signum


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is only noted; the second one ends the process at once."""

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
