"""Faults of the compiled extension: the package remains importable, and the error has cause and remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.compilers.machine_code import disassembled, disassembler
from transformer_kernels.backends import build as _build
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends.errors import BackendUnavailable

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch):
    """The extension before its first use, not emulated."""
    monkeypatch.setattr(_extension, "_module", None)
    monkeypatch.setattr(_extension, "_failure", None)
    monkeypatch.setattr(_extension, "_device_reasons", {})
    monkeypatch.delenv("TRANSFORMER_KERNELS_EMULATE", raising=False)
    return monkeypatch


def test_not_built(fresh, tmp_path):
    fresh.setattr(_extension, "_built_file", lambda: None)
    fresh.setattr(_extension, "PACKAGE", tmp_path)  # without a note of the installation
    reason = _extension.unavailable(CUDA)
    assert reason is not None and "not built" in reason and "pip install" in reason
    with pytest.raises(BackendUnavailable, match="not built"):
        _extension.load()


@pytest.mark.parametrize(
    ("device", "emulate", "part"),
    [(CPU, "0", "TRANSFORMER_KERNELS_EMULATE=1"), (CUDA, "1", "unset it"), (torch.device("meta"), "0", "meta")],
    ids=str,
)
def test_why_a_device_is_not_served(fresh, device, emulate, part):
    fresh.setenv("TRANSFORMER_KERNELS_EMULATE", emulate)
    assert part in (_extension.unavailable(device) or "")


@pytest.mark.parametrize("content", [b"", b"\x7fELF truncated", b"not a library at all"], ids=["empty", "cut", "text"])
def test_a_broken_file(fresh, tmp_path, content):
    path = tmp_path / "_kernels.so"
    path.write_bytes(content)
    fresh.setattr(_extension, "_built_file", lambda: path)
    with pytest.raises(BackendUnavailable, match="does not load") as caught:
        _extension.load()
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(BackendUnavailable) as again:  # cached, with its cause
        _extension.load()
    assert again.value.__cause__ is caught.value.__cause__
    assert _extension.cause() is caught.value.__cause__


def test_a_foreign_file(fresh, tmp_path):
    """A valid library that is not this module: it has no initialiser of the expected name."""
    import _struct

    path = tmp_path / "_kernels.so"
    if not getattr(_struct, "__file__", None):
        pytest.skip("this Python has its extension modules built in")
    shutil.copy(_struct.__file__, path)
    fresh.setattr(_extension, "_built_file", lambda: path)
    with pytest.raises(BackendUnavailable, match="does not load"):
        _extension.load()


class _Built:
    source_hash = "0123456789abcdef0123"


def test_a_stale_file(fresh, tmp_path):
    fresh.setattr(_extension, "_built_file", lambda: tmp_path / "_kernels.so")
    fresh.setattr(_extension, "_import_from", lambda path: _Built())
    with pytest.raises(BackendUnavailable, match=r"other sources \(0123456789abcdef, expected") as caught:
        _extension.load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_installed_file_is_compared_with_the_recorded_hash(fresh, tmp_path):
    fresh.setattr(_extension, "_built_file", lambda: tmp_path / "_kernels.so")
    fresh.setattr(_extension, "_import_from", lambda path: _Built())
    fresh.setattr(_build, "CSRC", tmp_path / "absent")
    (tmp_path / _extension.HASH_FILE).write_text(_Built.source_hash + "\n")
    assert _extension.load().source_hash == _Built.source_hash
    fresh.setattr(_extension, "_module", None)
    (tmp_path / _extension.HASH_FILE).write_text("something else\n")
    with pytest.raises(BackendUnavailable, match="other sources"):
        _extension.load()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("no kernel image for sm_75", ("sm_75", "sm_80 sm_90a compute_80", "TRANSFORMER_KERNELS_CUDA_ARCHS")),
        ("the driver supports CUDA up to 11.4; update the driver", ("up to 11.4; update the driver",)),
    ],
)
def test_a_gpu_that_cannot_run_it(fresh, problem, message):
    class Module:
        architectures = "sm_80 sm_90a compute_80"

        @staticmethod
        def device_problem(index):
            return problem

    fresh.setattr(_extension, "_module", Module)
    reason = _extension.unavailable(CUDA)
    assert reason is not None and all(part in reason for part in message)
    assert ("ARCHS" in reason) == ("image" in problem)


def test_emulation_without_sources(fresh, tmp_path):
    with pytest.raises(_build.CompilerMissing, match="checkout or the sdist"):
        _build.build_emulated(csrc=tmp_path / "absent")


def test_an_unknown_sanitizer(fresh):
    fresh.setenv("TRANSFORMER_KERNELS_EMULATE", "1")
    fresh.setenv("TRANSFORMER_KERNELS_EMULATE_SANITIZER", "memory")
    with pytest.raises(BackendUnavailable, match="address or thread"):
        _extension.load()


def test_the_hash_sees_names_and_contents(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "emulation").mkdir()
    source = tmp_path / "cuda" / "a.cu"
    source.write_text("one")
    first = _build.source_hash(tmp_path)
    (tmp_path / "README.md").write_text("prose")
    (tmp_path / "emulation" / "engine.cpp").write_text("of the CPU only")
    assert _build.source_hash(tmp_path) == first
    assert _build.source_hash(tmp_path, emulated=True) != first
    source.write_text("two")
    changed = _build.source_hash(tmp_path)
    source.rename(tmp_path / "cuda" / "b.cu")
    assert len({first, changed, _build.source_hash(tmp_path)}) == 3


def included(sources: list[Path]) -> set[Path]:
    """Sources and all that they include from csrc."""
    found: set[Path] = set()
    while sources:
        found |= {*sources}
        names = [(path, name) for path in sources for name in re.findall(r'#include "(.*)"', path.read_text())]
        sources = [*{(path.parent / name).resolve() for path, name in names} - found]
        sources = [path for path in sources if path.is_file()]
    return found


@pytest.mark.parametrize("kind", ["cpu", "gpu", "emulated"])
def test_the_hash_is_of_all_that_is_compiled(kind, monkeypatch):
    monkeypatch.setattr(_build, "_digest", lambda csrc, paths: {path.resolve() for path in paths})
    hashed = _build.cpu_source_hash() if kind == "cpu" else _build.source_hash(emulated=kind == "emulated")
    own = {"cpu": ["cpu/**/*.cpp"], "gpu": ["cuda/**/*.c*"], "emulated": ["cuda/**/*.c*", "emulation/*.cpp"]}
    sources = [path for pattern in own[kind] for path in _build.CSRC.glob(pattern)]
    if kind == "gpu":  # headers of the emulation are behind a condition
        hashed |= set(_build.CSRC.glob("emulation/*"))
    assert len(sources) > 10 and included(sources) <= hashed


def test_architectures_are_read():
    flags, names = _build.gencode_flags("8.0; sm_90a,80+PTX")
    assert names == "sm_80 sm_90a compute_80"
    assert flags[0] == "-gencode=arch=compute_80,code=sm_80" and flags[2].endswith("=compute_80,code=compute_80")
    assert _build.gencode_flags("compute_80") == (["-gencode=arch=compute_80,code=compute_80"], "compute_80")
    release = _build.gencode_flags(_build.RELEASE_ARCHITECTURES)[1]
    assert release == "sm_80 sm_90a sm_100 sm_120 compute_100"
    assert _build.gencode_flags("120+PTX") == (
        ["-gencode=arch=compute_120,code=sm_120", "-gencode=arch=compute_120,code=compute_120"],
        "sm_120 compute_120",
    )
    assert _build.gencode_flags("100a;120")[0][1] == "-gencode=arch=compute_120,code=sm_120"
    for gpu in (80, 86, 89, 90, 100, 103, 120, 121):  # machine code runs on its generation from its own number on
        assert any(gpu // 10 == code // 10 and gpu >= code for code in map(int, re.findall(r"sm_(\d+)", release)))
    for bad in ("", "hopper", "90+SASS"):
        with pytest.raises(ValueError, match="TRANSFORMER_KERNELS_CUDA_ARCHS"):
            _build.gencode_flags(bad)


def test_kernels_of_one_gpu_are_compiled_for_it_alone(tmp_path, monkeypatch):
    (tmp_path / "libcudart_static.a").touch()
    toolkit = _build.Toolkit(tmp_path / "nvcc", library=[tmp_path])
    monkeypatch.setattr(_build, "_compression", lambda nvcc: [])
    commands: dict[str, Any] = {}

    def noted(objects, jobs=None, failed=None):
        commands.update({step.target.stem: step.command for step in objects})
        return objects

    monkeypatch.setattr(_build, "_compile", noted)
    monkeypatch.setattr(_build, "_link", Mock())
    for architectures, wanted in (("release", ["sm_90a"]), ("80;100", ["sm_80", "sm_100"])):
        named = _build.RELEASE_ARCHITECTURES if architectures == "release" else architectures
        _build.build_cuda(tmp_path / architectures, toolkit, named)
        assert re.findall(r",code=(\w+)", " ".join(commands["attention_sm90"])) == wanted
        assert set(_build.gencode_flags(named)[0]) < set(commands["attention"])


@pytest.mark.slow
def test_the_code_for_sm_120_does_not_depend_on_whose_ptx_it_is_made_of(tmp_path):
    toolkit = _build.find_toolkit()
    if toolkit is None or disassembler() is None:
        pytest.skip("no nvcc or no cuobjdump")
    codes = []
    for architectures in ("100;120", "120"):
        target = tmp_path / f"{architectures}.cubin"
        flags = [f"-I{folder}" for folder in (*toolkit.include, sysconfig.get_paths()["include"])]
        flags += ["-std=c++17", "-O3", _build.gencode_flags(architectures)[0][-1]]
        source = _build.CSRC / "cuda" / "launchers" / "gelu.cu"
        subprocess.run([toolkit.nvcc, *flags, "-cubin", source, "-o", target], check=True)
        codes.append(disassembled(target))
    assert len(codes[0]) == 24 and codes[0] == codes[1]


@pytest.fixture
def nvidia_smi(fresh, tmp_path):
    """Puts a program of that name first on PATH, and nvcc into CUDA_HOME."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    fresh.setenv("CUDA_HOME", str(tmp_path))
    fresh.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    fresh.delenv("TRANSFORMER_KERNELS_CUDA_ARCHS", raising=False)

    def install(script):
        path = tmp_path / "bin" / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return install


def test_an_installation_builds_for_the_gpus_that_are_there(nvidia_smi, monkeypatch):
    nvidia_smi("echo 9.0; echo 8.6; echo 9.0; echo '[N/A]'")
    assert _build.wanted_architectures() == ("86;90a", "the GPUs of the machine it was installed on")
    nvidia_smi("echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert _build.wanted_architectures() == ("", _build.NO_GPU)
    monkeypatch.setenv("TRANSFORMER_KERNELS_CUDA_ARCHS", "80;89")
    assert _build.wanted_architectures() == ("80;89", "TRANSFORMER_KERNELS_CUDA_ARCHS is 80;89")
    monkeypatch.setenv("TRANSFORMER_KERNELS_CUDA_ARCHS", "release")
    assert _build.wanted_architectures()[0] == _build.RELEASE_ARCHITECTURES
    monkeypatch.setenv("TRANSFORMER_KERNELS_CUDA_ARCHS", "none")
    assert _build.wanted_architectures() == ("", _build.NOT_WANTED)


def test_the_error_says_what_the_installation_did(fresh, tmp_path):
    fresh.setattr(_extension, "PACKAGE", tmp_path)
    with pytest.raises(BackendUnavailable, match="is not built: no nvcc"):
        _extension.load()
    fresh.setattr(_extension, "_failure", None)
    (tmp_path / _build.BUILD_NOTE).write_text(_build.NO_GPU + "\n")
    with pytest.raises(
        BackendUnavailable, match=r"is not built: nvcc is there and no GPU .*CUDA_ARCHS=90a pip install"
    ):
        _extension.load()


def test_emulation_without_pythons_headers(fresh, tmp_path):
    fresh.setenv("TRANSFORMER_KERNELS_EMULATE", "1")
    fresh.setenv("TRANSFORMER_KERNELS_CACHE", str(tmp_path))
    fresh.setattr(_build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BackendUnavailable, match=r"Python.h was not found in .*: install .*python3-dev"):
        _extension.load()


def test_threads_that_come_together_build_and_load_once(fresh):
    calls: list[int] = []

    def load_slowly():
        calls.append(1)
        return object()

    fresh.setattr(_extension, "_load_built", load_slowly)
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: _extension.load(), range(32)))
    assert len(calls) == 1 and len(set(map(id, modules))) == 1


FAKE_SOURCES = {
    "module.cpp": "const char* source_hash(); const char* used() { return source_hash(); }\n",
    "build_info.cpp": "const char* source_hash() { return TK_SOURCE_HASH; }\n",
}


@pytest.mark.slow
def test_processes_that_come_together_both_get_the_file(tmp_path):
    csrc = tmp_path / "csrc"
    (csrc / "cuda").mkdir(parents=True)
    for name, text in FAKE_SOURCES.items():
        (csrc / "cuda" / name).write_text(text)
    program = (
        "import sys; from pathlib import Path; from transformer_kernels.backends import build as _build;"
        "print(_build.build_emulated(csrc=Path(sys.argv[1])))"
    )
    environment = {**os.environ, "TRANSFORMER_KERNELS_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(csrc)], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    paths = {process.communicate()[0].decode().strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1 and Path(paths.pop()).is_file()
