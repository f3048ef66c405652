"""The training loop shared by all recipes."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from transformer_kernels.backends import cpu
from transformer_kernels.graphs import Graphs
from transformer_kernels.ops._reproducible import Reproducible
from transformer_kernels.training._optional import require
from transformer_kernels.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    RunFolderError,
    claimed,
    load_checkpoint,
    load_weights,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from transformer_kernels.training.data.files import numbered_folder
from transformer_kernels.training.data.sampler import checked_number
from transformer_kernels.training.distributed import (
    Interrupted,
    Processes,
    StopRequest,
    TrainingDiverged,
    choose_device,
)
from transformer_kernels.training.loop.graphs import Prefetcher, recorded_step
from transformer_kernels.training.loop.launched import check_agreement, launch_name
from transformer_kernels.training.loop.measures import Padding, RunLog, Stopwatch, peak_flops, peak_memory
from transformer_kernels.training.loop.optimisation import (
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from transformer_kernels.training.recipe import Recipe
from transformer_kernels.training.step import (
    Batch,
    TrainingLoss,
    autocast,
    choose_dtype,
    evaluation_totals,
    matrix_products,
)


class StepTaken(NamedTuple):
    """A step, and its loss and gradient norm (2,) on the device, possibly still being computed."""

    number: int
    learning_rate: float
    indices: Tensor
    outcome: Tensor


@dataclass
class Result:
    """The outcome of a run."""

    step: int
    train_loss: float
    validation: dict[str, float]
    best_loss: float | None
    tokens_per_second: float
    padding_fraction: float
    compile_seconds: float
    peak_memory_bytes: int
    model_flop_utilisation: float | None
    ended_by: str


def seed_everything(seed: int) -> None:
    """Seed the Python, NumPy and PyTorch generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Trainer:
    """Trains the model of a recipe: `Trainer(CharGPT(CharGPTConfig(steps=200))).fit()`.

    Weights are initialised from the config's seed in every process; dropout uses seed + 1 + rank.

    Args:
        recipe: the model and its data.
        processes: the process group.
        graphs: captures steps, instead of the choice of the config's `cuda_graph`.
        clock: the time in seconds, by which `time_limit` is measured.
    """

    def __init__(
        self,
        recipe: Recipe,
        processes: Processes | None = None,
        *,
        graphs: Graphs | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.recipe, self.config = recipe, recipe.config
        self.processes = processes or Processes()
        self.device = choose_device(self.config.device, self.processes)
        check_agreement(self.config, self.device, recipe.fingerprint, description(recipe), self.processes)
        self._mode = _reproducible_mode(self.config, self.device, self.processes)
        available = self.processes.gather(choose_dtype(self.config.dtype, self.device))
        self.config.dtype = available[0] if len(set(available)) == 1 else "float32"  # of "auto"
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        seed_everything(self.config.seed)
        with self._mode:
            self.model = recipe.build_model().to(self.device)
        seed_everything(self.config.seed + 1 + self.processes.rank)
        self.optimizer = make_optimizer(self.model, self.config, self.device, self.processes)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.dtype == "float16")
        self.sampler = recipe.sampler(self.processes)
        self._log: RunLog | None = None
        self._run = recorded_step(
            TrainingLoss(self.model, recipe.loss),
            self.optimizer,
            self.scaler,
            self.config,
            self.device,
            self.processes,
            check=self._check_on_cpu,
            report=self._report_graphs,
            graphs=graphs,
            mode=self._mode if self.config.reproducible else None,
            exchange=lambda: self.processes.count > 1 and (recipe.targets_vary or not self.sampler.is_even),
        )
        self._batches = Prefetcher(self._parts, self.device)
        self.step_number = 0
        self.evaluated_at = 0
        self.validation: dict[str, float] = {}
        self.best_loss: float | None = None
        self.stale_evaluations = 0
        self.stopwatch = Stopwatch(self.device)
        self.seconds = 0.0  # since the start of the run, validation, checkpoints and earlier sessions included
        self._clock, self._clock_read = clock, clock()
        self._latest: StepTaken
        self._pending: list[StepTaken] = []
        self._train_loss = float("nan")
        self._padded_length = 0
        self.padding = Padding()
        self._start: Path | None = None

    @property
    def total_steps(self) -> float:
        """The length of the run in steps; infinite if only its time is limited."""
        return self.config.steps or (self.config.epochs or math.inf) * self.sampler.batches_per_epoch

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of checkpoints and log; without `config.out` a new runs/<recipe> or runs/<recipe>-N."""
        if not self.config.out:
            self.config.out = str(numbered_folder(f"runs/{self.config.recipe}"))
        return Path(self.config.out)

    def fit(self, *, overwrite: bool = False, around: AbstractContextManager[Any] | None = None) -> Result:
        """Train until the last step, the time limit, early stopping or a signal; the last checkpoint is always saved,
        except on divergence.

        Args:
            overwrite: delete an existing run in the folder.
            around: entered once the folder is this run's, such as a certificate that is written into it.

        Raises:
            RunFolderError: the folder contains another run, or another process is training into it.
            TrainingDiverged: a loss or gradient is not finite; earlier checkpoints are kept.
            Interrupted: SIGINT or SIGTERM was received; the last checkpoint contains the completed step.
        """
        with self._claimed_folder(overwrite), around or nullcontext():
            return self._fit()

    @contextmanager
    def _claimed_folder(self, overwrite: bool) -> Iterator[None]:
        """Lock the folder in the first process; an error there is raised in every process."""
        with ExitStack() as stack:
            error: Exception | None = None
            if self.processes.first:
                try:
                    stack.enter_context(claimed(self.folder, self._start, overwrite=overwrite))
                except (OSError, RunFolderError) as caught:
                    error = caught
            error = self.processes.gather(error)[0]
            if error is not None:
                raise error
            yield

    def _fit(self) -> Result:
        try:
            with StopRequest(self.processes) as stop:
                self._begin()
                with self._progress_bar() as bar, self._divergence_shared():
                    ended_by = self._loop(stop, bar)
            result = self._result(ended_by)
            self._write_log("end", **{name: value for name, value in vars(result).items() if name != "step"})
            return result
        finally:
            if self._log is not None:
                self._log.close()

    def _begin(self) -> None:
        self._log = RunLog(self.folder, self.config.tensorboard) if self.processes.first else None
        self._write_log(
            "start", device=str(self.device), backend=self.config.backend, torch=torch.__version__, launch=launch_name()
        )
        self._write_log("cuda_graph", state=self.graph_state)
        if self.step_number == 0:
            self.recipe.begin(self.model)

    def _loop(self, stop: StopRequest, bar: Any) -> str:
        config = self.config
        self.model.train()
        self.stopwatch.start()
        self._clock_read = self._clock()
        while True:
            if self._validation_is_due():
                self._validate(stop, bar)
            if (ended_by := self._reason_to_end(stop)) is not None:
                break
            self.step()
            self._pending.append(self._latest)
            bar.update()
            if self.step_number % config.log_every == 0:
                self._report(bar)
            if self.step_number % config.save_every == 0:
                self._report(bar)
                self.save("last")
        self._report(bar)
        if ended_by != "signal" and self.evaluated_at != self.step_number:
            self._validate(stop, bar)
        self.save("last")
        if ended_by == "signal":
            raise Interrupted(stop.agreed, self.step_number, self.folder / "last", self._resume_command())
        return ended_by

    def _resume_command(self) -> str:
        processes = f" --processes {self.processes.count}" if self.processes.count > 1 else ""
        return f"train {self.config.recipe} --resume {shlex.quote(str(self.folder))}{processes}"

    def _validation_is_due(self) -> bool:
        """Checked before a step rather than after it, so that a resumed run repeats an interrupted validation."""
        at_end = self.step_number >= self.total_steps
        regular = self.step_number > 0 and self.step_number % self.config.eval_every == 0
        return (at_end or regular) and self.evaluated_at != self.step_number

    def _reason_to_end(self, stop: StopRequest) -> str | None:
        """Why the run ends now, or None; identical in every process."""
        self._read_clock()
        self.seconds = stop.agree(self.seconds)
        if stop.agreed:
            return "signal"
        if self.step_number >= self.total_steps:
            return "steps"
        if self._time_share >= 1.0:
            return "time limit"
        if self.config.patience and self.stale_evaluations >= self.config.patience:
            return "patience"
        return None

    def _read_clock(self) -> None:
        before, self._clock_read = self._clock_read, self._clock()
        self.seconds += self._clock_read - before

    @property
    def _time_share(self) -> float:
        """The share of the time limit that is used; 0 without a limit."""
        return self.seconds / self.config.time_limit if self.config.time_limit else 0.0

    def step(self) -> Tensor:
        """One optimizer step. If it fails (out of memory), weights, optimizer and data position are unchanged."""
        rate = learning_rate(self.step_number, self.total_steps, self.config, self._time_share)
        indices = self.sampler.peek()
        self._attempt = (self.step_number + 1, rate, indices)
        with self._mode:
            parts = self._batches.take(indices)
        set_learning_rate(self.optimizer, rate)
        with matrix_products(self.config.dtype):  # the counts of a batch are no part of the step
            outcome = self._run(*(part._replace(tokens=0, positions=None) for part in parts))
        self.sampler.advance()
        self.step_number += 1
        tokens = sum(part.tokens for part in parts)
        self.stopwatch.add_step(tokens * self.processes.count)
        self._padded_length = parts[0].size // len(parts[0].targets)
        self.padding.add(tokens, sum(part.size for part in parts))
        self._latest = StepTaken(*self._attempt, outcome)
        self._batches.prepare(self.sampler.peek())
        return outcome[0]

    def repeat(self) -> None:
        """Forward and backward of the step that was tried last, eagerly; weights are unchanged."""
        for part in self._parts(self._attempt[2]):
            with matrix_products(self.config.dtype), autocast(self.device.type, self.config.dtype):
                loss = self.recipe.loss(self.model, part.inputs, part.targets)
            loss.backward()
        self.model.zero_grad()

    def _parts(self, indices: Tensor) -> list[Batch]:
        """The batch of these items in the parts whose gradients are accumulated."""
        parts = indices.tensor_split(min(self.config.accumulate, len(indices)))
        return [self.recipe.batch(part, self.device) for part in parts]

    def _report_graphs(self, state: str) -> None:
        """Log whether steps are graphs; on a GPU, print the reason if they are not."""
        self.graph_state = state
        self._write_log("cuda_graph", state=state)
        if state.startswith("off") and self.device.type == "cuda" and self.processes.first:
            require("tqdm").tqdm.write(f"CUDA graph {state}", file=sys.stderr)

    def _check_on_cpu(self, what: str, value: Tensor) -> None:
        """Check a value on the CPU. On a GPU reading each value would synchronise; `_report` reads them together."""
        if self.device.type == "cpu" and not torch.isfinite(value):
            self._diverged(what, value.item(), *self._attempt)

    def _diverged(self, what: str, value: float, step: int, rate: float, indices: Tensor) -> None:
        shown = ", ".join(map(str, indices[:8].tolist())) + (", ..." if len(indices) > 8 else "")
        own = f" of process {self.processes.rank}" if self.processes.count > 1 else ""
        message = (
            f"the {what} is {value} at step {step} (learning rate {rate:.3g}, batch of items {shown}{own}); "
            f"try a lower --lr, a smaller --clip or more --warmup-steps"
        )
        values = {"what": what, "value": str(value), "at_step": step, "learning_rate": rate}
        values |= {"items": indices.tolist(), "process": self.processes.rank}
        self._write_log("diverged", **values)
        self.processes.note("diverged", json.dumps([message, values]))
        raise TrainingDiverged(message)

    @contextmanager
    def _divergence_shared(self) -> Iterator[None]:
        """If the connection to another process is lost because that one diverged, log it and diverge, too."""
        try:
            yield
        except TrainingDiverged:
            raise
        except RuntimeError as error:
            if not (noted := self.processes.noted("diverged")):
                raise
            message, values = json.loads(noted)
            self._write_log("diverged", **values)
            raise TrainingDiverged(message) from error

    def evaluate(self, stop: StopRequest | None = None) -> dict[str, float]:
        """Mean loss and accuracy over the validation data; empty if there is none or a stop was requested."""
        batches = self.recipe.validation_batches(self.device, self.processes)
        with self._mode:
            stopped_early = lambda: stop is not None and stop.signum > 0  # noqa: E731
            totals = evaluation_totals(self.model, batches, self.config.dtype, stopped_early)
        stopped = float(stop is not None and stop.signum > 0)
        loss, correct, count, stopped = self.processes.sum([*totals, stopped])
        return {} if stopped or not count else {"loss": loss / count, "accuracy": correct / count}

    def _validate(self, stop: StopRequest, bar: Any) -> None:
        """Evaluate, save the best checkpoint, and count evaluations without improvement."""
        self._report(bar)
        self.stopwatch.pause()
        self.validation = self.evaluate(stop)
        if self.validation:
            self.evaluated_at = self.step_number
            self._write_log("validation", **self.validation)
            loss = self.validation["loss"]
            if math.isfinite(loss) and (self.best_loss is None or not self.best_loss <= loss):
                self.best_loss, self.stale_evaluations = loss, 0
                self.save("best")
            else:
                self.stale_evaluations += 1
        self.stopwatch.start()

    def _report(self, bar: Any) -> None:
        """Read losses and norms since the last report, log the mean loss, and stop at the first non-finite value."""
        if not self._pending:
            return
        outcomes = torch.stack([taken.outcome for taken in self._pending]).tolist()
        speed = self.stopwatch.pause()
        for taken, outcome in zip(self._pending, outcomes, strict=True):
            for what, value in zip(("loss", "gradient norm"), outcome, strict=True):
                if not math.isfinite(value):
                    self._diverged(what, value, taken.number, taken.learning_rate, taken.indices)
        (total,) = self.processes.sum([sum(loss for loss, _ in outcomes) / len(outcomes)])
        self._train_loss = total / self.processes.count
        rate, self._pending = self._pending[-1].learning_rate, []
        values = {"loss": self._train_loss, "learning_rate": rate, "tokens_per_second": speed}
        self._read_clock()
        values["seconds"] = round(self.seconds, 3)
        values["padding_fraction"] = self.padding.since_last_read()
        self._write_log("train", **values, epoch=self.sampler.epoch)
        shown = {"loss": f"{self._train_loss:.4f}", "tokens/s": f"{speed:,.0f}"}
        if self.config.time_limit:
            left = max(0.0, self.config.time_limit - self.seconds)
            shown = {"left": require("tqdm").tqdm.format_interval(left), **shown}
        if self.validation:
            shown["validation"] = f"{self.validation['loss']:.4f}"
        bar.set_postfix(shown)
        self.stopwatch.start()

    def _write_log(self, event: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(event, self.step_number, **values)

    def _progress_bar(self) -> Any:
        hidden = not (self.config.progress and self.processes.first)
        bar = require("tqdm").tqdm
        total = None if self.config.time_limit else self.total_steps  # such a run ends by time, not by steps
        return bar(total=total, initial=self.step_number, desc="training", unit="step", disable=hidden or None)

    def _result(self, ended_by: str) -> Result:
        speed = self.stopwatch.tokens_per_second
        peak = peak_flops(self.device, self.config.dtype)
        model: Any = self.model
        flops = model.flops_per_token(self._padded_length) if peak and self._padded_length else 0.0
        return Result(
            step=self.step_number,
            train_loss=self._train_loss,
            validation=self.validation,
            best_loss=self.best_loss,
            tokens_per_second=speed,
            padding_fraction=self.padding.fraction,
            compile_seconds=self.stopwatch.compile_seconds,
            peak_memory_bytes=peak_memory(self.device),
            model_flop_utilisation=flops * speed / peak / self.processes.count if peak else None,
            ended_by=ended_by,
        )

    def save(self, name: str) -> None:
        """Write the complete state to the folder `name` of the run. Only rank 0 writes; all ranks must call it.

        Raises:
            TrainingDiverged: a weight is not finite; earlier checkpoints are kept.
        """
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise TrainingDiverged(f"weights are not finite after step {self.step_number}; try a lower --lr")
        generators = self.processes.gather(random_state(self.device))
        self._read_clock()
        if self.processes.first:
            trainer = {
                "step": self.step_number,
                "seconds": self.seconds,
                "sampler": self.sampler.state(),
                "random": generators,
                "scaler": self.scaler.state_dict(),
                "best_loss": self.best_loss,
                "stale_evaluations": self.stale_evaluations,
                "evaluated_at": self.evaluated_at,
                "validation": self.validation,
                "data": self.recipe.fingerprint,
            }
            tensors = optimizer_tensors(self.optimizer)
            checkpoint = Checkpoint(self.model.state_dict(), tensors, self.config, description(self.recipe), trainer)
            save_checkpoint(self.folder / name, checkpoint)
        self.processes.wait()

    def restore(self, folder: str | Path) -> None:
        """Resume exactly from the checkpoint in `folder`.

        Raises:
            CheckpointError: it is corrupt, or has another model, vocabulary, data or number of processes.
        """
        checkpoint = load_checkpoint(folder)
        state, self._start = checkpoint.trainer, Path(folder)
        if checkpoint.tokenizer != description(self.recipe):
            raise CheckpointError(f"{folder}: written with another vocabulary; {_difference(checkpoint, self.recipe)}")
        load_weights(self.model, checkpoint.weights, folder)
        try:
            self._restore_state(folder, checkpoint.optimizer, state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = error if isinstance(error, ValueError) else repr(error)
            raise CheckpointError(f"{folder}: the trainer state cannot be restored: {reason}") from error

    def _restore_state(self, folder: str | Path, optimizer: dict[str, Tensor], state: Mapping[str, Any]) -> None:
        if state["data"] != self.recipe.fingerprint:
            raise CheckpointError(
                f"{folder}: written with other data; expected {self.recipe.fingerprint}, found {state['data']}"
            )
        restore_optimizer(self.optimizer, optimizer)
        self.scaler.load_state_dict(state["scaler"])
        generators = state["random"]
        self._restore_sampler(folder, {"items": self._items_of(len(generators)), **state["sampler"]})
        self.step_number, self.evaluated_at = checked_number(state, "step"), checked_number(state, "evaluated_at")
        self.seconds = checked_number({"seconds": 0.0, **state}, "seconds", float)
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds must be finite and not negative; got {self.seconds}")
        self.best_loss = None if state["best_loss"] is None else checked_number(state, "best_loss", float)
        self.stale_evaluations = checked_number(state, "stale_evaluations")
        measured = state["validation"] and ("loss", "accuracy")
        self.validation = {name: checked_number(state["validation"], name, float) for name in measured}
        if self.processes.rank < len(generators):
            restore_random_state(generators[self.processes.rank], self.device)
        else:  # a process more than before
            seed_everything(self.config.seed + 1 + self.processes.rank + 1_000_003 * self.step_number)

    def _items_of(self, processes: int) -> int:
        """The items per step of a run of so many processes, which older checkpoints do not contain."""
        return min(self.config.batch_size, self.sampler.length // processes) * processes

    def _restore_sampler(self, folder: str | Path, state: dict[str, int]) -> None:
        try:
            self.sampler.restore(state)
        except ValueError as error:
            raise CheckpointError(
                f"{folder}: cannot be resumed by {self.processes.count} processes: {error}"
            ) from error


def _reproducible_mode(config: Any, device: torch.device, processes: Processes) -> AbstractContextManager[Any]:
    """The mode of a run with --reproducible, after which the kernels of this process are; of others an empty context.

    Raises:
        ValueError: the run's results depend on more than its options.
    """
    config.reproducible = config.reproducible or cpu.wants_reproducible()
    if not config.reproducible:
        return nullcontext()
    if config.dtype == "auto":
        config.dtype = "float32"
    refused = {
        "--time-limit, as the schedule follows the speed: pass --steps or --epochs": config.time_limit,
        "--compile": config.compile,
        "several processes": processes.count > 1,
        f"--backend {config.backend}: pass cpu": config.backend not in ("auto", "cpu"),
        f"--device {device.type}: pass cpu": device.type != "cpu",
        f"--dtype {config.dtype}: pass float32 or bfloat16": config.dtype not in ("float32", "bfloat16"),
    }
    for reason, is_given in refused.items():
        if is_given:
            raise ValueError(f"--reproducible excludes {reason}")
    cpu.reproduce(True)
    return Reproducible()


def description(recipe: Recipe) -> dict[str, Any]:
    """The tokenizer description stored in a checkpoint; empty if the recipe has no tokenizer."""
    return recipe.tokenizer.describe() if recipe.tokenizer is not None else {}


def _difference(checkpoint: Checkpoint, recipe: Recipe) -> str:
    theirs, ours = checkpoint.tokenizer, description(recipe)
    if theirs.get("kind") != ours.get("kind") or not isinstance(theirs.get("characters"), str):
        return f"expected {ours!s:.200}, found {theirs!s:.200}"
    missing = set(theirs["characters"]) - set(ours["characters"])
    extra = set(ours["characters"]) - set(theirs["characters"])
    return (
        f"{len(ours['characters'])} characters here, {len(theirs['characters'])} in the checkpoint; "
        f"only there: {sorted(missing)}, only here: {sorted(extra)}"
    )
