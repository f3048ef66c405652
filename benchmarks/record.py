"""Build, test on the device and benchmark in order of value, within a time budget, with all results on disk.

It runs from a checkout, installs nothing and needs no network. The output folder contains environment.json, rows.jsonl,
tests.jsonl, kernels.json, fast_paths.jsonl and record.log; `merge` in results.py reads it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch

from benchmarks import environment, evidence, fast_paths
from benchmarks.runner import ENVIRONMENT, Budget, read_lines, supervise

LOG = "record.log"
KERNELS = "kernels.json"
STEPS = {"cuda": ("build", "test", "bench", "paths"), "cpu": ("bench",)}
ALL_STEPS = ("build", "test", "bench", "paths", "sanitize", "tune")
DEFAULT_BUDGET = {"cuda": 540.0, "cpu": 720.0}
BUILD_SHARE, TEST_SHARE, BENCH_SHARE, SANITIZE_SHARE = 0.35, 0.45, 0.8, 0.9
PARITY = ("tests/ops", "tests/test_autograd.py", "tests/test_models.py")
SESSIONS = (
    (1.0, ("tests/ptx/test_known_report.py", "tests/emulation/test_conformance.py", "-m", "gpu")),
    (0.75, (*PARITY, "-m", "not slow and not gpu", "-k", "triton or cuda")),
    (1.0, ("tests", "-m", "gpu", "--ignore=tests/emulation", "--ignore=tests/ptx")),
)
"""pytest sessions on a GPU, each with its share of the remaining time: what the emulation and the PTX interpreter leave
open, the parity suite of the GPU kernels, and the tests that require a GPU."""
LONGEST_TEST = 120
"""Seconds after which a test counts as hung and its worker is replaced, with pytest-xdist and pytest-timeout."""
TUNED = "triton_tiles.py"
SANITIZERS = ("memcheck", "racecheck", "synccheck")


def record(device: torch.device, out: Path, seconds: float, steps: Sequence[str], options: Sequence[str]) -> int:
    """Run the selected steps; returns 1 if a test failed, a tool reported an error, or nothing was built."""
    budget = Budget(seconds)
    out.mkdir(parents=True, exist_ok=True)
    described = environment.environment(device) | {"budget": seconds, "steps": list(steps)}
    (out / ENVIRONMENT).write_text(json.dumps(described, indent=2) + "\n")
    worst = 0
    with open(out / LOG, "a") as log:
        for step in steps:
            if budget.left() <= 0.0:
                print(f"the time budget ended before {step}")
                break
            print(f"== {step} ({budget.left():.0f} s left)", flush=True)
            if step == "build":
                worst |= build(device, log, budget.share(BUILD_SHARE))
            elif step == "test":
                later = "bench" in steps[steps.index(step) :]
                worst |= test(out, log, budget.share(TEST_SHARE if later else 1.0), described)
            elif step == "sanitize":
                worst |= sanitize(log, budget.share(SANITIZE_SHARE if step == steps[-1] else 0.5))
            elif step == "tune":
                command = [sys.executable, "-m", "benchmarks.tune_triton", "--out", str((out / TUNED).resolve())]
                worst |= int(_run(command, log, budget.share(SANITIZE_SHARE), dict(os.environ)) not in (0, None))
            elif step == "paths":
                command = [sys.executable, "-m", "benchmarks.fast_paths", "--out", str(out.resolve())]
                worst |= int(_run(command, log, budget.left(), dict(os.environ)) not in (0, None))
                print("\n".join(map(fast_paths.line, read_lines(out / fast_paths.RESULTS))))
            else:
                later = "paths" in steps[steps.index(step) :]
                supervise(device, out, budget.share(BENCH_SHARE if later else 1.0) - 3.0, options, log)
    print(f"recorded in {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return worst


def build(device: torch.device, log: IO[str], seconds: float) -> int:
    """Compile the CUDA kernels into the checkout, for the local GPU unless specified otherwise."""
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"{major}{minor}" + ("a" if major >= 9 else "")
    variables = {"TRANSFORMER_KERNELS_CUDA_ARCHS": architecture, "TRANSFORMER_KERNELS_REQUIRE_CUDA": "1", **os.environ}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    status = _run(command, log, seconds, variables)
    print("built the CUDA extension" if status == 0 else f"the CUDA extension was not built ({status}); see {LOG}")
    return int(status != 0)


def test(out: Path, log: IO[str], seconds: float, described: dict[str, object]) -> int:
    """Run the suite on the device; results are written as they are reported, the verdict per kernel at the end."""
    budget = Budget(seconds)
    path = out / evidence.TESTS
    path.unlink(missing_ok=True)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    variables = {**outer, evidence.VARIABLE: str(path.resolve())}
    parallel = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    if parallel and importlib.util.find_spec("pytest_timeout"):  # without workers a timeout would end the session
        parallel += [f"--timeout={LONGEST_TEST}", "--timeout-method=thread"]
    for share, session in SESSIONS:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.evidence", "-q", "--tb=short"]
        command += ["--continue-on-collection-errors", *parallel, *session]  # a missing package costs one file
        _run(command, log, budget.share(share), variables)
    tests = read_lines(path)
    (out / KERNELS).write_text(json.dumps(evidence.verdicts(tests, described, len(SESSIONS)), indent=2) + "\n")
    summed = evidence.summary(tests)
    print(", ".join(f"{summed.get(outcome, 0)} {outcome}" for outcome in evidence.RAN))
    for name, why in summed["failures"][:20]:
        print(f"  failed: {name}: {why.splitlines()[-1] if why else ''}")
    return int(summed.get("failed", 0) > 0)


def sanitize(log: IO[str], seconds: float) -> int:
    """Run compute-sanitizer over every kernel on small inputs."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        print("compute-sanitizer was not found")
        return 0
    budget, worst = Budget(seconds), 0
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else an overrun stays within a cached block
    for number, kind in enumerate(SANITIZERS):
        command = [tool, "--tool", kind, "--error-exitcode", "9", "--target-processes", "all", "--print-limit", "20"]
        command += [sys.executable, "-m", "benchmarks.sanitize"]
        status = _run(command, log, budget.left() / (len(SANITIZERS) - number), variables)
        verdict = {0: "clean", None: "time budget exceeded"}.get(status, f"errors found, see {LOG}")
        print(f"{kind}: {verdict}")
        worst |= int(status not in (0, None))
    return worst


def _run(command: Sequence[str], log: IO[str], seconds: float, variables: dict[str, str]) -> int | None:
    """Run a command with its output in the log; its exit status, or None if the time budget ended first."""
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    process = subprocess.Popen(
        command, cwd=environment.ROOT, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
    )
    try:
        return process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        _end_group(process)
        log.write(f"ended after {seconds:.0f} s\n")
        return None
    except BaseException:
        _end_group(process)
        raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command and its child processes, such as compilers and pytest's workers."""
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(3)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
