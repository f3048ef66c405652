"""The record of a GPU, rehearsed without one: steps that hang, fault or are killed cost nothing but themselves."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from benchmarks import evidence, gpu
from benchmarks.gpu import session, steps, summary
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.session import Session, Step, record
from benchmarks.plan import Task, chosen
from benchmarks.runner import ROWS, append, read_lines
from transformer_kernels import verification

CPU = torch.device("cpu")


def program(code, seconds=30.0):
    """A step's function that runs Python code in a process."""

    def run(session, limit):
        status = session.run([sys.executable, "-c", textwrap.dedent(code)], min(seconds, limit))
        return "" if status == 0 else f"status {status}"

    return run


def write(session, name):
    append(session.folder / ROWS, {"step": name})
    return ""


def outcomes(folder):
    return {line["step"]: line["wrong"] for line in read_lines(folder / gpu.STEPS) if line["event"] == "ended"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Rows of these tests are no rows of the plan."""
    monkeypatch.setattr(summary, "table", lambda rows: [])


def test_a_step_that_hangs_faults_or_raises_costs_itself_only(tmp_path):
    def wrong(session, limit):
        raise ValueError("planted")

    listed = (
        Step("hangs", 0.5, program("import time; time.sleep(60)")),
        Step("faults", 30, program("import os; os.abort()")),
        Step("raises", 5, wrong),
        Step("writes", 5, lambda session, limit: write(session, "writes")),
    )
    assert record(listed, CPU, tmp_path) == 1
    assert outcomes(tmp_path) == {
        "hangs": "status None",
        "faults": "status -6",
        "raises": "ValueError: planted",
        "writes": "",
    }
    assert read_lines(tmp_path / ROWS) == [{"step": "writes"}]


def test_what_a_hung_step_started_ends_with_it(tmp_path):
    """A child that outlives its session would run beside every later timing."""
    code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    record((Step("hangs", 5, program(code)),), CPU, tmp_path)
    pid = int(next(line for line in (tmp_path / gpu.LOG).read_text().splitlines() if line.isdigit()))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} still runs")


CALL = """
    import sys, time
    from pathlib import Path
    import torch
    from benchmarks.gpu import summary
    from benchmarks.gpu.session import ROWS, Step, append, record

    def slow(session, limit):
        append(session.folder / ROWS, {"step": "slow"})
        time.sleep(60 if sys.argv[2] == "hang" else 0)
        return ""

    summary.table = lambda rows: []
    first = Step("quick", 5, lambda session, limit: append(session.folder / ROWS, {"step": "quick"}) or "")
    record((first, Step("slow", 60, slow)), torch.device("cpu"), Path(sys.argv[1]))
"""


def test_a_call_that_is_killed_is_continued_by_the_next(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(CALL), str(tmp_path)]
    process = subprocess.Popen([*command, "hang"], stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(read_lines(tmp_path / ROWS)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert summary.broken_off(tmp_path) == ["slow"]
    assert "broken off: slow" in summary.summary(tmp_path)
    subprocess.run([*command, "go on"], check=True, stdout=subprocess.DEVNULL)
    assert [line["step"] for line in read_lines(tmp_path / ROWS)] == ["quick", "slow", "slow"]
    assert summary.broken_off(tmp_path) == [] and outcomes(tmp_path) == {"quick": "", "slow": ""}


def test_a_call_ends_at_its_limit(tmp_path, capsys):
    listed = (Step("long", 60, program("import time; time.sleep(60)", 60.0)), Step("later", 5, lambda *_: ""))
    begun = time.monotonic()
    record(listed, CPU, tmp_path, seconds=3.0)
    assert time.monotonic() - begun < 10.0
    assert "later: not begun" in capsys.readouterr().out
    assert set(outcomes(tmp_path)) == {"long"}


def verdict(op, backend, dtype, outcome, direction="forward"):
    known = {"op": op, "backend": backend, "dtype": dtype, "direction": direction, "outcome": outcome}
    return {**known, "case": f"{op}/{dtype}/12x64", "why": ""}


def test_a_kernel_that_is_wrong_in_one_dtype_is_struck_in_that_dtype_from_later_steps(tmp_path):
    for dtype in verification.DTYPES:
        append(tmp_path / gpu.VERDICTS, verdict("gelu", "cuda", dtype, "wrong" if dtype == "bfloat16" else "passed"))
    seen = []
    record((Step("asks", 5, lambda session, limit: seen.append(session.struck) or ""),), CPU, tmp_path)
    assert seen == [{("gelu", "cuda", "bfloat16")}]

    def task(candidate, dtype, op="gelu"):
        return Task(f"operation|{op}|-|forward|{candidate}|{dtype}|M=1", op, candidate, None)

    tasks = [task("ours cuda", "bfloat16"), task("ours cuda", "float32"), task("ours triton", "bfloat16")]
    tasks += [task("eager", "bfloat16"), task("ours cuda + one graph, bf16", "bf16", "step")]
    kept = chosen(tasks, struck=seen[0])
    assert [each.candidate for each in kept] == ["ours cuda", "ours triton", "eager"]
    assert [each.key.split("|")[5] for each in kept] == ["float32", "bfloat16", "bfloat16"]


SUITE = """
import pytest, torch
import transformer_kernels as tk

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("case", [0, 1])
def test_values(backend, dtype, case):
    assert backend == "triton" or dtype is torch.float32

def test_elsewhere():
    pytest.skip("needs something")
"""


def run_suite(tmp_path, *arguments, struck=()):
    """The results of a small suite under the plugin, in the order of the tests, and the verdicts."""
    file = tmp_path / "test_gelu.py"
    file.write_text(SUITE)
    session = Session(CPU, tmp_path, time.monotonic() + 100, set(struck))
    steps.pytest(str(file), "-p", "no:randomly", *arguments, workers=1)(session, 90)
    tests = [test for test in read_lines(tmp_path / evidence.TESTS) if test["test"] != evidence.FINISHED]
    described = dict.fromkeys(("device", "torch", "triton", "driver", "commit", "date"), "x")
    smoke = [verdict("gelu", "triton", dtype, "passed") for dtype in ("float32", "bfloat16")]
    found = {(entry["kernel"], entry["dtype"]): entry for entry in evidence.verdicts(tests, described, smoke)}
    return [test["test"].rpartition("::")[2] for test in tests], found


def test_one_test_of_each_kernel_and_dtype_runs_before_the_rest(tmp_path):
    order, verdicts = run_suite(tmp_path)
    assert len(order) == 9 and all("0-" in name for name in order[:4])
    assert len({name.replace("0-", "") for name in order[:4]}) == 4
    assert verdicts["gelu/triton", "bfloat16"]["passed"] == 3 and verdicts["gelu/triton", "bfloat16"]["complete"]
    assert verdicts["gelu/cuda", "bfloat16"]["failed"] == 2 and not verdicts["gelu/cuda", "bfloat16"]["complete"]
    assert verdicts["gelu/cuda", "float32"]["failed"] == 0 and verdicts["gelu/cuda", "float32"]["passed"] == 2


def test_tests_of_struck_kernels_are_left_out(tmp_path):
    order, _ = run_suite(tmp_path, struck=[("gelu", "cuda", "bfloat16")])
    assert len(order) == 7 and not any("cuda-bfloat16" in name for name in order)


def test_a_failed_test_counts_for_every_kernel_that_it_executed():
    tests = [
        {"test": "tests/test_models.py::test_a", "outcome": "failed", "why": "", "kernels": ["gelu/cuda/float32"]},
        {"test": "tests/ops/test_gelu.py::test_b[cuda-float32]", "outcome": "passed", "why": "", "kernels": []},
    ]
    described = dict.fromkeys(("device", "torch", "triton", "driver", "commit", "date"), "x")
    (entry,) = evidence.verdicts(tests, described)
    assert (entry["passed"], entry["failed"], entry["complete"]) == (1, 1, False)


def test_the_last_result_of_a_test_counts():
    tests = [
        {"test": "tests/ops/test_gelu.py::test_b[cuda]", "outcome": outcome, "why": "", "kernels": []}
        for outcome in ("failed", "passed")
    ]
    assert summary.failed_tests(tests) == [] and summary.failed_tests(tests[::-1]) == [tests[0]["test"]]


def test_the_executed_kernels_of_a_test_are_noted(tmp_path):
    file = tmp_path / "test_any.py"
    file.write_text(
        "import torch, transformer_kernels as tk\n"
        "def test_any():\n    tk.gelu(torch.ones(2, 8), backend='cuda')\n"
        "def test_again():\n    tk.gelu(torch.ones(2, 8), backend='cuda')\n"
    )
    session = Session(CPU, tmp_path, time.monotonic() + 300)
    steps.pytest(str(file), workers=1)(session, 280)
    tests = [test for test in read_lines(tmp_path / evidence.TESTS) if test["test"] != evidence.FINISHED]
    if tests[0]["outcome"] != "passed":
        pytest.skip(f"the emulation is not available: {tests[0]['why'][-200:]}")
    assert [test["kernels"] for test in tests] == [["gelu/cuda/float32"]] * 2


def test_the_planned_seconds_fit_both_calls(capsys):
    assert sum(step.seconds for step in steps.FIRST) <= 440 and sum(step.seconds for step in steps.SECOND) <= 350
    assert main(["--plan"]) == 0
    assert "first call: 440 s" in capsys.readouterr().out


def test_what_returns_is_few_and_small(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in session.FILES:
        (folder / name).write_text("x" * (session.MAX_LOG + 7 if name == gpu.LOG else 9))
    session.copy_out(folder, out)
    files = list(out.rglob("*"))
    assert len(files) == 7 and all(file.stat().st_size <= session.MAX_LOG for file in files)
    assert json.loads(json.dumps(steps.plan_text()))
