"""The CPU kernels compiled for aarch64 and executed by qemu-user, instead of the module `_cpu`.

`build_driver` compiles the kernels to a program. `environment` starts a process whose tensors are in memory that the
program maps too, and in which `python -m pytest -p tests.support.aarch64.plugin` runs tests on it.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from transformer_kernels.backends import build, cpu

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ADDRESS, BYTES = 0x10_0000_0000, 8 << 30  # of the tensors, in both processes
SOURCES = sorted(source for folder in build.CPU_FOLDERS for source in (build.CSRC / "cpu" / folder).glob("*.cpp"))
KERNELS = {source: re.findall(r"^TK_KERNEL\((\w+)\)", source.read_text(), re.MULTILINE) for source in SOURCES}
MEASURING = {"register_rate"}
"""Kernels that no test calls for their result."""


def missing() -> str:
    """What is not installed, with the remedy; empty where nothing is."""
    lacking = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    return f"needs {' and '.join(lacking)}: apt-get install g++-aarch64-linux-gnu qemu-user" if lacking else ""


def build_driver(folder: Path) -> Path:
    """Compiles every kernel, and the programs of this folder, into `folder`; returns the driver."""
    flags = [*build.CPU_FLAGS, build.OPTIMISATION, "-DTK_LEVEL=plain"]
    objects = []
    for source, kernels in KERNELS.items():
        unit = folder / f"{source.stem}.cpp"
        drives = "".join(f"DRIVE({kernel})\n" for kernel in kernels)
        unit.write_text(f'#include "{source}"\n#include "{HERE / "driver.h"}"\n{drives}')
        objects.append(build.Step.compile(folder / f"{source.stem}.o", unit, [COMPILER, *flags]))
    for source in (HERE / "driver.cpp", build.CSRC / "cpu" / "parallel.cpp"):
        objects.append(build.Step.compile(folder / f"{source.stem}.o", source, [COMPILER, *flags]))
    program = folder / "driver"
    linked = [COMPILER, "-static", *(str(step.target) for step in objects), "-o", str(program)]
    build._make(objects, build.Step(program, linked, [step.target for step in objects]))
    preloaded = [*shlex.split(build.find_host_compiler()), "-x", "c", "-shared", "-fPIC", "-O2"]
    source, target = HERE / "shared_tensors.c", folder / "shared_tensors.so"
    build.Step(target, [*preloaded, str(source), "-o", str(target), "-ldl"], [source]).run()
    return program


def environment(program: Path, file: Path) -> dict[str, str]:
    """Variables of a process whose tensors are in `file`, and whose kernels `program` executes."""
    with file.open("wb") as opened:
        opened.truncate(BYTES)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "LD_PRELOAD": str(program.parent / "shared_tensors.so"),
        "OMP_NUM_THREADS": "1",
        "TENSORS_ADDRESS": str(ADDRESS),
        "TENSORS_BYTES": str(BYTES),
        "TENSORS_FILE": str(file),
        "TENSORS_PROGRAM": str(program),
    }


class _Executed(Exception):
    """The driver has executed the call, which the compiled module is not to execute."""


class _Kernel:
    """A function of the module; like a compiled one it has a name and no Python code."""

    def __init__(self, execute: Any, compiled: Any, name: str) -> None:
        self._execute, self._compiled, self.__name__ = execute, compiled, name

    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        return self._execute(self._compiled, *arguments, **fields)


class Emulated:
    """The module `_cpu`, with every kernel executed by the driver. `executed` has the names of those called."""

    source_hash, vendor, processor = "", "", "plain"
    built = instruction_sets = ("plain",)

    def __init__(self) -> None:
        command = [EMULATOR, os.environ["TENSORS_PROGRAM"], os.environ["TENSORS_FILE"], str(ADDRESS), str(BYTES)]
        clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=clean
        )
        self._lock, self._local = threading.Lock(), threading.local()
        self._compiled = cpu.load()
        self.within = self._compiled.within
        self.executed: set[str] = set()
        for name in itertools.chain(*KERNELS.values()):
            if name not in MEASURING:
                setattr(self, name, _Kernel(self._execute, getattr(self._compiled, name), name))

    def instruction_set(self) -> str:
        return "plain"

    def use(self, name: str) -> None:
        if name != "plain":
            raise ValueError(f"the instruction set must be one that this processor has (plain); got {name}")

    def reproduce(self, on: bool) -> None:
        self.call("reproduce", (on,))

    def record_with(self, recorder: Any) -> Any:
        before, self._local.recorder = getattr(self._local, "recorder", None), recorder
        return before

    def _execute(self, compiled: Any, *arguments: Any, **fields: Any) -> Any:
        """Call or bind a kernel of the compiled module, whose recorder passes the call to the driver."""
        before = self._compiled.record_with(self._send)
        try:
            return functools.partial(self._execute, compiled(*arguments, **fields))
        except _Executed:
            return None
        finally:
            self._compiled.record_with(before)

    def _send(self, name: str, names: list[str], arguments: tuple[Any, ...]) -> None:
        if (recorder := getattr(self._local, "recorder", None)) is not None:
            recorder(name, names, arguments)
        self.call(name, arguments)
        raise _Executed

    def call(self, name: str, arguments: tuple[Any, ...]) -> None:
        line = " ".join([name, *_words(arguments)])
        with self._lock:
            assert self._driver.stdin is not None and self._driver.stdout is not None
            self._driver.stdin.write(line + "\n")
            answer = self._driver.stdout.readline().strip()
        self.executed.add(name)
        if answer != "done":
            raise RuntimeError(f"{name} on aarch64: {answer or f'ended with status {self._driver.wait()}'}: {line}")


def _words(values: Any) -> list[str]:
    """Numbers as the driver reads them, structures field by field."""
    words = []
    for value in values:
        if isinstance(value, tuple):
            words += _words(value)
        else:
            words.append(value.hex() if isinstance(value, float) else str(int(value)))
    return words
