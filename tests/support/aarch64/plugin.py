"""A plugin of pytest: the backend "cpu" is the kernels for aarch64, and the last line lists those that were called."""

from __future__ import annotations

from typing import Any

from tests.support.aarch64 import Emulated
from transformer_kernels.backends import cpu

_emulated = Emulated()
cpu._module = _emulated


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line("executed on aarch64: " + " ".join(sorted(_emulated.executed)))
