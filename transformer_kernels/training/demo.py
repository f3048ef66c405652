"""The demo: a kernel backend and the reference train one model for the same time, then every backend is timed."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transformer_kernels.backends.dispatch import BACKENDS, unavailable
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.pretrained.generation import Sampling
from transformer_kernels.training import blocks
from transformer_kernels.training.config import bundled_configs, read_config_file
from transformer_kernels.training.data.files import numbered_folder
from transformer_kernels.training.loop.trainer import Trainer
from transformer_kernels.training.recipe import Trained
from transformer_kernels.training.recipes import make_config
from transformer_kernels.training.recipes.char_gpt import CharGPT

REFERENCE, GPU_BACKENDS = "reference", ("triton", "cuda")
RECIPE = "five_minutes"
TIMED_SECONDS = 3.0
UNTIMED_STEPS = WARM_UP_CALLS + 2  # compilation and graph capture are finished by then
PROMPT, SAMPLE_LENGTH, SAMPLE_ROWS = "ROMEO:", 300, 9
SHORT = {"warmup_steps": 30}  # of the few hundred steps that fit into the time
MODEL: dict[str, Any] = {"dropout": 0.0}  # the text is read about once


def demo(*, seconds: float = 35.0, backend: str = "auto", out: str = "") -> None:
    """Train a character GPT and its reference on Tiny Shakespeare and print a comparison.

    Args:
        seconds: training time of each of the two, over which the learning rate decays.
        backend: the backend that is compared with the reference.
        out: folder of the checkpoint; a new runs/demo if empty.

    Raises:
        ValueError: seconds are not positive and finite.
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"demo: --seconds must be positive, such as 35; got {seconds:g}")
    out = out or str(numbered_folder("runs/demo"))
    recipe = _recipe(seconds, backend, out)
    ours = Trainer(recipe)
    device = ours.device
    name = f"auto ({_chosen(device)})" if backend == "auto" else backend
    runs = [Run(REFERENCE, Trainer(_with_backend(recipe, REFERENCE, device))), Run(name, ours)]
    parameters = sum(parameter.numel() for parameter in ours.model.parameters())
    print(
        f"Two GPTs of {parameters:,} parameters learn to write like Shakespeare, {seconds:g} s each, in "
        f"{recipe.config.dtype}:\none on the plain PyTorch reference, one on backend={backend!r}. They have the same "
        "weights and read the\nsame batches; their steps alternate, so that both see the same load.",
        flush=True,
    )
    train(runs, seconds)
    losses = {run.name: run.trainer.evaluate()["loss"] for run in runs}
    ours.save("last")
    samples = [_sample(recipe, run.trainer) for run in runs]
    reasons = {named: unavailable(named, device) for named in BACKENDS}
    available = [named for named, reason in reasons.items() if reason is None]
    speeds = training_speeds(recipe, [REFERENCE, *available], device)
    print("\n".join([*_curves(runs, seconds, losses), *_speeds(speeds, reasons), *_samples(runs, samples)]))
    print(_next_commands(f"{out}/last"))


@dataclass
class Run:
    """A model in training, the seconds that it used, and its loss after each step by these seconds."""

    name: str
    trainer: Trainer
    seconds: float = 0.0
    steps: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)

    def step(self) -> None:
        self.trainer.seconds = self.seconds  # by which the learning rate decays
        start = time.perf_counter()
        loss = self.trainer.step().item()  # a value read on the host: the step has ended
        self.seconds += time.perf_counter() - start
        self.losses.append((self.seconds, loss))
        self.steps += 1


def train(runs: list[Run], seconds: float) -> None:
    """Trains each for `seconds`: the one that used less takes the next step. A terminal shows the progress."""
    for run in runs:
        run.trainer.model.train()
    shown = 0.0
    while (run := min(runs, key=lambda run: run.seconds)).seconds < seconds:
        run.step()
        if sys.stderr.isatty() and run.seconds >= shown:
            shown = run.seconds + 0.5
            parts = [
                f"{trained.name}: {trained.steps} steps, loss {trained.losses[-1][1]:.2f}"
                for trained in runs
                if trained.losses
            ]
            line = f"{run.seconds:5.1f} s of {seconds:g}   " + "   ".join(parts)
            print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)


def training_speeds(recipe: CharGPT, backends: list[str], device: torch.device) -> dict[str, float]:
    """Tokens per second of the median training step; backends alternate, so that they see the same machine load."""
    runs = [Run(backend, Trainer(_with_backend(recipe, backend, device))) for backend in backends]
    for run in runs:
        for _ in range(UNTIMED_STEPS):
            run.step()
    durations: dict[str, list[float]] = {backend: [] for backend in backends}
    start = time.perf_counter()
    while len(durations[backends[0]]) < 3 or time.perf_counter() - start < TIMED_SECONDS * len(backends):
        for run in runs:
            before = run.seconds
            run.step()
            durations[run.name].append(run.seconds - before)
    tokens = runs[0].trainer.sampler.batch_size * recipe.config.context
    return {backend: tokens / statistics.median(times) for backend, times in durations.items()}


def _recipe(seconds: float, backend: str, out: str) -> CharGPT:
    """The recipe of five minutes, annealed over `seconds`."""
    values = read_config_file(bundled_configs()[RECIPE])
    values |= SHORT | {"time_limit": seconds, "backend": backend, "out": out, "model": {**values["model"], **MODEL}}
    return CharGPT(make_config("char-gpt", values, RECIPE))


def _with_backend(recipe: CharGPT, backend: str, device: torch.device) -> CharGPT:
    """A copy of the recipe for another backend; it shares the data."""
    twin = copy.copy(recipe)
    twin.config = dataclasses.replace(recipe.config, backend=backend, device=str(device))
    return twin


def _chosen(device: torch.device) -> str:
    """The backend that "auto" selects for LayerNorm on this device."""
    from transformer_kernels.backends.dispatch import explain

    x = torch.zeros(2, 64, device=device)
    return str(explain("layer_norm", x, x[0], x[0]).chosen)


def _curves(runs: list[Run], seconds: float, losses: dict[str, float]) -> list[str]:
    """The training losses over time as one chart, and the losses on the held-out text."""
    reference, ours = (blocks.means(run.losses, seconds, 2 * blocks.BAR) for run in runs)
    lower, between = (blocks.LOWER, blocks.BETWEEN) if blocks.can_draw() else ("#", ".")
    lines = [f"\nTraining loss over {seconds:g} s: {lower} {runs[1].name}, {between} above it {REFERENCE}"]
    lines += [*blocks.curves(ours, reference), "\nLoss on held-out text"]
    for run in runs:
        lines.append(f"  {run.name:<11} {losses[run.name]:>8.4f}   after {run.steps:,} steps")
    return lines


def _speeds(speeds: dict[str, float], reasons: dict[str, str | None]) -> list[str]:
    lines = ["\nTraining speed, tokens/s"]
    for backend, speed in speeds.items():
        ratio = speed / speeds[REFERENCE]
        lines.append(f"  {backend:<11} {speed:>8,.0f}   {blocks.bar(speed, max(speeds.values()))} {ratio:.2f}x")
    for backend, reason in reasons.items():
        if reason is not None:
            lines.append(f"  {backend:<11} {'-':>8}   {'needs a GPU' if backend in GPU_BACKENDS else reason}")
    return lines


def _sample(recipe: CharGPT, trainer: Trainer) -> str:
    trained = Trained(trainer.model, recipe.tokenizer, recipe.config, trainer.device, trainer.step_number, CharGPT)
    steps = CharGPT.generate(trained, [PROMPT], SAMPLE_LENGTH, Sampling(temperature=0.6))
    return PROMPT + recipe.tokenizer.decode([choices[0].token for choices in steps])


def _samples(runs: list[Run], samples: list[str]) -> list[str]:
    """Both continuations of the same prompt, side by side, within the width of the terminal."""
    width = (max(70, min(100, shutil.get_terminal_size((100, 24)).columns)) - 5) // 2
    titles = [f"{run.name}, {run.steps:,} steps" for run in runs]
    lines = [*blocks.beside(titles[0], titles[1], width, 1), *blocks.beside(samples[0], samples[1], width, SAMPLE_ROWS)]
    return ["\nBoth continue " + repr(PROMPT), *(f"  {line}" for line in lines)]


def _next_commands(checkpoint: str) -> str:
    """The commands to run next, by the path of the program in this environment."""
    script = Path(sys.executable).with_name("transformer-kernels")
    program = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else script.name
    return (
        "\nNext:\n"
        f"  {program} generate --checkpoint {checkpoint} --prompt 'JULIET:'\n"
        f"  {program} train char-gpt  # the same for five minutes\n"
        f"  {program} run script.py  # any PyTorch program on these kernels, unchanged"
    )
