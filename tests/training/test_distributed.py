"""Two processes under torchrun, on gloo."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from transformer_kernels.training import CharGPT, CharGPTConfig, Trainer, joined_processes
corpus, out, resume = sys.argv[1:]
config = CharGPTConfig(
    corpus=corpus, out=out, model={"layers": 1, "width": 16, "heads": 2}, context=8, batch_size=4, device="cpu",
    steps=6, log_every=2, eval_every=3, save_every=3, progress=False,
)
with joined_processes() as processes:
    recipe = CharGPT(config)
    graphs = None
    if resume == "graphs":
        from tests.training.test_graphs import RecordedGraphs
        from transformer_kernels.training import graphs as module
        module.warm_up_steps = lambda processes: 2
        graphs = RecordedGraphs()
    trainer = Trainer(recipe, processes, graphs=graphs)
    if resume == "resume":
        trainer.restore(out.replace("second", "first") + "/middle")
    seen = []
    batch = recipe.batch

    def watched_batch(indices, device):
        seen.append(indices.tolist())
        if len(seen) == 4 and resume != "resume":
            trainer.save("middle")
        return batch(indices, device)

    recipe.batch = watched_batch
    start = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    dropout = torch.get_rng_state().sum().item()
    result = trainer.fit()
    end = [parameter.detach().flatten().tolist() for parameter in trainer.model.parameters()]
    replays = graphs.replays if graphs else 0
    report = dict(replays=replays, start=start, dropout=dropout, end=end, seen=seen, validation=result.validation)
    with open(f"{out}.{processes.rank}.json", "w") as file:
        json.dump(report, file)
"""


def run_two(text_file, out, resume="no"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (out.parent / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command += [str(out.parent / "program.py"), str(text_file), str(out), resume]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Both processes' reports of a run, its checkpoint after three steps, its log, and where all that is."""
    folder = tmp_path_factory.mktemp("two")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    first = run_two(text, folder / "first")
    checkpoint = json.loads((folder / "first" / "middle" / "trainer.json").read_text())
    log = (folder / "first" / "log.jsonl").read_text().splitlines()
    return first, checkpoint, [json.loads(line) for line in log], (text, folder)


def test_weights_start_equal_and_stay_equal(reports):
    (one, two), *_ = reports
    assert one["start"] == two["start"]
    assert one["end"] == two["end"]


def test_dropout_differs(reports):
    (one, two), *_ = reports
    assert one["dropout"] != two["dropout"]


def test_the_data_is_shared_out(reports):
    (one, two), *_ = reports
    seen = [set(chain.from_iterable(report["seen"])) for report in (one, two)]
    assert len(seen[0]) == len(seen[1]) == 24
    assert not seen[0] & seen[1]


def test_both_know_the_validation_loss_of_all(reports):
    (one, two), *_ = reports
    assert one["validation"] == two["validation"] != {}


def test_one_process_writes(reports):
    _, checkpoint, log, _ = reports
    assert len(checkpoint["random"]) == 2
    assert [line["step"] for line in log if line["event"] == "train"] == [2, 3, 4, 6]


def test_resuming_is_bit_exact(reports):
    (one, two), checkpoint, _, (text, folder) = reports
    resumed = run_two(text, folder / "second", "resume")
    assert checkpoint["step"] == 3
    assert [report["end"] for report in resumed] == [one["end"], two["end"]]


def test_captured_steps_share_gradients_and_change_no_bit(reports):
    plain, *_, (text, folder) = reports
    graphed = run_two(text, folder / "graphed", "graphs")
    assert [report["replays"] for report in graphed] == [4, 4]
    assert [report["end"] for report in graphed] == [report["end"] for report in plain]
