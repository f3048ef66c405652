"""The record of a GPU in two calls of a few minutes each: what is correct first, then how fast it is.

    benchmarks/gpu.sh --first       smoke cases, conformance, parity, tests marked gpu, tables of the main kernels
    benchmarks/gpu.sh --second      failed tests alone, sanitizers, fast paths, compiled steps, the remaining rows

Both work in `runs/gpu`, which the second call continues: a step that ended is not repeated, one that broke off is.
Every step is a process group with a time limit, and writes its results as it has them. At the end the files are copied
to $OUT and a summary is printed last. Nothing is installed, and no network is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, evidence, fast_paths
from benchmarks.runner import ENVIRONMENT, ROWS, append, read_lines
from transformer_kernels import verification
from transformer_kernels.backends import dispatch
from transformer_kernels.verification import BAD

FOLDER = environment.ROOT / "runs" / "gpu"
KIT = environment.ROOT / "runs" / "gpu-kit"
STEPS, VERDICTS, LOG, SUMMARY = "steps.jsonl", "verdicts.jsonl", "record.log", "summary.txt"
FILES = (ENVIRONMENT, STEPS, VERDICTS, evidence.TESTS, ROWS, fast_paths.RESULTS, LOG)
"""What is copied to $OUT: seven files. kernels.json and summary.txt are made of them by `merge`."""
MAX_LOG = 8 << 20
BACKENDS = ("triton", "cuda")
WORKERS, TEST_SECONDS = 14, 30
PARITY = ("tests/ops", "tests/test_autograd.py", "tests/test_models.py")
MAX_RETRIED = 40


@dataclass
class Session:
    """One call: the device, the folder it works in, and when it must be over."""

    device: torch.device
    folder: Path
    deadline: float
    struck: set[tuple[str, str, str]] = field(default_factory=set)
    """(operation, backend, dtype) that a smoke case found to be wrong or dangerous: later steps leave them out."""

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def run(self, command: Sequence[str], seconds: float, **variables: str) -> int | None:
        """Run a command with its output in the log; its exit status, or None where its time ended first."""
        with open(self.folder / LOG, "a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
            process = subprocess.Popen(
                command,
                cwd=environment.ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**outer, verification.VARIABLE: "0", **variables},
                start_new_session=True,
            )
            try:
                return process.wait(max(0.1, min(seconds, self.left())))
            except subprocess.TimeoutExpired:
                log.write(f"ended after {seconds:.0f} s\n")
                return None
            finally:
                end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started, whether it still runs or not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(2)
            time.sleep(0.05)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@dataclass(frozen=True)
class Step:
    """A part of a call: at most `seconds`, and what does it; it returns what went wrong, or ""."""

    name: str
    seconds: float
    do: Callable[[Session, float], str]


# Steps


def build(session: Session, seconds: float) -> str:
    """Take the extension and Triton's cache of the kit if they fit these sources, else compile the extension."""
    architecture = "".join(map(str, torch.cuda.get_device_capability(session.device)))
    architecture += "a" if architecture >= "90" else ""
    module = KIT / "_kernels.abi3.so"
    if module.is_file() and (KIT / "hash.txt").read_text().split() == [environment.source_hash(), architecture]:
        for name in ("_kernels.abi3.so", "_kernels_source_hash.txt"):
            shutil.copy(KIT / name, environment.ROOT / "transformer_kernels" / name)
        check = "import transformer_kernels.backends.cuda as c; c.load()"
        if session.run([sys.executable, "-c", check], seconds) == 0:
            return ""
    variables = {"TRANSFORMER_KERNELS_CUDA_ARCHS": architecture, "TRANSFORMER_KERNELS_REQUIRE_CUDA": "1"}
    status = session.run([sys.executable, "setup.py", "build_ext", "--inplace"], seconds, **variables)
    return "" if status == 0 else f"the CUDA extension was not built ({status})"


def smoke(session: Session, seconds: float) -> str:
    """Every kernel in each dtype, forward and backward, in a process per family."""
    families: dict[tuple[str, str], list[verification.Case]] = {}
    for case in verification.cases():
        for backend in BACKENDS:
            if dispatch.family(dispatch.OPERATIONS[case.op].folder, backend) is not None:
                families.setdefault((backend, case.family), []).append(case)
    known = {(line["backend"], line["case"]) for line in read_lines(session.folder / VERDICTS)}
    until = time.monotonic() + seconds
    for (backend, _), cases in families.items():
        if (reason := dispatch.unavailable(backend, session.device)) is not None:
            print(f"  {backend}: {reason}")
            continue
        left = [case for case in cases if (backend, case.name) not in known]
        try:
            verification.verify(
                backend, session.device, left, until - time.monotonic(), 10.0, lambda v: keep(session, v)
            )
        except RuntimeError as error:
            print(f"  {error}")
    bad = [line for line in read_lines(session.folder / VERDICTS) if line["outcome"] in BAD]
    return f"{len(bad)} bad verdicts" if bad else ""


def keep(session: Session, verdict: verification.Verdict) -> None:
    """Write a verdict, and strike its kernel if it is bad."""
    append(session.folder / VERDICTS, asdict(verdict))
    session.struck |= struck_by([asdict(verdict)])


def struck_by(verdicts: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(line["op"], line["backend"], line["dtype"]) for line in verdicts if line["outcome"] in BAD}


def pytest(*arguments: str, workers: int = WORKERS, **variables: str) -> Callable[[Session, float], str]:
    """A step that runs tests whose kernels are not struck, each result written as it is reported."""

    def run(session: Session, seconds: float) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.evidence", "-q", "--tb=short"]
        command += ["--continue-on-collection-errors", *arguments]
        if importlib.util.find_spec("xdist") and workers > 1:
            command += ["-n", str(workers), "--maxschedchunk=1", "--maxprocesses=14", "--max-worker-restart=1000"]
        if importlib.util.find_spec("pytest_timeout"):
            command += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
        given = {
            evidence.VARIABLE: str((session.folder / evidence.TESTS).resolve()),
            evidence.STRUCK: json.dumps(sorted(session.struck)),
        }
        status = session.run(command, seconds, **given, **variables)
        return "" if status in (0, 5) else "its time ended" if status is None else f"pytest ended with {status}"

    return run


def bench(*options: str) -> Callable[[Session, float], str]:
    """A step that measures a part of the plan (benchmarks/plan.py)."""

    def run(session: Session, seconds: float) -> str:
        command = [
            sys.executable,
            "-m",
            "benchmarks.cli",
            "--device",
            str(session.device),
            "--out",
            str(session.folder),
        ]
        command += ["--budget", str(seconds - 2.0), "--strike", json.dumps(sorted(session.struck)), *options]
        before = len(read_lines(session.folder / ROWS))
        status = session.run(command, seconds)
        rows = len(read_lines(session.folder / ROWS)) - before
        return f"no row ({status})" if not rows else ""

    return run


def failures(session: Session, seconds: float) -> str:
    """Each failed test again, in a process of its own with launches that block."""
    until, wrong = time.monotonic() + seconds, 0
    tests = failed_tests(read_lines(session.folder / evidence.TESTS))[:MAX_RETRIED]
    for test in tests:
        if time.monotonic() >= until:
            return f"{len(tests)} failed tests, not all repeated"
        again = pytest(test, workers=1, CUDA_LAUNCH_BLOCKING="1", BENCHMARK_EVIDENCE_ALONE="1")
        wrong += bool(again(session, min(TEST_SECONDS, until - time.monotonic())))
    return f"{wrong} of {len(tests)} tests fail alone too" if wrong else ""


def failed_tests(tests: Iterable[dict[str, Any]]) -> list[str]:
    """The tests whose last result is a failure."""
    last = {test["test"]: test["outcome"] for test in tests if test["test"] != evidence.FINISHED}
    return [test for test, outcome in last.items() if outcome == "failed"]


def sanitizer(tool: str) -> Callable[[Session, float], str]:
    """A step that runs each family's kernels at one size under a tool of compute-sanitizer, a process per family."""

    def run(session: Session, seconds: float) -> str:
        program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if program is None:
            return "compute-sanitizer was not found"
        until, found = time.monotonic() + seconds, []
        families = sorted({case.family for case in verification.cases()})
        for number, name in enumerate(families):
            command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
            command += [sys.executable, "-m", "benchmarks.sanitize", "--family", name]
            command += ["--strike", json.dumps(sorted(session.struck))]
            share = (until - time.monotonic()) / (len(families) - number)
            status = session.run(command, share, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            if status != 0:
                found.append(f"{name}: {'its time ended' if status is None else f'status {status}'}")
        return "; ".join(found)

    return run


def paths(session: Session, seconds: float) -> str:
    """Each fast path on and off, in a process of its own."""
    until, wrong = time.monotonic() + seconds, []
    out = str(session.folder.resolve())
    for number in range(len(fast_paths.paths(torch.cuda.get_device_capability(session.device)))):
        command = [sys.executable, "-m", "benchmarks.fast_paths", "--out", out, "--path", str(number)]
        status = session.run(command, min(12.0, until - time.monotonic()))
        if status != 0:
            wrong.append(f"path {number}: {'its time ended' if status is None else f'status {status}'}")
    return "; ".join(wrong)


def counters(session: Session, seconds: float) -> str:
    """Hardware counters of the main kernels by ncu, if it is there."""
    program = shutil.which("ncu")
    if program is None:
        return "ncu was not found"
    command = [program, "--clock-control", "none", "--set", "basic", "--launch-count", "12"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--family", "attention"]
    status = session.run(command, seconds)
    return "" if status == 0 else f"ncu ended with {status}"


CONFORMANCE = ("tests/ptx/test_known_report.py", "tests/emulation/test_conformance.py")
GPU_TESTS = tuple(
    str(path.relative_to(environment.ROOT))
    for path in sorted((environment.ROOT / "tests").rglob("test_*.py"))
    if "mark.gpu" in path.read_text() and path.parent.name not in ("emulation", "ptx", "benchmarks")
)
"""Collecting all of them takes each worker longer than these take to run."""
FIRST = (
    Step("build", 60, build),
    Step("smoke", 60, smoke),
    Step("conformance", 15, pytest(*CONFORMANCE, "-m", "gpu")),
    Step("parity", 90, pytest(*PARITY, "-m", "not slow and not gpu", "-k", "triton or cuda")),
    Step("gpu tests", 30, pytest(*GPU_TESTS, "-m", "gpu and not big")),
    Step("attention", 90, bench("--part", "attention")),
    Step("rows", 50, bench("--part", "rows")),
    Step("training steps", 45, bench("--part", "steps")),
)
"""440 s in all."""
SECOND = (
    Step("failures alone", 30, failures),
    Step("big tests", 20, pytest(*GPU_TESTS, "-m", "big", workers=1)),
    Step("memcheck", 50, sanitizer("memcheck")),
    Step("racecheck", 35, sanitizer("racecheck")),
    Step("synccheck", 25, sanitizer("synccheck")),
    Step("fast paths", 45, paths),
    Step("compiled steps", 70, bench("--part", "compiled")),
    Step("remaining rows", 55, bench()),
    Step("counters", 20, counters),
)
"""350 s in all."""


# A call


def record(steps: Sequence[Step], device: torch.device, folder: Path = FOLDER, seconds: float | None = None) -> int:
    """Run the steps that have not ended in this folder; 1 if one of them reports something wrong.

    Args:
        steps: those of the call, in order.
        device: the GPU.
        folder: holds the results of earlier calls, and gets those of this one.
        seconds: the limit of the call; the sum of its steps' unless given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    describe(device, folder)
    session = Session(device, folder, time.monotonic() + (seconds or sum(step.seconds for step in steps)))
    session.struck = struck_by(read_lines(folder / VERDICTS))
    ended = {line["step"] for line in read_lines(folder / STEPS) if line["event"] == "ended"}
    worst = 0
    for step in steps:
        if step.name in ended:
            continue
        if session.left() < 2.0:
            print(f"== {step.name}: not begun, the time of the call is over", flush=True)
            continue
        begun = time.monotonic()
        append(folder / STEPS, {"step": step.name, "event": "begun"})
        try:
            wrong = step.do(session, min(step.seconds, session.left()))
        except Exception as error:  # a step must not cost those after it
            wrong = f"{type(error).__name__}: {error}"
        took = time.monotonic() - begun
        append(folder / STEPS, {"step": step.name, "event": "ended", "seconds": round(took, 1), "wrong": wrong})
        print(f"== {step.name}: {took:.0f} s{f', {wrong}' if wrong else ''}", flush=True)
        worst |= bool(wrong)
    print(summary(folder))
    return int(worst)


def describe(device: torch.device, folder: Path) -> None:
    """Write what the device and the versions are, once."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        path.write_text(json.dumps(environment.environment(device), indent=2) + "\n")


def broken_off(folder: Path) -> list[str]:
    """The steps that began and did not end: a call that was killed."""
    events: dict[str, str] = {line["step"]: line["event"] for line in read_lines(folder / STEPS)}
    return [step for step, event in events.items() if event == "begun"]


def is_whole(folder: Path) -> bool:
    """Whether the parity suite ended by itself: with failed tests or without, not by its time or a crash."""
    ended = [line for line in read_lines(folder / STEPS) if (line["step"], line["event"]) == ("parity", "ended")]
    return bool(ended) and ended[-1]["wrong"] in ("", "pytest ended with 1")


def summary(folder: Path) -> str:
    """What a person reads first: verdicts per backend and dtype, tests, the fastest rows beside their peers."""
    lines = ["", "verdicts of the smoke cases"]
    verdicts = read_lines(folder / VERDICTS)
    for backend in BACKENDS:
        for dtype in verification.DTYPES:
            found = [line for line in verdicts if (line["backend"], line["dtype"]) == (backend, dtype)]
            lines.append(f"  {backend:<7} {dtype:<9} {counted(found)}")
    lines += [f"  {each['backend']} {each['case']} {each['direction']}: {each['outcome']}: {each['why']}"[:160]
              for each in verdicts if each["outcome"] in BAD][:30]  # fmt: skip
    tests = [test for test in read_lines(folder / evidence.TESTS) if test["test"] != evidence.FINISHED]
    lines.append(f"tests: {counted(tests)}")
    lines += [f"  failed: {test}"[:160] for test in failed_tests(tests)[:20]]
    if broken := broken_off(folder):
        lines.append(f"broken off: {', '.join(broken)}")
    return "\n".join([*lines, *table(read_lines(folder / ROWS))])[-11000:]


def counted(results: Iterable[dict[str, Any]]) -> str:
    """The number of each outcome."""
    counts = Counter(result["outcome"] for result in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per workload: the time of each candidate, its TFLOP/s or GB/s or tokens/s."""
    workloads: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["status"] != "ok" or row["kind"] == "limit":
            continue
        shape = " ".join(f"{name}{size}" for name, size in row["shape"].items())
        key = (row["op"], row["case"], row["direction"], row["dtype"], shape)
        if row["kind"] == "step":
            rate = f"{row['tokens_per_second']:,.0f} tokens/s"
        elif "attention" in row["op"]:
            rate = f"{row['tflops']:.0f} TFLOP/s"
        else:
            rate = f"{row['gbps']:.0f} GB/s"
        workloads.setdefault(key, {})[row["candidate"].removeprefix("ours ")] = rate
    return [f"{' '.join(key)}: " + ", ".join(f"{name} {rate}" for name, rate in found.items())
            for key, found in workloads.items()]  # fmt: skip


def copy_out(folder: Path, out: Path) -> None:
    """Copy the files, the last part of a long log."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            (out / name).write_bytes(content[-MAX_LOG:] if name == LOG else content)


def plan_text() -> str:
    """The planned seconds of both calls."""
    lines = []
    for title, steps in (("first call", FIRST), ("second call", SECOND)):
        lines += [f"{title}: {sum(step.seconds for step in steps):.0f} s"]
        lines += [f"  {step.seconds:4.0f}  {step.name}" for step in steps]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    call = parser.add_mutually_exclusive_group(required=True)
    call.add_argument("--first", action="store_true", help="the first call")
    call.add_argument("--second", action="store_true", help="continues in the same folder")
    call.add_argument("--plan", action="store_true", help="print the planned seconds")
    parser.add_argument("--seconds", type=float, help="limit of the call (default: the sum of its steps)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: runs/gpu")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT"), help="where to copy the files (default: $OUT)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.plan:
        print(plan_text())
        return 0
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no GPU")
    if (KIT / "triton").is_dir():
        os.environ.setdefault("TRITON_CACHE_DIR", str(KIT / "triton"))
    status = record(FIRST if chosen.first else SECOND, torch.device("cuda", 0), chosen.folder, chosen.seconds)
    if chosen.out:
        copy_out(chosen.folder, Path(chosen.out))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
