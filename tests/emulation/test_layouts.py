"""Fragments, tiles in shared memory and descriptors against CuTe, whose headers the package nvidia-cutlass has."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.emulation.programs import HERE, program
from transformer_kernels.backends import build as _build


@pytest.fixture
def cute():
    package = importlib.util.find_spec("cutlass_library")
    headers = Path(package.origin).parent / "source" / "include" if package and package.origin else Path()
    if not (headers / "cute").is_dir():
        pytest.skip("needs CuTe's headers: pip install --no-deps nvidia-cutlass")
    return headers


@pytest.mark.slow
def test_layouts_are_those_of_cute(cute, tmp_path):
    toolkit = _build.find_toolkit()
    if toolkit is None:
        pytest.skip("needs nvcc, for CUDA's headers")
    printer = str(tmp_path / "cute_layouts")
    flags = ["-x", "c++", "-std=c++17", "-O0", "-w", *(f"-I{path}" for path in (cute, *toolkit.include))]
    subprocess.run([str(toolkit.nvcc), *flags, str(HERE / "cute_layouts.cpp"), "-o", printer], check=True)
    printed = subprocess.run([printer], capture_output=True, text=True, check=True).stdout
    integers = "\n".join(line for line in printed.splitlines() if line.isdigit())  # and complaints that this is no GPU
    environment = {**os.environ, "TRANSFORMER_KERNELS_EMULATE_ARCH": "90"}
    command = [str(program("layouts", "plain"))]
    result = subprocess.run(command, input=integers, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok") == 11
