"""The build and the installation: what is compiled, and the message of each fault."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from transformer_kernels.backends import build, cpu

ROOT = Path(__file__).resolve().parents[1]
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


# The runner


@needs_compiler
def test_only_what_changed_is_compiled_again(tmp_path):
    (tmp_path / "a header.h").write_text("#define VALUE 1\n")
    (tmp_path / "a.cpp").write_text('#include "a header.h"\nint a() { return VALUE; }\n')
    (tmp_path / "b.cpp").write_text("int b() { return 2; }\n")

    def compiled(*flags):
        objects = [
            build.Step.compile(tmp_path / f"{name}.o", tmp_path / f"{name}.cpp", [str(COMPILER), "-fPIC", *flags])
            for name in "ab"
        ]
        link = build._link([str(COMPILER)], objects, tmp_path / "both.so", [])
        again = {step.target.name for step in [*objects, link] if not step.is_current()}
        build._make(objects, link)
        return again

    assert compiled() == {"a.o", "b.o", "both.so"}
    assert compiled() == set()
    time.sleep(0.02)
    (tmp_path / "a header.h").write_text("#define VALUE 3\n")
    assert compiled() == {"a.o"}
    assert compiled("-O2") == {"a.o", "b.o"}
    (tmp_path / "b.cpp").write_text("int b() { return undeclared; }\n")
    for _ in range(2):  # a failure is not cached as done
        with pytest.raises(build.BuildError, match=r"(?s)failed:.*undeclared"):
            compiled("-O2")


# Instruction sets


def levels(monkeypatch, named, best="avx512_bf16"):
    monkeypatch.setenv("TRANSFORMER_KERNELS_CPU_LEVELS", named)
    monkeypatch.setattr(build, "_levels_of", lambda compiler: list(build.CPU_LEVELS))
    monkeypatch.setattr(build, "_best_level", lambda compiler: list(build.CPU_LEVELS).index(best))
    return build.cpu_levels(["g++"])


@pytest.mark.parametrize(
    ("named", "best", "wanted"),
    [
        ("", "avx512_bf16", "plain avx512 avx512_bf16"),
        ("native", "amx", "plain avx512 amx"),
        ("native", "avx512", "plain avx512"),
        ("native", "avx2", "plain avx2"),
        ("native", "plain", "plain"),
        ("present", "avx512", "plain avx2 avx512"),
        ("all", "plain", "plain avx2 avx512 avx512_bf16 amx"),
        ("amx, avx2", "plain", "plain avx2 amx"),
    ],
)
def test_instruction_sets_are_chosen(monkeypatch, named, best, wanted):
    assert levels(monkeypatch, named, best) == wanted.split()


def test_row_kernels_use_the_next_narrower_level():
    compilations = build._cpu_kernels(build.CSRC, ["plain", "avx512_bf16"])
    rows = {level for level, source, _ in compilations if source.parent.name == "rows"}
    products = {level for level, source, _ in compilations if source.parent.name == "products"}
    assert (rows, products) == ({"plain", "avx512"}, {"plain", "avx512_bf16"})


@pytest.mark.parametrize("named", ["native", "all", "present"])
def test_measuring_kernels_belong_to_an_in_place_build(monkeypatch, named):
    monkeypatch.setenv("TRANSFORMER_KERNELS_CPU_LEVELS", named)
    folders = {source.parent.name for _, source, _ in build._cpu_kernels(build.CSRC, ["plain", "avx2"])}
    assert folders == {"rows", "products", *(["measures"] if named == "present" else [])}


def test_a_list_with_an_unknown_level_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"must be native, present, all, none, or a list of plain, .*; got sse9"):
        levels(monkeypatch, "avx2,sse9")


def test_a_level_that_the_compiler_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_CPU_LEVELS", "amx")
    monkeypatch.setattr(build, "_levels_of", lambda compiler: ["plain", "avx2"])
    with pytest.raises(build.BuildError, match=r"g\+\+ does not compile for amx, .*: use a newer compiler"):
        build.cpu_levels(["g++"])


@needs_compiler
def test_a_processor_without_the_level_runs_the_portable_one(tmp_path, monkeypatch):
    """An environment copied from another machine: a module without a kernel, built for plain only."""
    csrc = tmp_path / "csrc"
    shutil.copytree(build.CSRC / "cpu", csrc / "cpu", ignore=shutil.ignore_patterns("rows", "products"))
    for name in ("module.h", "registry.h"):
        shutil.copy(build.CSRC / name, csrc / name)
    monkeypatch.setenv("TRANSFORMER_KERNELS_CPU_LEVELS", "plain")
    monkeypatch.setenv("CXX", str(COMPILER))
    monkeypatch.delenv(cpu.ENVIRONMENT_VARIABLE, raising=False)
    spec = importlib.util.spec_from_file_location("copied._cpu", build.build_cpu(tmp_path / "build", csrc=csrc))
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.instruction_sets, module.built, module.instruction_set()) == (("plain",), ("plain",), "plain")
    monkeypatch.setattr(cpu, "_module", module)
    if module.processor != "plain":
        assert f"this processor has {module.processor}, but they were built for plain: pip install" in cpu.describe()
        with pytest.raises(ValueError, match=r"\(plain\); got avx2; TRANSFORMER_KERNELS_CPU_LEVELS=all pip install"):
            module.use("avx2")


# The cache


def test_a_cache_that_cannot_be_written_to_names_the_variable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match=r"cannot be written to .*TRANSFORMER_KERNELS_CACHE"):
        build.private_folder(tmp_path / "file" / "emulation")


def test_folders_of_compiled_files_are_private(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o777)
    for name in ("new", "open"):
        assert build.private_folder(tmp_path / name).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "new").stat().st_uid + 1)
    with pytest.raises(build.BuildError, match=r"another user owns .*TRANSFORMER_KERNELS_CACHE"):
        build.private_folder(tmp_path / "new")


# Installing


def test_setup_without_nvcc_goes_on_and_says_so_in_one_line(tmp_path):
    result = run_setup(tmp_path, CUDA_HOME=str(tmp_path / "none"), PATH=path_without_nvcc())
    warnings = [line for line in result.stderr.splitlines() if "without the CUDA extension" in line]
    assert result.returncode == 0 and len(warnings) == 1 and "no nvcc" in warnings[0], result.stderr
    assert "installing without the CPU kernels" in result.stderr


def test_setup_with_nvcc_and_no_gpu_builds_nothing_and_leaves_a_note(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = run_setup(tmp_path, CUDA_HOME=str(tmp_path), PATH=path)
    assert result.returncode == 0 and "nvcc is there and no GPU" in result.stderr
    assert (tmp_path / "lib" / "transformer_kernels" / build.BUILD_NOTE).read_text().strip() == build.NO_GPU


def test_setup_with_a_failing_nvcc_shows_its_last_lines(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'unsupported host compiler' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    result = run_setup(tmp_path, CUDA_HOME=str(tmp_path), TRANSFORMER_KERNELS_CUDA_ARCHS="80")
    assert result.returncode == 0
    assert "without the CUDA extension" in result.stderr and "unsupported host compiler" in result.stderr
    result = run_setup(
        tmp_path, CUDA_HOME=str(tmp_path), TRANSFORMER_KERNELS_CUDA_ARCHS="80", TRANSFORMER_KERNELS_REQUIRE_CUDA="1"
    )
    assert result.returncode != 0 and "unsupported host compiler" in result.stderr


def path_without_nvcc():
    return os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(folder, "nvcc"))
    )


def run_setup(folder, **variables):
    """`setup.py build_ext` into a new folder, with these environment variables.

    The C++ compiler fails, because the CPU kernels, which an installation also builds, take minutes.
    """
    variables.setdefault("CXX", "false")
    for name in (
        "TRANSFORMER_KERNELS_CPU_LEVELS",
        "CUDA_PATH",
        "TRANSFORMER_KERNELS_REQUIRE_CUDA",
        "TRANSFORMER_KERNELS_CUDA_ARCHS",
    ):
        variables.setdefault(name, "")
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={folder}/lib", f"--build-temp={folder}/temp"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def test_setup_without_a_compiler_says_what_to_install(tmp_path):
    result = run_setup(tmp_path, CXX="", PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "without the CPU kernels: no C++ compiler was found: install g++, or name one in CXX" in result.stderr
    note = (tmp_path / "lib" / "transformer_kernels" / build.CPU_BUILD_NOTE).read_text()
    assert note.startswith("no C++ compiler was found")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo no such file; exit 1", "does not work: install g++, or name another one in CXX"),
        ('case "$*" in *-fsyntax-only*) ;; *) exit 1;; esac', "does not work: install g++ with its standard library"),
        (f'case "$*" in *" -c "*) echo out of memory; exit 1;; *) {COMPILER} "$@";; esac', "out of memory"),
    ],
    ids=["not at all", "no headers", "no kernel"],
)
@needs_compiler
def test_setup_with_a_broken_compiler_goes_on(tmp_path, script, sentence):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    result = run_setup(tmp_path, CXX=shlex.quote(str(compiler)), TRANSFORMER_KERNELS_CPU_LEVELS="native")
    assert result.returncode == 0, result.stderr
    assert "installing without the CPU kernels" in result.stderr and sentence in result.stderr


OTHER_MACHINE = """
import platform, runpy, sys
platform.machine, platform.system = lambda: sys.argv[1], lambda: sys.argv[2]
folder = sys.argv[3]
sys.argv = ["setup.py", "-q", "build", "--build-base", folder + "/build", "egg_info", "--egg-base", folder]
sys.argv += ["bdist_wheel", "--dist-dir", folder + "/dist"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("machine", "system", "remedy"),
    [
        ("aarch64", "Linux", "LEVELS=plain pip install . compiles those for NEON"),
        ("AMD64", "Windows", "runs every operation"),
    ],
)
def test_other_processors_get_pure_python(tmp_path, machine, system, remedy):
    environment = {**os.environ, "TRANSFORMER_KERNELS_CUDA_ARCHS": "none", "TRANSFORMER_KERNELS_CPU_LEVELS": ""}
    command = [sys.executable, "-c", OTHER_MACHINE, machine, system, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "installed")
    program = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
sys.modules["fcntl"] = sys.modules["resource"] = None
import torch, transformer_kernels as tk
import platform
from transformer_kernels.info import describe_installation
platform.machine, platform.system = lambda: sys.argv[1], lambda: sys.argv[2]
assert tk.explain("gelu", torch.ones(3)).chosen == "torch", tk.explain("gelu", torch.ones(3))
assert tk.gelu(torch.ones(3)).shape == (3,)
print(tk.__file__, describe_installation())
"""
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    result = subprocess.run(
        [sys.executable, "-c", program, machine, system],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and str(tmp_path) in result.stdout, result.stderr
    assert f"this is {machine} on {system}; the torch backend runs every operation" in result.stdout
    assert remedy in result.stdout and ("LEVELS=plain" in result.stdout) == (system != "Windows")


@pytest.mark.slow
def test_it_installs_without_a_network(tmp_path):
    """As setup.py describes: with the setuptools that is there."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "tests", "runs", "dist", "*.so"))
    environment = {
        **os.environ,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "TRANSFORMER_KERNELS_CUDA_ARCHS": "none",
        "TRANSFORMER_KERNELS_CPU_LEVELS": "none",
    }
    options = ["--no-index", "--no-build-isolation", "--no-deps", f"--target={tmp_path / 'installed'}"]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "installed" / "transformer_kernels" / "__init__.py").is_file()


SOURCES = {
    "cuda/module.cpp": "namespace transformer_kernels { int exported() { return 1; } }",
    "cuda/build_info.cpp": "",
    "cuda/whole.cu": 'namespace transformer_kernels { int exported(); } extern "C" int whole() '
    "{ return transformer_kernels::exported(); }",
    "cuda/broken.cu": "#error planted",
    "cuda/needs_broken.cu": 'namespace transformer_kernels { int broken(); } extern "C" int needs_broken() '
    "{ return transformer_kernels::broken(); }",
}


@needs_compiler
def test_a_source_that_fails_costs_itself_and_what_needs_it(tmp_path):
    """On a machine lent for minutes the other kernels are tested; an installation is all or nothing."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\nfor last; do :; done\nfor each; do case "$each" in *.cu) source=$each ;; esac; done\n')
    with open(nvcc, "a") as file:
        file.write('exec g++ -fPIC -x c++ -c "$source" -o "$last"\n')
    nvcc.chmod(0o755)
    csrc, library = tmp_path / "csrc", tmp_path / "lib"
    (csrc / "cuda").mkdir(parents=True)
    library.mkdir()
    (library / "libcudart_static.a").write_bytes(b"!<arch>\n")
    for name, text in SOURCES.items():
        (csrc / name).write_text(text + "\n")
    toolkit = build.Toolkit(nvcc, library=[library])
    with pytest.raises(build.BuildError, match="planted"):
        build.build_cuda(tmp_path / "all", toolkit, "90a", csrc)
    failed = []
    built = ctypes.CDLL(str(build.build_cuda(tmp_path / "some", toolkit, "90a", csrc, failed)))
    assert len(failed) == 1 and "planted" in failed[0]
    assert built.whole() == 1 and not hasattr(built, "needs_broken")
