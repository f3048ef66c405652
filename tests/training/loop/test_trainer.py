import functools
import io
import json
import math
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import (
    CharGPT,
    CheckpointError,
    Trainer,
    TrainingDiverged,
    load_checkpoint,
    save_checkpoint,
)
from transformer_kernels.training.checkpoint import random_state, restore_random_state
from transformer_kernels.training.loop.optimisation import learning_rate
from transformer_kernels.training.step import batch_loss


def log_of(config, event):
    lines = [json.loads(line) for line in Path(config.out, "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


class StepClock:
    """A second for each step and each validation of its trainer."""

    trainer = None

    def __call__(self):
        return float(self.trainer.step_number + self.trainer.evaluated_at) if self.trainer else 0.0


def timed(recipe):
    clock = StepClock()
    clock.trainer = Trainer(recipe, clock=clock)
    return clock.trainer


def weights_of(folder):
    return load_checkpoint(folder).weights


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def losses_of(config, steps):
    trainer = Trainer(CharGPT(config))
    return [trainer.step().item() for _ in range(steps)]


def test_training_learns(char_config):
    result = Trainer(CharGPT(char_config(steps=120, lr=1e-2, eval_every=60))).fit()
    assert result.ended_by == "steps"
    assert result.train_loss < 1.5 < math.log(28)
    assert result.validation["loss"] < 1.5
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 2**20
    assert result.model_flop_utilisation is None


def test_progress_of_a_timed_run_has_the_time_left_the_loss_and_the_speed(char_config, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stream)
    timed(CharGPT(char_config(steps=None, time_limit=70, log_every=5, eval_every=100, progress=True))).fit()
    assert "left=01:05, loss=3." in stream.getvalue() and "tokens/s=" in stream.getvalue()
    assert "left=00:00" in stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_written_to_a_terminal_only(char_config, monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stream)
    Trainer(CharGPT(char_config(steps=3, progress=True))).fit()
    assert ("training: 100%" in stream.getvalue()) == terminal
    assert terminal or not stream.getvalue()


def test_the_same_seed_gives_the_same_bits_and_another_does_not(char_config):
    assert losses_of(char_config(), 4) == losses_of(char_config(), 4)
    assert losses_of(char_config(), 4) != losses_of(char_config(seed=1), 4)


def test_a_step_learns_from_the_loss_that_evaluation_measures(char_config):
    config = char_config(model={"layers": 1, "width": 16, "heads": 2, "dropout": 0.0})
    trainer = Trainer(CharGPT(config))
    batch = trainer.recipe.batch(trainer.sampler.peek(), trainer.device)
    expected, correct, count = batch_loss(trainer.model, batch)
    assert trainer.step().item() == pytest.approx(expected.item(), abs=1e-6)
    assert 0 <= correct.item() <= count.item() == batch.targets.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(char_config, dtype):
    result = Trainer(CharGPT(char_config(steps=60, lr=1e-2, dtype=dtype))).fit()
    assert result.train_loss < 2.2


def test_compiling_keeps_the_losses(char_config, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert losses_of(char_config(compile=True), 3) == pytest.approx(losses_of(char_config(), 3), abs=1e-5)


@pytest.mark.slow
def test_compiling_with_the_default_compiler_keeps_the_losses_without_dropout(char_config):
    model = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.0}
    expected = losses_of(char_config(model=model), 3)
    assert losses_of(char_config(model=model, compile=True), 3) == pytest.approx(expected, abs=1e-5)


def test_deterministic_training_runs(char_config):
    try:
        assert len(losses_of(char_config(deterministic=True), 2)) == 2
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_epochs_are_counted_in_steps(char_config):
    trainer = Trainer(CharGPT(char_config(steps=None, epochs=2)))
    assert trainer.total_steps == 2 * trainer.sampler.batches_per_epoch == 2 * (trainer.recipe.train_length // 4)


def test_best_and_last_are_kept(char_config):
    config = char_config()
    trainer = Trainer(CharGPT(config))
    losses = iter([{"loss": 2.0, "accuracy": 0.0}, {"loss": 3.0, "accuracy": 0.0}])
    trainer.evaluate = lambda stop=None: next(losses)
    result = trainer.fit()
    assert load_checkpoint(Path(config.out, "best")).trainer["step"] == 3
    assert load_checkpoint(Path(config.out, "last")).trainer["step"] == 6
    assert result.best_loss == 2.0
    assert_same(weights_of(Path(config.out, "last")), trainer.model.state_dict())


def test_a_validation_that_is_not_a_number_is_never_the_best(char_config):
    config = char_config(steps=9)
    trainer = Trainer(CharGPT(config))
    losses = iter([float("nan"), 2.0, float("nan")])
    trainer.evaluate = lambda stop=None: {"loss": next(losses), "accuracy": 0.0}
    assert trainer.fit().best_loss == 2.0
    assert load_checkpoint(Path(config.out, "best")).trainer["step"] == 6


@pytest.mark.parametrize("accumulate", [2, 3, 100])
def test_accumulated_parts_are_the_whole_batch(char_config, accumulate):
    model = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.0}
    plain, parts = (Trainer(CharGPT(char_config(accumulate=each, model=model))) for each in (1, accumulate))
    for _ in range(3):
        assert parts.step().item() == pytest.approx(plain.step().item(), rel=1e-5)
    for found, expected in zip(parts.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-3, atol=2e-5)


def test_an_equal_loss_is_no_better_one(char_config):
    config = char_config(steps=100, eval_every=2, patience=2)
    trainer = Trainer(CharGPT(config))
    trainer.evaluate = lambda stop=None: {"loss": 1.0, "accuracy": 0.0}
    assert trainer.fit().ended_by == "patience"
    assert trainer.step_number == 6
    assert load_checkpoint(Path(config.out, "best")).trainer["step"] == 2


def test_a_time_limit_ends_a_run(char_config):
    config = char_config(steps=100_000, time_limit=7, eval_every=100_000)
    result = timed(CharGPT(config)).fit()
    assert (result.ended_by, result.step) == ("time limit", 7)
    assert result.validation
    assert load_checkpoint(Path(config.out, "last")).trainer["seconds"] == 14.0  # the validation included


def test_a_time_limit_is_the_only_length_where_it_is_the_only_one_given(char_config):
    config = char_config(steps=None, time_limit="1m", eval_every=100)
    trainer = timed(CharGPT(config))
    assert (config.time_limit, config.steps, config.epochs, trainer.total_steps) == (60.0, None, None, math.inf)
    assert trainer.fit().step == 60


def test_validation_counts_against_the_time_limit(char_config):
    """The clock reads 3 after step 3, 6 after its validation, and 12 after that of step 6."""
    assert timed(CharGPT(char_config(steps=None, time_limit=10, eval_every=3))).fit().step == 6


def test_the_learning_rate_anneals_over_the_time(char_config):
    config = char_config(steps=None, time_limit=40, lr=1.0, log_every=1, eval_every=100, schedule="cosine")
    timed(CharGPT(config)).fit()
    rates = [line["learning_rate"] for line in log_of(config, "train")]
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 40)) for step in range(40)]
    assert rates == pytest.approx([expected[0] / 2, *expected[1:]])  # two steps of warmup


def test_an_interrupted_run_resumes_at_its_time(char_config, tmp_path):
    straight, parted = (
        char_config(out=str(tmp_path / name), steps=None, time_limit=9, save_every=5, schedule="cosine")
        for name in "ab"
    )
    timed(CharGPT(straight)).fit()
    with pytest.raises(KeyboardInterrupt):
        timed(InterruptedCharGPT(parted, 5)).fit()
    resumed = timed(CharGPT(parted))
    resumed.restore(tmp_path / "b" / "last")
    assert resumed.seconds == 8.0  # five steps, and a validation after the third
    resumed.fit()
    first, second = load_checkpoint(tmp_path / "a" / "last"), load_checkpoint(tmp_path / "b" / "last")
    assert_same(second.weights, first.weights)
    assert second.trainer == first.trainer
    assert (
        by_step(log_of(parted, "train"))[6]["learning_rate"] == by_step(log_of(straight, "train"))[6]["learning_rate"]
    )


def test_without_a_split_there_is_no_validation(char_config):
    config = char_config(split="none")
    result = Trainer(CharGPT(config)).fit()
    assert result.validation == {}
    assert not Path(config.out, "best").exists()


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_resuming_is_bit_exact(char_config, tmp_path, stop_at):
    straight, parted = char_config(out=str(tmp_path / "a")), char_config(out=str(tmp_path / "b"), save_every=stop_at)
    timed(CharGPT(straight)).fit()
    with pytest.raises(KeyboardInterrupt):
        timed(InterruptedCharGPT(parted, stop_at)).fit()
    torch.manual_seed(999)
    resumed = timed(CharGPT(parted))
    resumed.restore(tmp_path / "b" / "last")
    assert resumed.step_number == stop_at
    resumed.fit()
    first, second = load_checkpoint(tmp_path / "a" / "last"), load_checkpoint(tmp_path / "b" / "last")
    assert_same(second.weights, first.weights)
    assert_same(second.optimizer, first.optimizer)
    assert second.trainer == first.trainer
    assert by_step(log_of(parted, "validation")) == by_step(log_of(straight, "validation"))


def test_resuming_in_float16_keeps_the_loss_scale(char_config, tmp_path):
    whole, half = (char_config(out=str(tmp_path / name), dtype="float16") for name in ("whole", "half"))

    def trainer(config, steps):
        result = Trainer(CharGPT(config))
        torch.manual_seed(1)
        result.step()
        result.scaler.update(new_scale=64.0)
        for _ in range(steps - 1):
            result.step()
        return result

    straight, parted = trainer(whole, 5), trainer(half, 3)
    parted.save("last")
    resumed = Trainer(CharGPT(half))
    resumed.restore(tmp_path / "half" / "last")
    assert resumed.scaler.get_scale() == 64.0
    assert resumed.scaler.state_dict() == parted.scaler.state_dict()
    for _ in range(2):
        resumed.step()
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()
    assert_same(resumed.model.state_dict(), straight.model.state_dict())


def by_step(lines):
    return {line["step"]: line for line in lines}


class InterruptedCharGPT(CharGPT):
    """Fails when the step after `steps` requests its batch."""

    def __init__(self, config, steps):
        super().__init__(config)
        self.steps = steps

    def batch(self, indices, device):
        if self.steps == 0:
            raise KeyboardInterrupt
        self.steps -= 1
        return super().batch(indices, device)


def test_every_random_state_comes_back():
    import random

    import numpy

    def draw():
        return random.random(), random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(1).item()

    draw()
    state = json.loads(json.dumps(random_state(torch.device("cpu"))))
    expected = [draw() for _ in range(3)]
    restore_random_state(state, torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"step": "many"},
        {"step": 1e999},
        {"seconds": None},
        {"random": [{}]},
        {"random": None},
        {"sampler": []},
        {"best_loss": 1, "stale_evaluations": {}},
    ],
)
def test_a_hostile_trainer_state_is_refused(char_config, change):
    config = char_config()
    trainer = Trainer(CharGPT(config))
    trainer.fit()
    checkpoint = load_checkpoint(Path(config.out, "last"))
    checkpoint.trainer.update(change)
    save_checkpoint(Path(config.out, "last"), checkpoint)
    with pytest.raises(CheckpointError, match="the trainer state cannot be restored"):
        Trainer(CharGPT(config)).restore(Path(config.out, "last"))


def test_weights_that_are_not_finite_are_never_saved(char_config):
    trainer = Trainer(CharGPT(char_config()))
    trainer.save("last")
    trainer.model.head_bias.data[3] = float("nan")
    with pytest.raises(TrainingDiverged, match="weights are not finite after step 0"):
        trainer.save("last")
    assert load_checkpoint(Path(trainer.config.out, "last")).weights["head_bias"].isfinite().all()


@pytest.mark.parametrize(
    "model, message",
    [
        ({"depth": 3}, "model: .*depth"),
        ({"context": 9}, "model: context cannot be set"),
        ({"width": 256, "heads": 6}, "divisible"),
    ],
)
def test_an_impossible_model_is_reported(char_config, model, message):
    with pytest.raises(ValueError, match=message):
        Trainer(CharGPT(char_config(model=model)))


class DivergingCharGPT(CharGPT):
    """A model whose logits become NaN at the given step."""

    def __init__(self, config, bad_step):
        super().__init__(config)
        self.bad_step = bad_step

    def batch(self, indices, device):
        self.bad_step -= 1
        if self.bad_step == 0:
            self.trainer.model.head_bias.data.fill_(float("nan"))
        return super().batch(indices, device)


def test_a_nan_loss_stops_with_step_rate_and_batch_and_is_never_saved(char_config):
    config = char_config(schedule="constant", eval_every=1, save_every=1)
    recipe = DivergingCharGPT(config, bad_step=4)
    recipe.trainer = Trainer(recipe)
    indices = ", ".join(map(str, upcoming_batch(config, 4)))
    message = rf"the loss is nan at step 4 \(learning rate 0\.003, batch of items {indices}\)"
    with pytest.raises(TrainingDiverged, match=message):
        recipe.trainer.fit()
    for name in ("best", "last"):
        assert all(weight.isfinite().all() for weight in weights_of(Path(config.out, name)).values())
        assert load_checkpoint(Path(config.out, name)).trainer["step"] <= 3
    assert log_of(config, "diverged")[0]["at_step"] == 4


def upcoming_batch(config, step):
    sampler = Trainer(CharGPT(config)).sampler
    for _ in range(step - 1):
        sampler.advance()
    return sampler.peek().tolist()


def test_an_infinite_gradient_stops_before_the_weights_change(char_config):
    trainer = Trainer(CharGPT(char_config()))
    trainer.model.head_bias.register_hook(lambda gradient: gradient * math.inf)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(TrainingDiverged, match="the gradient norm is"):
        trainer.step()
    assert_same(trainer.model.state_dict(), before)


def test_out_of_memory_leaves_the_optimizer_unstepped_and_the_next_step_works(char_config):
    trainer, twin = Trainer(CharGPT(char_config())), Trainer(CharGPT(char_config()))
    for each in (trainer, twin):
        torch.manual_seed(1)
        each.step()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    def exhausted(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = trainer.model.head_bias.register_hook(exhausted)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.step()
    assert_same(trainer.model.state_dict(), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.step_number == 1
    hook.remove()
    for each in (trainer, twin):
        torch.manual_seed(2)
        each.step()
    assert_same(trainer.model.state_dict(), twin.model.state_dict())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_clipping_bounds_the_gradient(char_config, dtype):
    """The first average of the gradients is a tenth of the first gradient."""
    trainer = Trainer(CharGPT(char_config(clip=0.01, dtype=dtype)))
    trainer.step()
    averages = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert torch.nn.utils.get_total_norm(averages).item() == pytest.approx(0.001, rel=1e-3)


def test_a_small_gradient_is_left_alone(char_config):
    clipped, free = Trainer(CharGPT(char_config(clip=1e3))), Trainer(CharGPT(char_config(clip=0.0)))
    for trainer in (clipped, free):
        torch.manual_seed(1)
        trainer.step()
    assert_same(clipped.model.state_dict(), free.model.state_dict())


def test_the_optimizer_has_the_beta2_of_the_config(char_config):
    assert {group["betas"] for group in Trainer(CharGPT(char_config(beta2=0.9))).optimizer.param_groups} == {(0.9, 0.9)}


def test_the_learning_rate_rises_and_falls(char_config):
    config = char_config(lr=1.0, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(step, 44, config) for step in range(46)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[24] == pytest.approx(0.55)
    assert rates[44] == rates[45] == pytest.approx(0.1)
    linear = char_config(lr=1.0, warmup_steps=4, schedule="linear")
    assert [learning_rate(step, 44, linear) for step in (0, 3, 4, 24, 34, 44)] == [0.25, 1.0, 1.0, 0.5, 0.25, 0.0]
    assert learning_rate(10**6, math.inf, linear, 0.75) == 0.25
    constant = char_config(lr=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(step, 44, constant) for step in (3, 4, 43)] == [1.0, 1.0, 1.0]


def test_the_share_of_the_time_drives_the_learning_rate_where_it_is_ahead(char_config):
    config = char_config(lr=1.0, warmup_steps=4, schedule="cosine")
    assert learning_rate(10**6, math.inf, config, 0.5) == learning_rate(4, 44, config, 0.5) == pytest.approx(0.55)
    assert learning_rate(24, 44, config, 0.25) == pytest.approx(0.55)
    slow = char_config(lr=1.0, warmup_steps=100, schedule="constant")
    assert learning_rate(2, math.inf, slow, 0.05) == 0.5  # at most a tenth of the time is warmup
    assert learning_rate(2, math.inf, slow, 0.1) == 1.0


def test_the_warm_up_is_at_most_a_tenth_of_the_run(char_config):
    config = char_config(lr=1.0, warmup_steps=100, schedule="constant")
    assert [learning_rate(step, 20, config) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_the_log_tells_what_happened(char_config):
    config = char_config()
    Trainer(CharGPT(config)).fit()
    assert [line["step"] for line in log_of(config, "train")] == [2, 3, 4, 6]
    assert [line["step"] for line in log_of(config, "validation")] == [3, 6]
    assert {"loss", "learning_rate", "tokens_per_second", "epoch"} < log_of(config, "train")[0].keys()
    assert {"compile_seconds", "peak_memory_bytes"} < log_of(config, "end")[0].keys()


def test_tensorboard_gets_the_same_numbers(char_config):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    config = char_config(tensorboard=True)
    Trainer(CharGPT(config)).fit()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(config.out, "tensorboard"))).Reload()
    for name in ("loss", "learning_rate", "tokens_per_second"):
        logged = [(line["step"], pytest.approx(line[name])) for line in log_of(config, "train")]
        assert [(scalar.step, scalar.value) for scalar in events.Scalars(f"train/{name}")] == logged


def test_threads_are_set_when_asked_for(char_config):
    before = torch.get_num_threads()
    try:
        Trainer(CharGPT(char_config()))
        assert torch.get_num_threads() == before
        Trainer(CharGPT(char_config(threads=before + 1)))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
