"""The primitives against the PTX ISA's tables and other definitions, emulated and on a device, which must agree."""

import subprocess

import pytest
import torch

from tests.emulation.programs import BUILDS, HERE, run
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
    toolkit = _build.find_toolkit()
    if toolkit is None:
        pytest.skip("needs nvcc")
    major, minor = torch.cuda.get_device_capability()
    gencode, _ = _build.gencode_flags(f"{major}{minor}{'a' if major >= 9 else ''}")
    includes = [f"-I{path}" for path in (_build.CSRC, HERE, *toolkit.include)]
    libraries = [f"-L{path}" for path in toolkit.library]
    program = str(tmp_path / "conformance")
    command = [str(toolkit.nvcc), "-std=c++17", "-O3", *gencode, *includes, *libraries]
    subprocess.run([*command, str(HERE / "conformance.cu"), "-o", program], check=True)
    device = subprocess.run([program], capture_output=True, text=True, check=False)
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", f"{major}{minor}")
    assert device.stdout == run("conformance", "plain").stdout, device.stderr
