"""`transformer-kernels run`: a program runs as under plain Python, and a closing line counts its calls."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.backends import cpu

ROOT = Path(__file__).parents[1]
BEST = "torch" if cpu.unavailable(torch.device("cpu")) else "cpu"
CLOSING = re.compile(r"transformer-kernels: [\d,]+ calls rerouted, [\d,]+ left to PyTorch.*\n\Z")

TRAINS = """
import sys, threading
import torch
from torch.nn.functional import cross_entropy, gelu, softmax
import beside

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(11, 16), torch.nn.LayerNorm(16)
        self.up, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 11)

    def forward(self, tokens):
        return self.head(gelu(self.up(self.norm(self.table(tokens)))))

torch.manual_seed(int(sys.argv[1]))
model, tokens = Model(), torch.arange(11).repeat(8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(4):
    loss = cross_entropy(model(tokens), tokens.roll(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f}")
thread = threading.Thread(target=lambda: softmax(torch.ones(2, 3), -1))
thread.start()
thread.join()
torch.softmax(torch.ones(2, 3), 0)
print(__name__, __file__, sys.argv, beside.here)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "beside.py").write_text("here = 'beside the script'\n")
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path


def python(folder, *arguments):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("TRANSFORMER_KERNELS_BACKEND", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def run(folder, *arguments):
    return python(folder, "-m", "transformer_kernels", "run", *arguments)


def test_a_training_script(folder):
    plain, ours = python(folder, "train.py", "3"), run(folder, "--backend", BEST, "train.py", "3")
    assert (ours.returncode, plain.returncode) == (0, 0), ours.stderr
    assert ours.stdout == plain.stdout and "beside the script" in ours.stdout
    assert CLOSING.search(ours.stderr)
    for name, calls in (("embedding", 4), ("layer_norm", 4), ("linear", 8), ("gelu", 4), ("cross_entropy", 4)):
        assert f"{name} {calls} ({BEST})" in ours.stderr
    assert f"softmax 1 ({BEST})" in ours.stderr and "softmax 1 (it is not over the last axis)" in ours.stderr


AUTOCAST = """
import contextlib, sys, torch
torch.manual_seed(0)
layer, x = torch.nn.Linear(8, 8), torch.randn(64, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16) if sys.argv[1:] or step % 2 else contextlib.nullcontext():
        y = layer(x)
    loss = (y - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(y.dtype, loss.item())
"""


def test_autocast_around_a_program(tmp_path):
    """As blocks of its own around each forward: a cache of casts would hide the optimizer's steps."""
    (tmp_path / "program.py").write_text(AUTOCAST)
    own, ours = python(tmp_path, "program.py", "own"), run(tmp_path, "--autocast", "bfloat16", "program.py")
    assert ours.stdout == own.stdout and own.stdout.count("torch.bfloat16") == 4, ours.stderr
    assert len(set(own.stdout.split())) == 5  # each loss is another one


def test_a_module(folder):
    plain, ours = python(folder, "-m", "train", "3", "--backend"), run(folder, "-m", "train", "3", "--backend")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0), ours.stderr
    assert CLOSING.search(ours.stderr)


@pytest.mark.parametrize(
    "program",
    [
        "import atexit, sys; atexit.register(print, 'last words'); print('first words'); sys.exit(3)",
        "def f(n):\n    return 1 / n\n\n\ntry:\n    {}['key']\nexcept KeyError as error:\n    f(0)\n",
        "x = (\n",
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)",
        "import sys; sys.excepthook = lambda *error: print('caught', error[0].__name__); 1 / 0",
    ],
)
def test_ends_are_plain_pythons(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    plain, ours = python(tmp_path, str(tmp_path / "program.py")), run(tmp_path, str(tmp_path / "program.py"))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert CLOSING.search(ours.stderr), ours.stderr
    without_markers = [re.sub(r"\n +[\^~]+", "", text) for text in (CLOSING.sub("", ours.stderr), plain.stderr)]
    assert without_markers[0] == without_markers[1]
    if "SIGINT" in program:
        assert ours.returncode == -signal.SIGINT


def test_an_error_of_torch(tmp_path):
    """The error is raised by the same call, with the frames of the replaced function after that line."""
    program = "import torch\ntorch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))"
    (tmp_path / "program.py").write_text(program)
    found = run(tmp_path, "program.py")
    lines = CLOSING.sub("", found.stderr).splitlines()
    assert found.returncode == 1 and lines[0].startswith("Traceback") and "program.py" in lines[1]
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["absent.py"], 2, "can't open file 'absent.py'"),
        ([], 2, "a script or -m MODULE is needed"),
        (["--backend", "nonsense", "x.py"], 2, "invalid choice: 'nonsense'"),
        (["--help"], 0, "--backend"),
    ],
)
def test_what_is_not_run(arguments, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        found = cli.main(["run", *arguments])
    except SystemExit as ended:
        found = ended.code
    assert found == status and message in "".join(capsys.readouterr())


def test_a_main_module_that_is_pickled(tmp_path):
    (tmp_path / "program.py").write_text(
        "import pickle, sys\nclass Thing: pass\n"
        "thing = pickle.loads(pickle.dumps(Thing()))\nprint(type(thing), sys.modules['__main__'].Thing is Thing)\n"
    )
    plain, ours = python(tmp_path, "program.py"), run(tmp_path, "program.py")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0), ours.stderr


def test_a_certificate(folder):
    """One more line before the last, and a file in the working directory; the program prints the same."""
    options = "--backend", BEST
    plain, certified = run(folder, *options, "train.py", "1"), run(folder, *options, "--certify", "train.py", "1")
    assert certified.stdout == plain.stdout
    assert CLOSING.search(certified.stderr), certified.stderr
    assert re.search(r"certificate: 0\.\d+ of the budget; 0 of \d+ samples beyond it", certified.stderr)
    written = json.loads((folder / "certificate.json").read_text())
    assert written["samples"] > 0 and written["beyond"] == 0 and not written["unchecked"]
    assert "norm" in written["layers"]
