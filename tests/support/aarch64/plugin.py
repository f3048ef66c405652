"""A plugin of pytest: the backend "cpu" is the kernels for aarch64, and the last line lists those that were called."""

from tests.support.aarch64 import Emulated
from transformer_kernels.backends import cpu

_emulated = Emulated()
cpu._module = _emulated
cpu._fuses = lambda level: True


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("executed on aarch64: " + " ".join(sorted(_emulated.executed)))
