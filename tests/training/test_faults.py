"""Faults of a run: each row names a fault and the documented behaviour, and is tested through the command line."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.training import CharGPT, Processes, RunFolderError, Trainer, load_checkpoint
from transformer_kernels.training.checkpoint import checkpoint_folder, claimed
from transformer_kernels.training.data.tokenizers import Gpt2Tokenizer
from transformer_kernels.training.distributed import choose_device

TINY = ["--model", "layers=1", "--model", "width=16", "--model", "heads=2", "--batch-size", 4, "--no-progress"]
ROWS: dict[str, Callable] = {}


def row(name):
    """Adds a check to the table under its row."""

    def add(check):
        ROWS[name] = check
        return check

    return add


class Session:
    """A user's folder and terminal."""

    def __init__(self, folder, text_file, capsys, monkeypatch):
        self.folder, self.text, self.capsys, self.monkeypatch = folder, text_file, capsys, monkeypatch

    def run(self, *arguments):
        """The exit status of a command, and what it printed to both streams."""
        self.capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        return status, "".join(self.capsys.readouterr())

    def train(self, out, *extra, corpus=None, steps=4):
        length = (
            []
            if "--resume" in extra
            else ["--corpus", corpus or self.text, "--context", 8, "--config", "notebook", *TINY]
        )
        where = [] if out is None else ["--out", self.folder / out]
        return self.run("train", "char-gpt", *length, "--steps", steps, *where, "--no-sample", *extra)

    def refused(self, result, *message):
        """The command failed with status 1 and one line that has these parts."""
        status, printed = result
        lines = [line for line in printed.splitlines() if "error" in line or "Traceback" in line]
        assert status == 1
        assert len(lines) == 1 and lines[0].startswith("transformer-kernels: error: "), printed
        for part in message:
            assert str(part) in lines[0]

    def step(self, name):
        return load_checkpoint(self.folder / name).trainer["step"]


@pytest.fixture
def session(tmp_path, text_file, capsys, monkeypatch):
    return Session(tmp_path, text_file, capsys, monkeypatch)


@contextmanager
def file_size_limit(count):
    """The disk is full after so many bytes of a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@row("a folder that holds a run already: refused, nothing is lost")
def holds_a_run(session):
    assert session.train("run")[0] == 0
    before = snapshot(session.folder / "run")
    refusal = session.train("run", "--seed", 1)
    session.refused(refusal, session.folder / "run", "contains a run already", "--resume", "--overwrite", "--out")
    assert snapshot(session.folder / "run") == before


@row("a folder that holds a run already: replaced with --overwrite")
def holds_a_run_and_is_overwritten(session):
    assert session.train("run", steps=6)[0] == 0
    (session.folder / "run" / "notes.txt").write_text("mine")
    assert session.train("run", "--overwrite", steps=2)[0] == 0
    assert session.step("run/best") == session.step("run/last") == 2
    log = (session.folder / "run" / "log.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "start" for line in log) == 1
    assert (session.folder / "run" / "notes.txt").exists()


@row("a folder that holds another run than the resumed one: refused")
def resumed_into_another_run(session):
    assert session.train("one")[0] == session.train("two")[0] == 0
    before = snapshot(session.folder / "two")
    session.refused(session.train("two", "--resume", session.folder / "one", steps=6), "two: contains a run already")
    assert snapshot(session.folder / "two") == before


@row("a folder that holds only a checkpoint put aside by an interrupted save: refused")
def holds_a_run_put_aside(session):
    assert session.train("run")[0] == 0
    shutil.rmtree(session.folder / "run" / "best")
    os.rename(session.folder / "run" / "last", session.folder / "run" / ".last.previous")
    session.refused(session.train("run"), "contains a run already")
    assert checkpoint_folder(session.folder / "run") == session.folder / "run" / "last"
    assert session.step("run/last") == 4
    with claimed(session.folder / "run", overwrite=True):
        assert not (session.folder / "run" / ".last.previous").exists()


@row("a folder that is being written by another process: refused, with --resume and --overwrite too")
def is_being_written(session):
    assert session.train("run")[0] == 0
    with claimed(session.folder / "run", session.folder / "run" / "last"):
        before = snapshot(session.folder / "run")
        message = "another process is training into it"
        session.refused(session.train(None, "--resume", session.folder / "run", steps=6), message)
        session.refused(session.train("run", "--overwrite"), message)
        assert snapshot(session.folder / "run") == before
    assert session.train(None, "--resume", session.folder / "run", steps=6)[0] == 0


@row("a process that was killed leaves its folder unlocked")
def lock_of_a_killed_process(session):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with claimed(session.folder / "run"):
            os.write(writer, b".")
            time.sleep(60)
    os.read(reader, 1)
    with pytest.raises(RunFolderError, match="another process"), claimed(session.folder / "run"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with claimed(session.folder / "run"):
        pass


@row("the default folder: each run has its own")
def default_folders(session):
    session.monkeypatch.chdir(session.folder)
    for name in ("char-gpt", "char-gpt-2", "char-gpt-3"):
        status, printed = session.train(None, steps=1)
        assert status == 0 and f"runs/{name}\n" in printed
        assert session.step(f"runs/{name}/last") == 1
    assert session.train(None, "--resume", "runs/char-gpt-2", steps=2)[0] == 0
    assert [session.step(f"runs/{name}/last") for name in ("char-gpt", "char-gpt-2")] == [1, 2]


@row("the Python interface: a second fit into a folder is refused as well")
def python_interface(session):
    usual = {"corpus": str(session.text), "context": 8, "batch_size": 4, "steps": 2, "progress": False}
    config = CharGPT.Config(out=str(session.folder / "run"), model={"layers": 1, "width": 16, "heads": 2}, **usual)
    Trainer(CharGPT(config)).fit()
    with pytest.raises(RunFolderError, match="contains a run already"):
        Trainer(CharGPT(config)).fit()
    assert Trainer(CharGPT(config)).fit(overwrite=True).step == 2


@row("a read-only folder: reported before the first step, with its path")
def read_only_folder(session):
    folder = Path("/sys/run") if os.geteuid() == 0 else session.folder / "closed" / "run"
    if os.geteuid():
        folder.parent.mkdir(mode=0o500)
    session.monkeypatch.setattr(Trainer, "step", lambda self: pytest.fail("trained before the folder was there"))
    session.refused(session.train(folder), folder)


@row("disk full while a checkpoint is written: the previous one is intact, the error names the file")
def full_disk(session):
    assert session.train("run")[0] == 0
    with file_size_limit(4000):
        result = session.train(None, "--resume", session.folder / "run", steps=6)
    session.refused(result, "File too large", session.folder / "run")
    assert session.step("run/last") == 4
    assert not [path for path in (session.folder / "run").iterdir() if path.name.endswith(".partial")]


@row("disk full while the log is written: the error names the file")
def full_disk_for_the_log(session):
    assert session.train("run")[0] == 0
    log = session.folder / "run" / "log.jsonl"
    with file_size_limit(log.stat().st_size):
        result = session.train(None, "--resume", session.folder / "run", steps=6)
    session.refused(result, "File too large", log)
    assert session.step("run/last") == 4


@row("truncated or bit-flipped checkpoint: path, expected and found; in every command")
def damaged_checkpoint(session):
    assert session.train("run")[0] == 0
    for name in ("best", "last"):
        path = session.folder / "run" / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    message = (path.name, "expected", "bytes, found")
    session.refused(session.run("evaluate", "--checkpoint", session.folder / "run"), *message)
    session.refused(session.run("generate", "--checkpoint", session.folder / "run", "--prompt", "t"), *message)
    session.refused(session.train(None, "--resume", session.folder / "run", steps=6), *message)


@row("checkpoint of another model: strict list of mismatched keys")
def checkpoint_of_another_model(session):
    assert session.train("run")[0] == session.train("wide", "--model", "width=32")[0] == 0
    shutil.copytree(session.folder / "wide" / "last", session.folder / "mixed")
    small, mixed = session.folder / "run" / "last", session.folder / "mixed"
    shutil.copy(small / "config.json", mixed / "config.json")
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (mixed, small)]
    manifests[0]["files"]["config.json"] = manifests[1]["files"]["config.json"]
    (mixed / "manifest.json").write_text(json.dumps(manifests[0]))
    message = ("another model or vocabulary", "mismatched: ", "(model (28, 16), checkpoint (28, 32))")
    session.refused(session.run("evaluate", "--checkpoint", session.folder / "mixed"), *message)


@row("checkpoint of another vocabulary or other data: resuming is refused")
def checkpoint_of_other_data(session):
    assert session.train("run")[0] == 0
    text = session.text.read_text()
    for content, message in ((text.upper(), "another vocabulary"), (text[::-1], "other data")):
        session.text.write_text(content)
        session.refused(session.train(None, "--resume", session.folder / "run", steps=6), message)


@row("data file with the wrong hash: expected and actual hash, path and remedy")
def wrong_hash(session):
    (session.folder / "input.txt").write_text("To be")
    result = session.train("run", "--data-dir", session.folder, corpus="tinyshakespeare")
    session.refused(result, session.folder / "input.txt", "expected SHA-256", ", got ", "the text is bundled")


@row("partial download or offline: URL, path and remedy; nothing is kept")
def offline(session):
    address = "http://127.0.0.1:9/vocab.bpe"
    session.monkeypatch.setattr(f"{Gpt2Tokenizer.__module__}.VOCAB_BPE_URL", address)
    result = session.run("train", "gpt", "--corpus", session.text, "--tokenizer", "gpt2", "--steps", 1)
    session.refused(result, "cannot download", address, session.folder / "cache", "--vocab-dir")
    assert not list((session.folder / "cache").rglob("vocab.bpe"))


@row("empty or too short corpus, and one that is a folder or missing: what is needed")
def unusable_corpus(session):
    for content, message in (("", "has 0 characters; at least 9 are needed"), ("short", "at least 9")):
        (session.folder / "few.txt").write_text(content)
        session.refused(session.train("run", corpus=session.folder / "few.txt"), message)
    session.refused(session.train("run", corpus=session.folder), "is a folder")
    session.refused(session.train("run", corpus=session.folder / "none"), "there is no file")
    assert not (session.folder / "run").exists()


@row("out of memory in a step: a remedy")
def out_of_memory(session):
    def exhausted(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    session.monkeypatch.setattr("transformer_kernels.training.loop.graphs.TrainingStep.__call__", exhausted)
    session.refused(session.train("run"), "Tried to allocate 2.00 GiB; try a smaller --batch-size")


@row("a device that is not there, or no device: reported")
def no_device(session):
    session.refused(session.train("run", "--device", "gpu"), "device must be auto, cpu, cuda, cuda:1, ...; got 'gpu'")
    session.refused(session.train("run", "--device", "xpu"), "device 'xpu' cannot be used")
    if not torch.cuda.is_available():
        session.refused(session.train("run", "--device", "cuda"), "this PyTorch sees no GPU; use --device cpu")
    session.refused(session.train("run", "--processes", 0), "--processes must be at least 1; got 0")


@row("more processes than GPUs: reported")
def too_few_gpus(session):
    session.monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    session.monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device("auto", Processes(1, 3, 1)) == torch.device("cuda", 1)
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match="PyTorch sees 2; use --processes 2 or --device cpu"):
            choose_device(name, Processes(2, 3, 2))


@row("a missing package: the remedy works without an index entry for this one")
def missing_package(session):
    for module, package in (("tqdm", "tqdm"), ("yaml", "PyYAML")):
        (session.folder / "run.yaml").write_text("lr: 0.1")
        with session.monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            result = session.train("run", "--config", session.folder / "run.yaml")
        session.refused(result, f"{module} is needed for this: pip install {package}")


@pytest.mark.parametrize("name", ROWS)
def test_faults(name, session):
    ROWS[name](session)


def snapshot(folder):
    """The content of every file but the lock."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}
