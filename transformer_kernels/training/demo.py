"""The demo: a kernel backend and the reference train one model for the same time, then every backend is timed."""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from transformer_kernels.backends.dispatch import BACKENDS, unavailable
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.pretrained.generation import Sampling
from transformer_kernels.training.data.files import numbered_folder
from transformer_kernels.training.loop.trainer import Trainer
from transformer_kernels.training.recipe import Trained
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig

REFERENCE, GPU_BACKENDS = "reference", ("triton", "cuda")
ROWS = 7  # of the table of losses
BAR = 40
TIMED_SECONDS = 3.0
UNTIMED_STEPS = WARM_UP_CALLS + 2  # compilation and graph capture are finished by then
PROMPT, SAMPLE_LENGTH = "def ", 300
MODEL: dict[str, int] = {}


def demo(*, seconds: float = 35.0, backend: str = "auto", out: str = "") -> None:
    """Train a character GPT and its reference on the standard library's source and print a comparison.

    Args:
        seconds: training time of each of the two.
        backend: the backend that is compared with the reference.
        out: folder of the checkpoint; a new runs/demo if empty.
    """
    out = out or str(numbered_folder("runs/demo"))
    recipe = CharGPT(CharGPTConfig(backend=backend, out=out, schedule="constant", model=MODEL))
    device = Trainer(recipe).device
    name = f"auto ({_chosen(device)})" if backend == "auto" else backend
    runs = [Run(REFERENCE, Trainer(_with_backend(recipe, REFERENCE, device))), Run(name, Trainer(recipe))]
    parameters = sum(parameter.numel() for parameter in runs[0].trainer.model.parameters())
    print(
        f"Two GPTs of {parameters:,} parameters learn the source code of Python's standard library, for {seconds:g} s\n"
        f"each: one with the reference implementation, one with backend={backend!r}. They have the same\n"
        "initial weights and read the same batches. Their steps alternate, so that both see the same load.\n"
    )
    train(runs, seconds)
    validation = {run.name: run.trainer.evaluate()["loss"] for run in runs}
    runs[1].trainer.save("last")
    print("\nTiming a training step with each backend ...", flush=True)
    reasons = {backend: unavailable(backend, device) for backend in BACKENDS}
    available = [backend for backend, reason in reasons.items() if reason is None]
    working = training_speeds(recipe, [REFERENCE, *available], device)
    print(f"\nValidation loss after {seconds:g} s of training")
    for run in runs:
        loss = validation[run.name]
        print(f"  {run.name:<11} {loss:>8.4f}   {_bar(loss, max(validation.values()))} {run.steps:,} steps")
    print("\nTraining speed, tokens/s")
    for each, speed in working.items():
        print(f"  {each:<11} {speed:>8,.0f}   {_bar(speed, max(working.values()))} {speed / working[REFERENCE]:.2f}x")
    for each, reason in reasons.items():
        if reason is not None:
            print(f"  {each:<11} {'-':>8}   {'needs a GPU' if each in GPU_BACKENDS else reason}")
    print(f"\nThe model of {runs[1].name} continues {PROMPT!r}:\n\n{_sample(recipe, runs[1].trainer)}\n")
    print(_next_commands(f"{out}/last"))


@dataclass
class Run:
    """A model in training, the seconds that it used, and the losses since the last row of the table."""

    name: str
    trainer: Trainer
    seconds: float = 0.0
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        start = time.perf_counter()
        self.losses.append(self.trainer.step().item())  # a value read on the host: the step has ended
        self.seconds += time.perf_counter() - start
        self.steps += 1

    def recent(self) -> str:
        """A cell of the table: the mean loss since the last one, and the steps so far."""
        loss, self.losses = statistics.fmean(self.losses), self.losses[-1:]
        return f"loss {loss:.3f}, {self.steps:>5,} steps"


def train(runs: list[Run], seconds: float) -> None:
    """Trains each for `seconds`: the one that used less takes the next step. Prints a row after each part."""
    print("  time   " + "   ".join(f"{run.name:<24}" for run in runs).rstrip())
    for run in runs:
        run.trainer.model.train()
    for row in range(1, ROWS + 1):
        while (run := min(runs, key=lambda run: run.seconds)).seconds < seconds * row / ROWS:
            run.step()
        print(
            f"{seconds * row / ROWS:>5.1f}s   " + "   ".join(f"{run.recent():<24}" for run in runs).rstrip(), flush=True
        )


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


def _bar(value: float, largest: float) -> str:
    return "#" * max(1, round(BAR * value / largest)) if value == value else ""


def _sample(recipe: CharGPT, trainer: Trainer) -> str:
    trained = Trained(trainer.model, recipe.tokenizer, recipe.config, trainer.device, trainer.step_number, CharGPT)
    steps = CharGPT.generate(trained, [PROMPT], SAMPLE_LENGTH, Sampling(temperature=0.5))
    text = PROMPT + recipe.tokenizer.decode([choices[0].token for choices in steps])
    return "\n".join(f"  | {line[:100]}" for line in text.split("\n")[:8])


def _next_commands(checkpoint: str) -> str:
    """What to run next, by the path of the program in this environment."""
    script = Path(sys.executable).with_name("transformer-kernels")
    program = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else script.name
    return (
        "Next:\n"
        f"  {program} generate --checkpoint {checkpoint} --prompt 'class '\n"
        f"  {program} train char-gpt  # Tiny Shakespeare, or this text, for five minutes\n"
        f"  {program} run script.py  # any PyTorch program on these kernels, unchanged"
    )
