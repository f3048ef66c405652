"""Two processes under torchrun, on gloo."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from transformer_kernels.backends import cpu

CHECKOUT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from transformer_kernels.training import CharGPT, CharGPTConfig, Processes, Trainer, joined_processes
from tests.training.loop.test_graphs import RecordedGraphs
from transformer_kernels.training.loop import graphs as module
from transformer_kernels.training.loop.launched import ProcessesDisagree
from transformer_kernels.training.recipes.translate import Translate, TranslateConfig

corpus, folder = sys.argv[1:]
module.warm_up_steps = lambda processes: 2


def train(name, processes, graphs=None, start=None, **more):
    config = CharGPTConfig(
        corpus=corpus, out=f"{folder}/{name}", model={"layers": 1, "width": 16, "heads": 2}, context=8, batch_size=4,
        device="cpu", steps=6, log_every=2, eval_every=3, save_every=3, progress=False,
        **{"cuda_graph": "off", **more},
    )
    recipe = CharGPT(config)
    trainer = Trainer(recipe, processes, graphs=graphs)
    if start is not None:
        trainer.restore(start)
    seen = []
    batch = recipe.batch

    def watched_batch(indices, device):
        seen.append(indices.tolist())
        if len(seen) == 4 and start is None:
            trainer.save("middle")
        return batch(indices, device)

    recipe.batch = watched_batch
    begun = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    dropout = torch.get_rng_state().sum().item()
    result = trainer.fit()
    end = [parameter.detach().flatten().tolist() for parameter in trainer.model.parameters()]
    replays = graphs.replays if graphs else trainer.graph_state
    return dict(replays=replays, start=begun, dropout=dropout, end=end, seen=seen, validation=result.validation)


def translated(processes, **more):
    config = TranslateConfig(
        data=f"{folder}/pairs.txt", out=f"{folder}/translate", device="cpu", steps=4, progress=False,
        model={"layers": 1, "width": 32, "heads": 2, "ffn_width": 32, "dropout": 0.0}, source_vocabulary=60,
        target_vocabulary=60, max_length=24, validation=0.2, warmup_steps=1, cuda_graph="off", **more,
    )
    trainer = Trainer(Translate(config), processes)
    losses = [trainer.step().item() for _ in range(4)]
    end = [parameter.detach().flatten().tolist() for parameter in trainer.model.parameters()]
    return dict(end=end, losses=[sum(processes.gather(loss)) / processes.count for loss in losses])


def refused(processes, **more):
    try:
        Trainer(CharGPT(CharGPTConfig(corpus=corpus, device="cpu", steps=6, progress=False, **more)), processes)
    except ProcessesDisagree as error:
        return str(error)


with joined_processes() as processes:
    own = processes.rank
    reports = dict(
        agree=processes.agree(True),
        disagree=processes.agree(own == 0),
        rates=refused(processes, lr=1e-3 * (1 + own)),
        lengths=refused(processes, batch_size=4 + own),
        own=refused(processes, threads=1 + own, out=f"{folder}/{own}", context=8, batch_size=4),
        translated=translated(processes, batch_size=4),
        accumulated=translated(processes, batch_size=4, accumulate=2),
        whole=translated(Processes(), batch_size=8),
        first=train("first", processes),
        alone=train(f"alone{own}", Processes(), start=f"{folder}/first/middle"),
        resumed=train("second", processes, start=f"{folder}/first/middle"),
        graphed=train("graphed", processes, graphs=RecordedGraphs()),
        recorded=train("recorded", processes, cuda_graph="on"),
    )
    with open(f"{folder}/{processes.rank}.json", "w") as file:
        json.dump(reports, file)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reports of both processes by run, and the folder with the runs."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    pairs = [f"{'ab ' * (number % 5)}{number}\t{'xy ' * (number % 7)}{number}\tby\n" for number in range(1, 41)]
    (folder / "pairs.txt").write_text("".join(pairs))
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "program.py"), str(folder / "text.txt"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert finished.returncode == 0, finished.stderr[-3000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [report[name] for report in ranks] for name in ranks[0]}, folder


@pytest.fixture
def first(runs):
    return runs[0]["first"]


def test_weights_start_equal_and_stay_equal(first):
    one, two = first
    assert one["start"] == two["start"]
    assert one["end"] == two["end"]


def test_dropout_differs(first):
    one, two = first
    assert one["dropout"] != two["dropout"]


def test_the_data_is_shared_out(first):
    seen = [set(chain.from_iterable(report["seen"])) for report in first]
    assert len(seen[0]) == len(seen[1]) == 24
    assert not seen[0] & seen[1]


def test_both_know_the_validation_loss_of_all(first):
    one, two = first
    assert one["validation"] == two["validation"] != {}


def test_one_process_writes(runs):
    folder = runs[1] / "first"
    assert len(json.loads((folder / "middle" / "trainer.json").read_text())["random"]) == 2
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["event"] == "train"] == [2, 3, 4, 6]


def test_resuming_is_bit_exact(runs):
    reports, folder = runs
    assert json.loads((folder / "first" / "middle" / "trainer.json").read_text())["step"] == 3
    assert [report["end"] for report in reports["resumed"]] == [report["end"] for report in reports["first"]]


def test_captured_steps_share_gradients_and_change_no_bit(runs):
    reports, _ = runs
    assert [report["replays"] for report in reports["graphed"]] == [4, 4]
    assert [report["end"] for report in reports["graphed"]] == [report["end"] for report in reports["first"]]


@pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built")
def test_recorded_steps_repeat_the_exchange_of_gradients_and_change_no_bit(runs):
    reports, _ = runs
    assert [report["replays"] for report in reports["recorded"]] == ["on", "on"]
    assert [report["end"] for report in reports["recorded"]] == [report["end"] for report in reports["first"]]


def test_processes_agree_or_do_not_start(runs):
    reports, _ = runs
    assert (reports["agree"], reports["disagree"]) == ([True, True], [False, False])
    for name, difference in (
        ("rates", "lr is 0.001 in process 0 and 0.002 in process 1"),
        ("lengths", "batch_size is 4 in process 0 and 5 in process 1"),
    ):
        one, two = reports[name]
        assert one == two and difference in one
    assert reports["own"] == [None, None]


@pytest.mark.parametrize("how", ["translated", "accumulated"])
def test_several_processes_and_parts_are_one_large_batch(runs, how):
    """Batches of sentences have different numbers of tokens, over all of which the loss is a mean."""
    reports, _ = runs
    whole = reports["whole"][0]
    for report in reports[how]:
        assert report["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        found, expected = (torch.tensor([*chain(*each["end"])]) for each in (report, whole))
        assert (found - expected).norm() < 1e-4 * expected.norm()  # biases of keys have no gradient but rounding


def test_one_process_continues_in_the_order_of_two(runs):
    reports, _ = runs
    together = [sorted(chain(*each)) for each in zip(*(report["seen"] for report in reports["first"]), strict=True)]
    for report in reports["alone"]:
        assert [sorted(items) for items in report["seen"]] == together[3:]
