"""Signals, as a shell or a batch system sends them, to a real process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import load_checkpoint

CHECKOUT = Path(__file__).resolve().parents[2]

# With "slow" as its last argument each save takes a minute, once it has begun; with "nan" the loss of process 1 becomes
# NaN in the seventh step.
PROGRAM = """
import os, sys, time, torch
torch.set_num_threads(1)
from transformer_kernels import cli
from transformer_kernels.training.loop import trainer
if sys.argv[-1] == "slow":
    sys.argv.pop()
    def slow_save(folder, checkpoint):
        print("saving", flush=True)
        time.sleep(60)
    trainer.save_checkpoint = slow_save
if sys.argv[-1] == "nan":
    sys.argv.pop()
    class Loss(trainer.TrainingLoss):
        calls = 0
        def forward(self, inputs, targets):
            self.calls += 1
            poisoned = os.environ["RANK"] == "1" and self.calls == 7
            return super().forward(inputs, targets) * (float("nan") if poisoned else 1.0)
    trainer.TrainingLoss = Loss
sys.exit(cli.main(sys.argv[1:]))
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def launch(text_file, tmp_path):
    """Starts the program, in an empty folder; ends it with the test."""
    processes = []

    def launch(*extra, launcher=(), program=None):
        model = [part for pair in ("layers=1", "width=16", "heads=2") for part in ("--model", pair)]
        options = ["--corpus", text_file, "--context", "8", "--steps", "10000000"]
        rarely = ["--eval-every", "10000000", "--save-every", "10000000", "--log-every", "5", "--no-progress"]
        if program is None:
            program = (tmp_path / "program.py",)
            program[0].write_text(PROGRAM)
        command = [sys.executable, *launcher, *program, "train", "char-gpt", *options, *rarely, *model, *extra]
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(done, process):
    deadline = time.monotonic() + 60
    while not done():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the program did not start to train"
        time.sleep(0.05)


@pytest.fixture
def start(launch, tmp_path):
    """Starts the program and waits until it has trained for some steps."""

    def start(*extra):
        process, log = launch("--out", tmp_path / "run", *extra), tmp_path / "run" / "log.jsonl"
        wait_until(lambda: log.exists() and '"train"' in log.read_text(), process)
        return process

    return start


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_makes_one_checkpoint_and_sets_the_status(start, tmp_path, signum, status):
    process = start()
    process.send_signal(signum)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status
    step = load_checkpoint(tmp_path / "run" / "last").trainer["step"]
    run = tmp_path / "run"
    assert printed == (
        f"transformer-kernels: stopped by {signum.name} after step {step}; checkpoint: {run / 'last'}; resume with: "
        f"transformer-kernels train char-gpt --resume {run}\n"
    )
    assert "Traceback" not in printed
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "last", "log.jsonl"]


def test_an_interrupt_of_several_processes_makes_one_checkpoint_and_sets_the_status(start, tmp_path):
    process = start("--processes", "2")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    step = load_checkpoint(tmp_path / "run" / "last").trainer["step"]
    assert printed.count(f"transformer-kernels: stopped by SIGINT after step {step}; checkpoint: ") == 1
    assert printed.count(f"train char-gpt --resume {tmp_path / 'run'} --processes 2\n") == 1
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_with_its_number(start, tmp_path, rank, signum, status):
    process = start("--processes", "2")
    os.kill(worker(process, rank), signum)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status, printed
    step = load_checkpoint(tmp_path / "run" / "last").trainer["step"]
    assert printed.count(f"stopped by {signum.name} after step {step}; checkpoint: ") == 1
    assert printed.count("transformer-kernels: ") == 1
    assert "Traceback" not in printed


@pytest.mark.slow
def test_processes_of_a_killed_launcher_stop(start, tmp_path):
    process = start("--processes", "2")
    workers = [worker(process, rank) for rank in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in workers):
        assert time.monotonic() < deadline, "an orphan goes on"
        time.sleep(0.1)
    assert load_checkpoint(tmp_path / "run" / "last").trainer["step"] > 0


@pytest.mark.slow
def test_a_stopped_process_ends_the_run_and_is_named(start, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", "10")
    process = start("--processes", "2")
    os.kill(worker(process, 1), signal.SIGSTOP)
    begun = time.monotonic()
    _, printed = process.communicate(timeout=90)
    assert time.monotonic() - begun < 30  # the launcher would kill it after 30 s more
    assert process.returncode in (1, 128 + signal.SIGKILL)  # of process 0, or of process 1, which it kills
    assert printed.count("error: process 1 has not responded for 10 s: it is stopped or cannot be reached") == 1


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_processes_of_a_stopped_launcher_stop(start, tmp_path, monkeypatch, recorded):
    """They save, unless they wait for the launcher's store, as in the step that is recorded."""
    monkeypatch.setenv("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", "10")
    process = start("--processes", "2", "--save-every", "1", "--cuda-graph", "auto" if recorded else "off")
    workers = [worker(process, rank) for rank in range(2)]
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 40
    while not all(map(is_zombie, workers)):
        assert time.monotonic() < deadline, "a process waits for the launcher"
        time.sleep(0.1)
    process.send_signal(signal.SIGCONT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 143
    assert printed.count("transformer-kernels: ") == 1
    assert load_checkpoint(tmp_path / "run" / "last").trainer["step"] > 0
    if not recorded:
        assert "stopped by SIGTERM after step " in printed


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def imports_torch(pid):
    """Whether a process has begun to load PyTorch."""
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


OUTSIDE = "transformer-kernels: stopped by {} outside of the training loop; no checkpoint was written\n"
PACKAGE = ("-m", "transformer_kernels")


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_pytorch_is_imported_ends_the_process(launch, signum, status):
    process = launch(program=PACKAGE)
    wait_until(lambda: imports_torch(process.pid), process)
    process.send_signal(signum)
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (status, OUTSIDE.format(signum.name))


def test_a_signal_ends_a_process_that_waits_for_others(launch, monkeypatch):
    """Its main thread is in PyTorch's store, where Python's handlers do not run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    process = launch(program=PACKAGE)

    def waits():
        with socket.socket() as store:
            return store.connect_ex(("localhost", port)) == 0

    wait_until(waits, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=20)
    assert (process.returncode, printed) == (143, OUTSIDE.format("SIGTERM"))


@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("target", ["launcher", 0, 1])
def test_a_signal_while_several_processes_start_ends_all_with_its_number(launch, target, signum, status):
    process = launch("--processes", "2", program=PACKAGE)
    wait_until(lambda: len(workers_of(process)) == 2, process)
    workers = [worker(process, rank) for rank in range(2)]
    wait_until(lambda: all(map(imports_torch, workers)), process)
    os.kill(process.pid if target == "launcher" else workers[target], signum)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == status
    assert printed.count("transformer-kernels: ") == printed.count(OUTSIDE.format(signum.name)) == 1
    assert "Traceback" not in printed
    assert not any(Path(f"/proc/{each}").exists() for each in workers)


@pytest.mark.slow
def test_a_process_that_is_stopped_before_it_joins_is_named(launch, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_PROCESS_TIMEOUT", "8")
    process = launch("--processes", "2", program=PACKAGE)
    wait_until(lambda: len(workers_of(process)) == 2, process)
    os.kill(worker(process, 1), signal.SIGSTOP)
    begun = time.monotonic()
    _, printed = process.communicate(timeout=90)
    assert time.monotonic() - begun < 35  # five times as long if it were not stopped
    assert process.returncode in (1, 128 + signal.SIGKILL)  # of process 0, or of process 1, which it kills
    assert printed.count("error: process 1 has not responded for 8 s: it is stopped or cannot be reached") == 1


def worker(process, rank):
    """The id of the process of this rank."""
    (found,) = [child for child in workers_of(process) if f"RANK={rank}" in environment_of(child)]
    return found


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if any(each.startswith("RANK=") for each in environment_of(child))]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_others_soon_and_is_named(start, rank):
    process = start("--processes", "2", "--save-every", "1")
    begun = time.monotonic()
    os.kill(worker(process, rank), signal.SIGKILL)
    _, printed = process.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: process {rank} ended with SIGKILL" in printed
    assert "Traceback" not in printed


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def test_a_second_interrupt_ends_at_once(start):
    process = start("slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - begun < 20


def events(folder, name):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.mark.slow
@pytest.mark.parametrize("out", [True, False])
def test_a_restart_by_torchrun_continues_the_run(launch, tmp_path, out):
    length = "--steps", "400", "--save-every", "5", "--model", "dropout=0.1"
    folder = tmp_path / "runs" / "char-gpt"
    process = launch(*length, *(("--out", folder) if out else ()), launcher=(*TORCHRUN, "--max-restarts", "1"))
    wait_until((folder / "last").exists, process)
    os.kill(worker(process, 1), signal.SIGKILL)
    _, printed = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    first, second = events(folder, "start")
    assert first["step"] == 0 < second["step"]
    assert [each["step"] for each in events(folder, "end")] == [400]
    assert [each.name for each in folder.parent.iterdir()] == ["char-gpt"]
    unbroken = launch(*length, "--out", tmp_path / "unbroken", launcher=TORCHRUN)
    assert unbroken.communicate(timeout=100) and unbroken.returncode == 0
    found, expected = (load_checkpoint(each / "last").weights for each in (folder, tmp_path / "unbroken"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_process_that_diverges_is_in_the_log_of_the_first(launch, tmp_path):
    process = launch("--out", tmp_path / "run", "nan", launcher=TORCHRUN)
    _, printed = process.communicate(timeout=100)
    assert process.returncode == 1
    (event,) = events(tmp_path / "run", "diverged")
    assert (event["what"], event["value"], event["at_step"], event["process"]) == ("loss", "nan", 7, 1)
    assert len(event["items"]) == 8
    assert printed.count("the loss is nan at step 7") == 1
    assert "of process 1" in printed
