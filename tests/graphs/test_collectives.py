"""CPU recordings of collectives, in two gloo processes: at the capture every result equals its input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer_kernels.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)

CHECKOUT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import transformer_kernels as tk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
zeros, late = [torch.zeros(2)] * 5, torch.tensor([0.0, 5.0 * rank])


def written(collective):
    def function(x):
        y = x * 2
        collective(y)
        return x + y
    return function


def started(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x * 3
    work.wait()
    return y + z


def gathered(x):
    y = [torch.empty(2) for _ in range(count)]
    dist.all_gather(y, x * 2)
    return x + y[1]


def into(x):
    y = torch.empty(2 * count)
    dist.all_gather_into_tensor(y, x * 2)
    return x + y[2:]


def scattered(x, **options):
    y, z = torch.cat([x, x + 1]), torch.empty(2)
    work = dist.reduce_scatter_tensor(z, y, **options)
    w = y * 3
    if work is not None:
        work.wait()
    return z + w[:2]


def exchanged(x):
    y, z = x * 2, torch.empty(2)
    work = [dist.isend(y, 1 - rank), dist.irecv(z, 1 - rank)]
    for each in work:
        each.wait()
    return x + z


def unfinished(x):
    return x + functional.all_reduce(x * 2, "sum", dist.group.WORLD)


functions = {
    "sum": written(dist.all_reduce),
    "largest": written(lambda y: dist.all_reduce(y, op=dist.ReduceOp.MAX)),
    "broadcast": written(lambda y: dist.broadcast(y, 1)),
    "asynchronous": started,
    "gathered": gathered,
    "into": into,
    "scattered": scattered,
    "scattered, asynchronous": lambda x: scattered(x, async_op=True),
    "scattered, functional": lambda x: (
        functional.reduce_scatter_tensor(torch.cat([x, x + 1]), "sum", 0, dist.group.WORLD) + x
    ),
    "exchanged": exchanged,
    "functional": lambda x: x + functional.wait_tensor(functional.all_reduce(x * 2, "sum", dist.group.WORLD)),
    "unfinished": unfinished,
    "differentiable": lambda x: x + differentiable.all_reduce(x * 2),
    "barrier": written(lambda y: dist.barrier()),
}
report = {}
for name, function in functions.items():
    calls = [*zeros, late, late + 1]
    graphed = tk.graphed(function)
    found = [graphed(x).tolist() for x in calls]
    with torch.no_grad():
        report[name] = found, [(function(x) + 0).tolist() for x in calls]

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(x):
    model(x).square().mean().backward()
    skip = (x.mean() > 10).float()  # 0 at the capture
    dist.all_reduce(skip)
    for each in model.parameters():
        each.grad.mul_(1 - skip.clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    return skip


graphed, x = tk.graphed(step, optimizer), torch.ones(2, 4)
report["flag"] = [[graphed(x).item() for _ in range(5)][-1], graphed(x * (1 + 100 * rank)).item()], [0.0, 1.0]


def sharded():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), *blocks, torch.nn.Linear(8, 3))
    for each in (*blocks, model):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


mesh = init_device_mesh("cpu", (count,))
(model, optimizer, step), (own, _, eager) = sharded(), sharded()
graphed, generator = tk.graphed(step, optimizer), torch.Generator().manual_seed(rank)
found, expected = [], []
for number in range(8):
    x = torch.randn(5, 4, generator=generator)
    found += [graphed(x).item(), *(each.to_local().sum().item() for each in model.parameters())]
    expected += [eager(x).item(), *(each.to_local().sum().item() for each in own.parameters())]
    if number % 2:  # between replays: gathers and frees
        with torch.no_grad():
            found.append(model(x).sum().item())
            expected.append(own(x).sum().item())
report["FSDP2"] = found, expected
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(report, file)
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "program.py"), str(folder / "report")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replay_repeats_collectives(reports, rank):
    assert len(reports[rank]) == 16
    assert [name for name, (found, expected) in reports[rank].items() if found != expected] == []
