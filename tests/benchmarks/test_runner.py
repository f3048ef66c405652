"""The time budget, resuming, and workers that die."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cli, environment, runner
from benchmarks.measure import Bench, identity
from benchmarks.plan import Task
from tests.benchmarks.rows import STAMP, operation_row
from transformer_kernels.backends import cpu

CPU = torch.device("cpu")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def task(number, clock, takes, **changes):
    row = operation_row(1e-3, shape={"L": number}) | changes

    def run(bench):
        clock.now += takes
        return dict(row)

    return Task(identity(row), row["op"], row["candidate"], run)


def bench():
    return Bench(CPU, stamp=dict(STAMP))


def test_work_stops_when_the_time_is_over_and_goes_on_where_it_was(tmp_path):
    clock, path = Clock(), tmp_path / "rows.jsonl"
    tasks = [task(number, clock, takes=3.0) for number in range(5)]
    assert runner.work(tasks, bench(), runner.Budget(7.0, clock), path) == 2
    assert [row["shape"]["L"] for row in runner.read_lines(path)] == [0, 1, 2]
    assert runner.work(tasks, bench(), runner.Budget(100.0, clock), path) == 0
    assert [row["shape"]["L"] for row in runner.read_lines(path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(0)", None),
        ("raise SystemExit(3)", "lost the device"),
        ("import os; os.abort()", "ended its process (-6)"),
    ],
)
def test_how_a_worker_ended(tmp_path, code, reason):
    process = subprocess.Popen([sys.executable, "-c", code])
    assert runner.watch(process, tmp_path / "current", runner.Budget(30.0), 20.0) == reason


def test_record_merge_plot_from_the_command_line(tmp_path, monkeypatch, capsys):
    out, recorded = tmp_path / "out", tmp_path / "results"
    monkeypatch.setattr("benchmarks.results.RESULTS", recorded)
    monkeypatch.setenv("TIME_BUDGET", "50")
    select = ["--quick", "--op", "gelu", "--seconds", "0.002"]
    assert cli.main(["--record", "--device", "cpu", "--out", str(out), *select]) == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) <= 8 and all(len(path.relative_to(out).parts) <= 3 for path in files)
    assert json.loads((out / "environment.json").read_text())["budget"] == 50
    rows = runner.read_lines(out / "rows.jsonl")
    assert {row["op"] for row in rows} == {"gelu"}
    assert all(row["device"] and row["torch"] and row["date"] for row in rows)

    assert cli.main(["--merge", str(out)]) == 0
    folder = recorded / environment.folder_name(environment.environment(CPU))
    assert (folder / "report.md").read_text().count("| ours torch |") > 1
    assert cli.main(["--compare", str(out), str(folder)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record"], "--record requires --out"),
        (["--device", "mps"], "must be cpu or cuda"),
        (["--compare", "nowhere.json", "nowhere.json"], "no benchmark rows at"),
    ],
)
def test_wrong_use_is_reported(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, folder",
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "intel-xeon-platinum-8480c"),
        ("AMD EPYC 9B14 96-Core Processor", "amd-epyc-9b14-96-core"),
        ("Neoverse-V2", "neoverse-v2"),
        ("AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2", "amd-epyc-26-2"),
    ],
)
def test_a_processor_has_a_folder_of_its_own(model, folder, monkeypatch):
    """Rows of two processors are never merged into one record."""
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : x\nmodel name\t: {model}\n")
    name = environment.folder_name({"device": environment.device_name(CPU)})
    level = f"-{cpu.load().instruction_set()}".replace("_", "-") if cpu.unavailable(CPU) is None else ""
    assert name == f"{folder}{level}-{torch.get_num_threads()}-threads"
