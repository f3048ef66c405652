"""The steps of both calls, in the order of their value."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from benchmarks import environment, evidence, fast_paths
from benchmarks.gpu import BACKENDS, LOG, VERDICTS, kit
from benchmarks.gpu.session import WORKERS, Session, Step, Unfinished, ending
from benchmarks.gpu.summary import failed_tests, is_whole
from benchmarks.measure import identity
from benchmarks.plan import chosen, plan
from benchmarks.runner import ROWS, Budget, append, read_lines, watch
from transformer_kernels import verification
from transformer_kernels.backends import dispatch
from transformer_kernels.backends.triton import capability
from transformer_kernels.verification import BAD

TEST_SECONDS, CASE_SECONDS, PATH_SECONDS = 30, 20.0, 12.0
"""Limits for a hang: the first two include compilation."""
PARITY = ("tests/ops", "tests/test_autograd.py", "tests/test_models.py")
MAX_RETRIED = 40


def build(session: Session, seconds: float) -> str:
    """Take the extension and Triton's cache of the kit if they fit these sources, else compile the extension."""
    architecture = kit.architecture_of(session.device)
    used = kit.unpack(session.folder, architecture)
    with open(session.folder / LOG, "a") as log:
        log.write(f"kit: {used.describe()}\n")
    print(f"   kit: {used.describe()}", flush=True)
    if used.extension and session.run([sys.executable, "-c", kit.LOADS], seconds) == 0:
        return ""
    status = session.run([sys.executable, "-c", kit.COMPILES, architecture], seconds)
    if status is None:
        return Unfinished("the CUDA extension is not built yet: its time ended")
    return "" if status == 0 else f"the CUDA extension was not built, or not all of it (status {status})"


def smoke(session: Session, seconds: float) -> str:
    """Every kernel in each dtype, forward and backward: one process per family, in parallel."""
    families = without_verdict(session)
    for backend in BACKENDS:
        if (reason := dispatch.unavailable(backend, session.device)) is not None:
            print(f"   {backend}: {reason}", flush=True)
            families = {named: cases for named, cases in families.items() if named[0] != backend}
    until = time.monotonic() + seconds

    def one(named: tuple[str, str]) -> str:
        def keep(verdict: verification.Verdict) -> None:
            session.keep(asdict(verdict))

        left = until - time.monotonic()
        try:
            verification.verify(named[0], session.device, families[named], left, CASE_SECONDS, keep)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(WORKERS) as pool:
        wrong = [found for found in pool.map(one, families) if found]
    bad = sum(line["outcome"] in BAD for line in read_lines(session.folder / VERDICTS))
    wrong += [f"{bad} bad verdicts"] * bool(bad)
    if missed := sum(map(len, without_verdict(session).values())):
        return Unfinished("; ".join([*wrong, f"{missed} cases without a verdict"]))
    return "; ".join(wrong)


def without_verdict(session: Session) -> dict[tuple[str, str], list[verification.Case]]:
    """The smoke cases by backend and family."""
    known = {(line["backend"], line["case"]) for line in read_lines(session.folder / VERDICTS)}
    families: dict[tuple[str, str], list[verification.Case]] = {}
    for backend in BACKENDS:
        for case in verification.cases(session.operations or None):
            if (backend, case.name) not in known:
                families.setdefault((backend, case.family), []).append(case)
    return families


def pytest(*arguments: str, workers: int = WORKERS, **variables: str) -> Callable[[Session, float], str]:
    """A step that runs tests whose kernels are not struck, writing each result as it is reported.

    Tests that passed or failed in an earlier call or step are left out; `failures` repeats the latter.
    """

    def run(session: Session, seconds: float) -> str:
        paths = [argument for argument in arguments if argument.startswith("tests")]
        if session.operations:
            paths = [file for path in paths for file in _files_of(path, session.operations)]
            if not paths:
                return ""
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.evidence", "-q", "--tb=short"]
        command += ["--continue-on-collection-errors", *paths]
        command += [argument for argument in arguments if not argument.startswith("tests")]
        if importlib.util.find_spec("xdist") and workers > 1:
            command += ["-n", str(workers), "--maxschedchunk=1", "--max-worker-restart=1000"]
        if importlib.util.find_spec("pytest_timeout"):
            command += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
        results = session.folder / evidence.TESTS
        with tempfile.NamedTemporaryFile("w", suffix=".json") as known:
            json.dump([test["test"] for test in read_lines(results) if test["outcome"] in ("passed", "failed")], known)
            known.flush()
            given = {
                evidence.VARIABLE: str(results.resolve()),
                evidence.STRUCK: json.dumps(sorted(session.struck)),
                evidence.KNOWN: known.name,
            }
            status = session.run(command, seconds, **(given | variables))
        return "" if status in (0, 5) else "its time ended" if status is None else f"pytest ended with {status}"

    return run


def _files_of(path: str, operations: tuple[str, ...]) -> list[str]:
    """The files of tests below a path that are named after one of these operations; a test by itself."""
    if "::" in path:
        return [path]
    files = sorted((environment.ROOT / path).rglob("test_*.py"))
    names = {f"test_{op}{suffix}.py" for op in operations for suffix in ("", "_triton", "_cuda")}
    return [str(file.relative_to(environment.ROOT)) for file in files if file.name in names]


def bench(part: str | None = None, longest: float = 20.0) -> Callable[[Session, float], str]:
    """A step that measures a part of the plan (benchmarks/plan.py), or all; `longest` is a row's limit for a hang."""

    def run(session: Session, seconds: float) -> str:
        tasks = chosen(plan(session.device, part=part), session.operations, (), session.struck)
        if {task.key for task in tasks} <= {identity(row) for row in read_lines(session.folder / ROWS)}:
            return ""
        command = [sys.executable, "-m", "benchmarks.cli", "--device", str(session.device)]
        command += ["--out", str(session.folder), "--budget", str(seconds - 2.0), "--longest", str(longest)]
        command += ["--strike", json.dumps(sorted(session.struck)), *(["--part", part] if part else [])]
        command += [text for name in session.operations for text in ("--op", name)]
        before = len(read_lines(session.folder / ROWS))
        status = session.run(command, seconds)
        rows = len(read_lines(session.folder / ROWS)) - before
        return f"no row ({ending(status)})" if not rows else ""

    return run


def failures(session: Session, seconds: float) -> str:
    """Each failed test again, in a process of its own with launches that block."""
    until = time.monotonic() + seconds
    failed = failed_tests(read_lines(session.folder / evidence.TESTS))
    lock, wrong = threading.Lock(), []

    def one(test: str) -> None:
        left = until - time.monotonic()
        if left > 0.0:
            variables = {"CUDA_LAUNCH_BLOCKING": "1", evidence.KNOWN: os.devnull}
            if pytest("-p", "no:randomly", test, workers=1, **variables)(session, min(TEST_SECONDS, left)):
                with lock:
                    wrong.append(test)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, failed[:MAX_RETRIED]))
    return f"{len(wrong)} of {len(failed)} failed tests fail alone too" if wrong else ""


def sanitizer(tool: str) -> Callable[[Session, float], str]:
    """A step that runs each family's kernels at one size under a tool of compute-sanitizer, a process per family."""

    def run(session: Session, seconds: float) -> str:
        program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if program is None:
            return "compute-sanitizer was not found"
        commands = {}
        for name in sorted({case.family for case in verification.cases(session.operations or None)}):
            command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
            command += [sys.executable, "-m", "benchmarks.sanitize", "--family", name, "--device", str(session.device)]
            commands[name] = [*command, "--strike", json.dumps(sorted(session.struck))]
        return "; ".join(session.run_all(commands, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))

    return run


def paths(session: Session, seconds: float) -> str:
    """Each fast path on and off, one after another; a path that hangs or ends its process costs itself only."""
    if session.operations and "attention" not in session.operations:
        return ""
    count, wrong = len(fast_paths.paths(capability(session.device))), []
    budget, following = Budget(seconds), 0
    current = session.folder / "path"
    while following < count and budget.left() > 0.0:
        current.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.fast_paths", "--device", str(session.device)]
        command += ["--out", str(session.folder), "--begin", str(following), "--current", str(current)]
        with open(session.folder / LOG, "a") as log:
            reason = watch(session.start(command, log), current, budget, PATH_SECONDS)
        if reason is None or not current.is_file():
            wrong += [] if reason is None else [reason]
            break
        number = int(current.read_text())
        row = {"path": number, "verdict": "failed", "reason": reason}
        append(session.folder / fast_paths.RESULTS, row)
        wrong.append(f"path {number} {reason}")
        following = number + 1
    return "; ".join(wrong)


def counters(session: Session, seconds: float) -> str:
    """Hardware counters of the main kernels by ncu, if it is there."""
    program = shutil.which("ncu")
    if program is None:
        return "ncu was not found"
    command = [program, "--clock-control", "none", "--set", "basic", "--launch-count", "12"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--family", "attention", "--device", str(session.device)]
    status = session.run([*command, "--strike", json.dumps(sorted(session.struck))], seconds)
    return "" if status == 0 else f"ncu: {ending(status)}"


CONFORMANCE = ("tests/ptx/test_known_report.py", "tests/emulation/test_conformance.py")
GPU_TESTS = tuple(
    str(path.relative_to(environment.ROOT))
    for path in sorted((environment.ROOT / "tests").rglob("test_*.py"))
    if "mark.gpu" in path.read_text() and path.parent.name not in ("emulation", "ptx", "benchmarks")
)
"""Collecting all of them takes each worker longer than these take to run."""
parity = pytest(*PARITY, "-m", "not slow and not gpu", "-k", "triton or cuda")
FIRST = (
    Step("build", 60, build),
    Step("smoke", 60, smoke),
    Step("conformance", 15, pytest(*CONFORMANCE, "-m", "gpu")),
    Step("parity", 90, parity),
    Step("gpu tests", 30, pytest(*GPU_TESTS, "-m", "gpu and not big")),
    Step("attention", 90, bench("attention")),
    Step("rows", 50, bench("rows")),
    Step("training steps", 45, bench("steps")),
)
"""440 s in all."""
SECOND = (
    Step("failures alone", 25, failures),
    Step("remaining parity", 25, lambda session, seconds: "" if is_whole(session.folder) else parity(session, seconds)),
    Step("big tests", 20, pytest(*GPU_TESTS, "-m", "big", workers=1)),
    Step("memcheck", 45, sanitizer("memcheck")),
    Step("racecheck", 30, sanitizer("racecheck")),
    Step("synccheck", 20, sanitizer("synccheck")),
    Step("fast paths", 45, paths),
    Step("compiled steps", 70, bench("compiled", longest=60.0)),
    Step("remaining rows", 50, bench()),
    Step("counters", 20, counters),
)
"""350 s in all."""
CALLS = {"first": FIRST, "second": (*FIRST, *SECOND)}
"""The second call begins with the steps of the first that have not ended."""


def plan_text() -> str:
    """The planned seconds of both calls."""
    lines = []
    for title, steps in (("first call", FIRST), ("second call", SECOND)):
        lines += [f"{title}: {sum(step.seconds for step in steps):.0f} s"]
        lines += [f"  {step.seconds:4.0f}  {step.name}" for step in steps]
    return "\n".join(lines)


def limit(call: str) -> float:
    """The seconds of a call; the seconds of the second call also if it begins with steps of the first."""
    return sum(step.seconds for step in (FIRST if call == "first" else SECOND))
