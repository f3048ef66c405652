"""The emulated kernels under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.

The CPU backend's kernels run under the first.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.day import in_turn, on_turn
from transformer_kernels.backends import build as _build

ROOT = Path(__file__).resolve().parents[2]
# Only code compiled with the sanitizer is checked, not torch's.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:exitcode=66", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0:ignore_noninstrumented_modules=1"},
}
EMULATED = ("row_kernels", "attention one_warp_ahead", "attention random")
"""Modules sanitized_*, that of attention with the schedule of its emulated threads."""
LIBRARY = {"address": "libasan.so", "thread": "libtsan.so"}


def run_sanitized(module, sanitizer, *arguments):
    """Runs a Python module with instrumented kernels and the sanitizer's run-time library preloaded."""
    compiler = _build.find_host_compiler().split()[0]
    library = subprocess.run(
        [compiler, f"-print-file-name={LIBRARY[sanitizer]}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip(f"{compiler} has no {LIBRARY[sanitizer]}")
    environment = {
        **os.environ,
        **OPTIONS[sanitizer],
        "LD_PRELOAD": library,
        "OMP_NUM_THREADS": "1",
        "TRANSFORMER_KERNELS_EMULATE": "1",
        "TRANSFORMER_KERNELS_EMULATE_SANITIZER": sanitizer,
    }
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in result.stderr:  # an older ThreadSanitizer under a kernel with wider randomisation
        command = ["setarch", "--addr-no-randomize", *command]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer, kernels", in_turn(itertools.product(OPTIONS, EMULATED), 3))
def test_kernels(sanitizer, kernels):
    _build.build_emulated(sanitizer)  # without the sanitizer's library, which slows down compilers
    module, *schedule = kernels.split()
    result = run_sanitized(f"tests.gates.sanitized_{module}", sanitizer, *schedule)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert "kernels ran" in result.stdout


@pytest.mark.slow
@on_turn(0)
def test_cpu_kernels(tmp_path):
    built = _build.build_cpu(tmp_path, "address")
    result = run_sanitized("tests.gates.sanitized_cpu_kernels", "address", str(built))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert "CPU kernels ran" in result.stdout
