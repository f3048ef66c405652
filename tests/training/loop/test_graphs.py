"""Captured steps: with a stand-in for CUDA graphs, CPU recordings, and CUDA graphs; and batches prepared ahead."""

import dataclasses
import functools
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.support.host_graphs import CountedHostGraphs
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.training import (
    CharGPT,
    Imdb,
    Interrupted,
    Processes,
    Trainer,
    TrainingDiverged,
    load_checkpoint,
)
from transformer_kernels.training.loop.graphs import Prefetcher, choose_graphs, reason_against, warm_up_steps
from transformer_kernels.training.loop.optimisation import learning_rate
from transformer_kernels.training.step import Batch, to_device

STEPS = 20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class RecordedGraphs:
    """A stand-in for CUDA graphs: a capture computes nothing, a replay runs the work into the same result."""

    def __init__(self):
        self.runs = self.captures = self.replays = 0

    def side_stream(self):
        return nullcontext()

    def on_host(self, function):
        return function

    def has_read(self, tensor):
        return False

    def run(self, work):
        self.runs += 1
        return work()

    def capture(self, work, inputs=()):
        self.captures += 1
        result = torch.full((2,), torch.nan)

        def replay():
            self.replays += 1
            return result.copy_(work())

        return replay


@pytest.fixture(params=[RecordedGraphs, CountedHostGraphs])
def kind(request):
    if request.param is CountedHostGraphs and (reason := cpu.unavailable(CPU)) is not None:
        pytest.skip(reason)
    return request.param


class RefusingGraphs(RecordedGraphs):
    """Graphs whose capture fails as CUDA's does."""

    def __init__(self, error=RuntimeError):
        super().__init__()
        self.error = error

    def capture(self, work, inputs=()):
        self.captures += 1
        raise self.error("operation not permitted when stream is capturing\nmore")


class PoisoningCharGPT(CharGPT):
    """Poisons a batch when the next one is requested, as if its memory were reused."""

    made = ()

    def batch(self, indices, device):
        if self.made:
            self.made[-1].inputs[0].fill_(1_000_000)
        batch = super().batch(indices, device)
        self.made = (*self.made, batch._replace(inputs=(batch.inputs[0].clone(),)))
        return self.made[-1]


class UnevenCharGPT(CharGPT):
    """Every third batch lacks an item, and the eleventh lacks three."""

    calls = 0

    def batch(self, indices, device):
        self.calls += 1
        missing = 3 if self.calls == 11 else 1 if self.calls % 3 == 0 else 0
        return super().batch(indices[missing:], device)


class ConstantCharGPT(CharGPT):
    """The same batch at each step."""

    def batch(self, indices, device):
        return super().batch(torch.arange(len(indices)), device)


def plainly(config):
    return dataclasses.replace(config, cuda_graph="off")


def captured(trainer):
    return [graph for graphs in trainer._run._captured.values() for graph in graphs]


def addresses(trainer):
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    buffers = [buffer for graph in captured(trainer) for buffer in graph.buffers]
    return [tensor.data_ptr() for tensor in (*trainer.model.parameters(), *states, *rates, *buffers)]


def outcomes(trainer, steps=STEPS):
    result = []
    for _ in range(steps):
        trainer.step()
        result.append(trainer._latest.outcome)
    return torch.stack(result)  # (steps, 2)


def assert_resuming_is_exact(whole, parted, resumed):
    """A fit of `whole()` and one of 7 steps of `parted()`, continued by `resumed()`; returns the checkpoint."""
    straight = whole()
    straight.fit()
    first = parted()
    first.model.train()
    outcomes(first, 7)
    first.save("last")
    torch.manual_seed(999)
    second = resumed()
    second.restore(first.folder / "last")
    second.fit()
    expected, found = (load_checkpoint(trainer.folder / "last") for trainer in (straight, second))
    for part in ("weights", "optimizer"):
        tensors = getattr(found, part)
        assert tensors.keys() == getattr(expected, part).keys()
        assert all(torch.equal(tensors[name], value) for name, value in getattr(expected, part).items())
    return expected


@pytest.mark.parametrize("recipe", [PoisoningCharGPT, UnevenCharGPT, ConstantCharGPT])
def test_graphs_change_no_bit(char_config, recipe, kind):
    config = char_config(steps=STEPS, lr=1e-2)
    plain, graphed = Trainer(recipe(plainly(config))), Trainer(recipe(config), graphs=kind())
    torch.manual_seed(1)
    expected = outcomes(plain)
    torch.manual_seed(1)
    assert torch.equal(outcomes(graphed), expected)
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(graphed.model.state_dict()[name], weight), name
    assert expected.isfinite().all() and expected[:, 1].min() > 0


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_reviews_of_all_lengths_change_no_bit(imdb_config, batching, kind):
    config = imdb_config(steps=STEPS, padding="longest", batch_size=2, batching=batching, token_dropout=0.3)
    plain, graphs = Trainer(Imdb(plainly(config))), kind()
    torch.manual_seed(1)
    expected = outcomes(plain)
    graphed = Trainer(Imdb(config), graphs=graphs)
    torch.manual_seed(1)
    assert torch.equal(outcomes(graphed), expected)
    assert graphs.captures >= 1
    assert (graphs.runs == WARM_UP_CALLS) == (batching == "packed")


def test_a_step_is_captured_once_after_warm_up_on_real_batches(char_config, kind):
    graphs = kind()
    outcomes(Trainer(CharGPT(char_config(steps=STEPS)), graphs=graphs))
    assert (graphs.runs, graphs.captures, graphs.replays) == (WARM_UP_CALLS, 1, STEPS - WARM_UP_CALLS)


def test_shapes_have_graphs_of_their_own_and_rare_ones_have_none(char_config, kind):
    graphs = kind()
    trainer = Trainer(UnevenCharGPT(char_config(steps=STEPS)), graphs=graphs)
    outcomes(trainer)
    assert graphs.captures == len(captured(trainer)) == 2
    assert graphs.runs == 2 * WARM_UP_CALLS + 1


def test_there_are_never_more_graphs_than_the_limit(char_config, kind):
    graphs = kind()
    trainer = Trainer(UnevenCharGPT(char_config(steps=STEPS)), graphs=graphs)
    trainer._run._limit = 1
    outcomes(trainer)
    assert graphs.captures == len(captured(trainer)) == 1


def test_everything_a_graph_reads_keeps_its_address(char_config, kind):
    trainer = Trainer(PoisoningCharGPT(char_config(steps=STEPS)), graphs=kind())
    outcomes(trainer, WARM_UP_CALLS + 1)
    before = addresses(trainer)
    outcomes(trainer, 5)
    assert addresses(trainer) == before
    (graph,) = captured(trainer)
    made = [(*batch.inputs, batch.targets) for batch in trainer.recipe.made]
    assert all(torch.equal(*pair) for pair in zip(graph.buffers, made[-1], strict=True))
    theirs = {tensor.untyped_storage().data_ptr() for batch in made for tensor in batch}
    assert not theirs & {buffer.untyped_storage().data_ptr() for buffer in graph.buffers}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_schedule_reaches_the_tensor_that_the_graph_reads(char_config, kind):
    config = char_config(steps=STEPS, warmup_steps=2)
    trainer = Trainer(CharGPT(config), graphs=kind())
    first, second = (group["lr"] for group in trainer.optimizer.param_groups)
    assert first is second
    for step in range(STEPS):
        trainer.step()
        assert first.item() == pytest.approx(learning_rate(step, STEPS, config), rel=1e-6)


def test_each_replay_draws_its_own_dropout(char_config, kind):
    model = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.5}
    trainer = Trainer(ConstantCharGPT(char_config(steps=STEPS, lr=0.0, model=model)), graphs=kind())
    losses = outcomes(trainer)[:, 0].tolist()
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("before, after", [(True, True), (True, False), (False, True)])
def test_resuming_is_exact_with_and_without_graphs(char_config, tmp_path, before, after, kind):
    def trainer(out, graphed, **changes):
        config = char_config(out=str(tmp_path / out), steps=12, **changes)
        return Trainer(CharGPT(config), graphs=kind()) if graphed else Trainer(CharGPT(plainly(config)))

    runs = (("straight", False), ("parted", before), ("parted", after))
    assert_resuming_is_exact(*(functools.partial(trainer, *run) for run in runs))


def test_restoring_forgets_graphs_of_tensors_that_are_gone(char_config, kind):
    config = char_config(steps=STEPS)
    graphs = kind()
    trainer = Trainer(CharGPT(config), graphs=graphs)
    outcomes(trainer, 6)
    trainer.save("last")
    expected = outcomes(trainer, 4)
    rates = [id(group["lr"]) for group in trainer.optimizer.param_groups]
    trainer.restore(Path(config.out, "last"))
    assert [id(group["lr"]) for group in trainer.optimizer.param_groups] == rates
    assert torch.equal(outcomes(trainer, 4), expected)
    assert graphs.captures == 2


def test_a_step_that_cannot_be_captured_runs_eagerly_and_the_reason_is_reported(char_config):
    config = char_config(steps=STEPS)
    torch.manual_seed(1)
    plain = Trainer(CharGPT(plainly(config)))
    graphs = RefusingGraphs()
    trainer = Trainer(CharGPT(config), graphs=graphs)
    results = []
    for each in (plain, trainer):
        torch.manual_seed(1)
        results.append(outcomes(each))
    assert torch.equal(*results) and graphs.captures == 1
    message = "off: the step cannot be captured: operation not permitted when stream is capturing"
    assert trainer.graph_state == message


def test_a_step_that_must_be_captured_and_cannot_is_an_error(char_config):
    trainer = Trainer(CharGPT(char_config(cuda_graph="on")), graphs=RefusingGraphs())
    outcomes(trainer, WARM_UP_CALLS)
    with pytest.raises(ValueError, match="--cuda-graph on: the step cannot be captured: operation not permitted"):
        trainer.step()
    assert trainer.step_number == WARM_UP_CALLS


def test_want_of_memory_is_not_taken_for_a_step_that_cannot_be_captured(char_config):
    trainer = Trainer(CharGPT(char_config()), graphs=RefusingGraphs(torch.OutOfMemoryError))
    outcomes(trainer, WARM_UP_CALLS)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step()


def test_a_replayed_loss_that_is_not_finite_ends_the_run(char_config, kind):
    trainer = Trainer(CharGPT(char_config(steps=STEPS)), graphs=kind())
    outcomes(trainer, 5)
    trainer.model.head_bias.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="the loss is nan at step 6"):
        trainer.step()


def test_a_signal_while_capturing_ends_the_run_after_that_step(char_config):
    class InterruptedGraphs(RecordedGraphs):
        def capture(self, work, inputs=()):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().capture(work, inputs)

    config = char_config(steps=STEPS)
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM after step {WARM_UP_CALLS + 1}"):
        Trainer(CharGPT(config), graphs=InterruptedGraphs()).fit()
    assert load_checkpoint(Path(config.out, "last")).trainer["step"] == WARM_UP_CALLS + 1


def test_a_whole_run_reports_losses_of_replays(char_config, kind):
    plain = Trainer(CharGPT(plainly(char_config(steps=STEPS)))).fit()
    graphed = Trainer(CharGPT(char_config(steps=STEPS)), graphs=kind()).fit(overwrite=True)
    assert graphed.train_loss == plain.train_loss
    assert graphed.validation == plain.validation


@pytest.mark.parametrize(
    "changes, device, processes, message",
    [
        ({}, "cuda", Processes(), None),
        ({"dtype": "bfloat16", "compile": True, "deterministic": True}, "cuda", Processes(), None),
        ({}, "meta", Processes(), "the device is meta"),
        ({"backend": "cpu"}, "cpu", Processes(), None),
        ({"backend": "reference"}, "cpu", Processes(), "the backend is reference"),
        ({"backend": "torch"}, "cpu", Processes(), "only steps of the backend cpu are recorded; the backend is torch"),
        ({"compile": True}, "cpu", Processes(), "--compile"),
        ({"dtype": "float16"}, "cuda", Processes(), "GradScaler"),
        ({}, "cuda", Processes(count=2), "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"),
        ({"compile": True}, "cuda", Processes(count=2), "several processes with --compile"),
    ],
)
def test_what_forbids_a_graph_is_known(char_config, monkeypatch, changes, device, processes, message):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    reason = reason_against(char_config(**changes), torch.device(device), processes)
    assert reason is None if message is None else message in reason


def test_several_processes_are_captured_when_nccl_is_configured(char_config, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert reason_against(char_config(), CUDA, Processes(count=2)) is None
    assert warm_up_steps(Processes(count=2)) == 11 > warm_up_steps(Processes())


def test_a_graph_that_is_asked_for_in_vain_is_an_error(char_config):
    config = char_config(backend="torch", cuda_graph="on")
    with pytest.raises(ValueError, match="--cuda-graph on: on a CPU only steps of the backend cpu"):
        choose_graphs(config, CPU, Processes())
    graphs, state = choose_graphs(dataclasses.replace(config, cuda_graph="auto"), CPU, Processes())
    assert graphs is None and state.startswith("off: on a CPU only steps of the backend cpu")
    assert choose_graphs(char_config(cuda_graph="off"), CUDA, Processes()) == (None, "off: requested")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_captured_run_follows_the_plain_one_on_a_gpu(char_config, backend, dtype):
    results = []
    for cuda_graph in ("off", "on"):
        config = char_config(steps=STEPS, backend=backend, dtype=dtype, device="cuda", cuda_graph=cuda_graph)
        results.append(outcomes(Trainer(CharGPT(config))))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
def test_captured_reviews_of_all_lengths_follow_the_plain_ones_on_a_gpu(imdb_config):
    results = []
    for cuda_graph in ("off", "on"):
        config = imdb_config(steps=STEPS, device="cuda", cuda_graph=cuda_graph, batch_size=2)
        results.append(outcomes(Trainer(Imdb(config))))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
def test_each_replay_draws_its_own_dropout_on_a_gpu(char_config):
    model = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.5}
    config = char_config(steps=STEPS, lr=0.0, model=model, device="cuda", cuda_graph="on")
    assert len(set(outcomes(Trainer(ConstantCharGPT(config)))[:, 0].tolist())) == STEPS


@pytest.mark.gpu
def test_a_run_goes_on_after_a_capture_that_failed_on_a_gpu(char_config):
    """A graph cannot contain the read of a value on the host."""
    trainer = Trainer(CharGPT(char_config(steps=STEPS, device="cuda")))
    step = trainer._run._function
    step.check = lambda what, value: value.item()
    assert outcomes(trainer).isfinite().all()
    assert "cannot be captured" in trainer.graph_state


class Source:
    """Makes batches and remembers of which items."""

    def __init__(self):
        self.asked = []

    def __call__(self, indices):
        self.asked.append(indices.tolist())
        return Batch((indices[:, None],), indices, len(indices))


def test_a_prepared_batch_is_made_once():
    source = Source()
    batches = Prefetcher(source, CPU, ahead=True)
    for first in (0, 2, 4):
        taken = batches.take(torch.arange(first, first + 2))
        assert taken.targets.tolist() == [first, first + 1]
        batches.prepare(torch.arange(first + 2, first + 4))
    assert source.asked == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_that_was_not_prepared_is_made_when_it_is_taken():
    source = Source()
    batches = Prefetcher(source, CPU, ahead=True)
    batches.prepare(torch.arange(2))
    assert batches.take(torch.arange(5, 7)).targets.tolist() == [5, 6]


def test_a_cpu_that_is_busy_until_the_step_is_over_makes_nothing_ahead():
    source = Source()
    Prefetcher(source, CPU).prepare(torch.arange(2))
    assert source.asked == []


def test_a_run_with_batches_made_ahead_is_the_same(char_config):
    losses = []
    for ahead in (False, True):
        trainer = Trainer(CharGPT(char_config()))
        trainer._batches = Prefetcher(trainer._batches._load, CPU, ahead=ahead)
        torch.manual_seed(1)
        losses.append([trainer.step().item() for _ in range(6)])
    assert losses[0] == losses[1]


def test_a_tensor_on_its_device_is_not_copied():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor


@pytest.mark.gpu
def test_a_copy_to_a_gpu_does_not_wait_for_it():
    device = torch.device("cuda")
    to_device(torch.arange(1000), device)  # its pinned memory is used again, since to allocate some may wait
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(500_000_000)
    copied = to_device(torch.arange(1000), device)
    busy.record()
    assert not busy.query()
    assert torch.equal(copied.cpu(), torch.arange(1000))
