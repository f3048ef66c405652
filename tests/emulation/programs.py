"""Compiles the small C++ programs of this folder against csrc, once for each state of the sources."""

import functools
import hashlib
import os
import shlex
import subprocess
from pathlib import Path

from transformer_kernels.backends import build as _build

HERE = Path(__file__).resolve().parent
BUILDS = ("plain", "address", "thread")


@functools.cache
def program(name, build):
    """The executable of tests/emulation/<name>.cu in one of the BUILDS."""
    sanitizer = "" if build == "plain" else build
    kernel_flags, own_flags, link_flags = _build.emulation_flags(sanitizer)
    sources = "".join((HERE / file).read_text() for file in (f"{name}.cu", "device_memory.h"))
    key = hashlib.sha256((sources + _build.source_hash(emulated=True)).encode()).hexdigest()[:16]
    folder = _build.cache_folder() / "tests"
    executable = folder / f"{name}-{build}-{key}"
    if executable.is_file():
        return executable
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(_build.find_host_compiler())
    temporary = folder / f"{executable.name}.{os.getpid()}"
    objects = []
    for source in [HERE / f"{name}.cu", *sorted(_build.CSRC.glob("emulation/*.cpp"))]:
        objects.append(f"{temporary}.{source.stem}.o")
        flags = kernel_flags if source.suffix == ".cu" else own_flags
        includes = [f"-I{_build.CSRC}", f"-I{HERE}"]
        _run([*compiler, "-x", "c++", *flags.split(), *includes, "-c", str(source), "-o", objects[-1]])
    _run([*compiler, *link_flags.split(), *objects, "-o", str(temporary), "-lpthread"])
    os.replace(temporary, executable)
    for path in objects:
        os.unlink(path)
    return executable


def compile_for_device(name, architecture, executable):
    """The executable of tests/emulation/<name>.cu for a GPU, by nvcc."""
    toolkit = _build.find_toolkit()
    if toolkit is None:
        raise _build.CompilerMissing(_build.NO_NVCC)
    includes = [f"-I{path}" for path in (_build.CSRC, HERE, *toolkit.include)]
    libraries = [f"-L{path}" for path in toolkit.library]
    command = [str(toolkit.nvcc), "-std=c++17", "-O3", *_build.gencode_flags(architecture)[0], *includes, *libraries]
    _run([*command, str(HERE / f"{name}.cu"), "-o", str(executable)])


def _run(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr[-3000:]}"


def run(name, build, *arguments):
    """Runs a program; a sanitizer's first report ends it with status 66."""
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:atexit_sleep_ms=0",
    }
    command = [str(program(name, build)), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "unexpected memory mapping" in result.stderr:  # an older ThreadSanitizer under a kernel with wider randomisation
        command = ["setarch", "--addr-no-randomize", *command]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return result
