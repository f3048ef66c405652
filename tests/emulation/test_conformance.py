"""The primitives against the PTX ISA's tables and other definitions, emulated and on a device, which must agree."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kit import CONFORMANCE_FOLDER
from tests.emulation.programs import BUILDS, compile_for_device, run
from transformer_kernels.backends import build as _build


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=() if build == "plain" else pytest.mark.slow) for build in BUILDS]
)
def test_primitives_follow_their_definitions(build, architecture, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", str(architecture))
    result = run("conformance", build)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("wgmma from registers, two panels" in result.stdout) == (architecture == 90)


@pytest.mark.gpu
def test_the_device_gives_the_words_of_the_emulation(tmp_path, monkeypatch):
    major, minor = torch.cuda.get_device_capability()
    if CONFORMANCE_FOLDER in os.environ:  # both were made before (benchmarks/gpu/kit.py)
        program = Path(os.environ[CONFORMANCE_FOLDER]) / "conformance"
        expected = program.with_suffix(".txt").read_text()
    elif _build.find_toolkit() is None:
        pytest.skip("needs nvcc")
    else:
        program = tmp_path / "conformance"
        compile_for_device("conformance", f"{major}{minor}{'a' if major >= 9 else ''}", program)
        monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", f"{major}{minor}")
        expected = run("conformance", "plain").stdout
    device = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert device.stdout == expected, device.stderr
