"""The lines on FSDP2 in the training page, run by two processes on gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # two processes that load torch twice

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "transformer_kernels" / "training" / "README.md"

PROGRAM = """
import json, os, sys, torch
torch.set_num_threads(1)
import transformer_kernels
lines, out = sys.argv[1:]
device = torch.device("cpu")
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
SIZES = dict(layers=2, width=32, heads=2, dropout=0.0, vocab_size=70, context=16)

def train(name, scope, share):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        tokens = torch.randint(0, 70, (4, 16), generator=generator)[share]
        targets = torch.randint(0, 2, (4,), generator=generator)[share]
        model = scope["model"]
        loss = model.loss(targets, tokens) if name == "imdb_bert" else model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses

def model(name):
    torch.manual_seed(0)
    return transformer_kernels.build(name, backend="torch", **SIZES)

for name in ("char_gpt", "imdb_bert"):
    whole = model(name)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, fused=True)
    expected = train(name, dict(model=whole, optimizer=optimizer), slice(None))
    scope = dict(model=model(name), device=device, torch=torch)
    exec(lines, scope)
    kept = sum(parameter.to_local().numel() for parameter in scope["model"].parameters())
    report = dict(
        expected=expected,
        sharded=train(name, scope, slice(2 * rank, 2 * rank + 2)),
        kept=kept / whole.num_parameters(),
    )
    with open(f"{out}.{name}.{rank}.json", "w") as file:
        json.dump(report, file)
    torch.distributed.barrier()
    scope.clear()
torch.distributed.destroy_process_group()
os._exit(0)  # under load gloo's threads can abort the interpreter's own way out, when all is done
"""


def lines_of_the_page():
    return next(part for part in PAGE.read_text().split("```") if "fully_shard(" in part).removeprefix("python")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Where two processes, which shard both models by the page's lines, leave a report for each model and rank."""
    pytest.importorskip("torch.distributed.fsdp", reason="this PyTorch has no FSDP")
    folder = tmp_path_factory.mktemp("fsdp")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "program.py"), lines_of_the_page(), str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", ["char_gpt", "imdb_bert"])
def test_the_lines_of_the_page_shard_a_model_that_learns_the_same(name, reports):
    for rank in range(2):
        report = json.loads((reports / f"out.{name}.{rank}.json").read_text())
        assert report["sharded"] == pytest.approx(report["expected"], rel=1e-5)
        assert 0.4 < report["kept"] < 0.6
