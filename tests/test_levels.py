"""The lower levels of the CPU kernels pass the tests, with PyTorch restricted to the same level.

A process selects its level once, so every level runs in a separate pytest. The kernels of PyTorch, oneDNN and MKL are
restricted with it, so that a machine with AVX-512 computes the results of one without.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.day import EVERY
from transformer_kernels.backends import cpu

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
LEVELS = {
    "plain": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},  # MKL's SSE sums 50,257 terms in a row
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_bf16": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "amx": {},
}
"""Environment variables that restrict PyTorch, oneDNN and MKL to a level of this package."""
SAMPLE = (
    "tests/ops/test_cross_entropy.py::test_matches_reference_over_wide_rows",
    "tests/ops/test_every_operation.py",
    "tests/ops/test_attention.py::test_softcap",
    "tests/ops/test_softmax.py",
    "tests/ops/test_layer_norm.py",
)

pytestmark = pytest.mark.skipif(cpu.unavailable(CPU) is not None, reason="needs the CPU kernels")


def run_at(level, *arguments):
    """The last lines of a pytest in which the kernels and PyTorch use this level; skips unsupported levels."""
    own = cpu.load().instruction_set()
    if list(LEVELS).index(level) > list(LEVELS).index(own):
        pytest.skip(f"this processor's level is {own}")
    if level == own:
        pytest.skip(f"the suite already runs at {level}")
    environment = {**os.environ, **LEVELS[level], "TRANSFORMER_KERNELS_CPU_ISA": level, "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("level", ["plain", "avx2"])
def test_a_sample_passes_at_each_level(level):
    last = run_at(level, *SAMPLE, "-m", "not slow", "-k", "cpu and float32")
    assert " passed" in last, last


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_test_of_the_cpu_kernels_passes_at_each_level(level):
    """The tests of the CPU and of PyTorch; with TRANSFORMER_KERNELS_GATES_EVERY every n-th of their files."""
    files = sorted(path.as_posix() for path in (ROOT / "tests" / "ops").glob("test_*.py"))
    chosen = [str(ROOT / "tests" / "test_cpu.py"), *files][list(LEVELS).index(level) % EVERY :: EVERY]
    last = run_at(level, *chosen, "-m", "not slow", "-k", "cpu or torch")
    assert " passed" in last, last
