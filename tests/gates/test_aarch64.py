"""The CPU kernels compiled for aarch64, with NEON, pass the tests of the backend "cpu" under qemu-user."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import aarch64
from tests.support.day import EVERY

ROOT = Path(__file__).resolve().parents[2]
REST = (
    "tests/ops/test_every_operation.py",
    "tests/ops/test_attention_tangent.py::test_absent_tangents",
    "tests/ops/test_embedding.py",
    "tests/ops/test_linear.py",
    "tests/ops/test_rotary.py",
    "tests/ops/test_cross_entropy.py",
    "tests/test_dropout.py::test_drops_what_the_reference_drops",
    "tests/test_cpu.py::test_vector_functions_keep_their_bounds",
    "tests/graphs/test_fusion.py",
    "tests/graphs/test_masks.py::test_the_structure_is_used_in_replays",
)
"""With them every kernel is called."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(aarch64.missing() != "", reason=aarch64.missing())]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return aarch64.build_driver(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture
def tensors(tmp_path):
    yield tmp_path / "tensors"
    (tmp_path / "tensors").unlink()


def run(driver, tensors, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *arguments]
    environment = {**aarch64.environment(driver, tensors), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-p", "tests.support.aarch64.plugin", "-m", "not slow"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_passes_the_tests_of_its_operation(driver, tensors):
    """In float32 with TRANSFORMER_KERNELS_GATES_EVERY, else in every dtype."""
    chosen = f"{'cpu and float32' if EVERY > 1 else 'cpu'} or absent or structure or drops or vector or fusion"
    files = REST if EVERY > 1 else ("tests/ops", *REST[-4:])
    result = run(driver, tensors, *files, "-k", chosen)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    executed = result.stdout.split("executed on aarch64: ")[1].splitlines()[0].split()
    wanted = {kernel for kernels in aarch64.KERNELS.values() for kernel in kernels} - aarch64.MEASURING
    assert {*executed} == wanted


def test_runs_end_with_the_weights_of_x86(driver, tensors):
    """In reproducible mode; what PyTorch computes is computed by its library for x86."""
    name = "tests/test_reproducible.py::test_weights_have_the_same_bits_at_each_instruction_set"
    result = run(driver, tensors, name)
    assert result.returncode == 0 and "5 passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]
