"""Two minutes of training, a sample of what was learned, and the speed of each backend that works here."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch

import transformer_kernels
from transformer_kernels._dispatch import unavailable
from transformer_kernels.training.char_gpt import CharGPT
from transformer_kernels.training.config import CharGPTConfig
from transformer_kernels.training.graphs import WARM_UP_STEPS
from transformer_kernels.training.report import describe_result
from transformer_kernels.training.trainer import Trainer

TIMED_SECONDS = 4.0
UNTIMED_STEPS = WARM_UP_STEPS + 2  # compiling and capturing are over then
MODEL: dict[str, int] = {}


def demo(*, seconds: float = 120.0, backend: str = "auto", out: str = "runs/demo") -> None:
    """Train the character GPT on the standard library's source and print what came of it."""
    config = CharGPTConfig(
        backend=backend, out=out, time_limit=seconds, steps=100_000, schedule="constant", eval_every=100, model=MODEL
    )
    print(f"Training a small GPT on the source text of Python's standard library for {seconds:g} seconds.\n")
    recipe = CharGPT(config)
    trainer = Trainer(recipe)
    result = trainer.fit()
    print(f"\n{describe_result(trainer, result)}\n\n{recipe.report(trainer.model, trainer.device)}\n")
    print(speed_table(recipe, trainer.device))


def speed_table(recipe: CharGPT, device: torch.device) -> str:
    """Tokens per second of a training step with each backend, against the reference; or why it does not run here."""
    reasons = {backend: unavailable(backend, device) for backend in transformer_kernels.BACKENDS}
    working = ["reference", *(backend for backend, reason in reasons.items() if reason is None)]
    speeds = training_speeds(recipe, working, device)
    lines = [f"{'backend':<10} {'tokens/s':>10}   against reference"]
    for backend, speed in speeds.items():
        lines.append(f"{backend:<10} {speed:>10,.0f}   {speed / speeds['reference']:.2f}x")
    lines += [f"{backend:<10} {'-':>10}   {reason}" for backend, reason in reasons.items() if reason is not None]
    return "\n".join(lines)


def training_speeds(recipe: CharGPT, backends: list[str], device: torch.device) -> dict[str, float]:
    """Tokens per second in the median of whole training steps; backends take turns, to meet the same load."""
    trainers = {backend: Trainer(_with_backend(recipe, backend, device)) for backend in backends}
    for trainer in trainers.values():
        for _ in range(UNTIMED_STEPS):
            _timed_step(trainer)
    durations: dict[str, list[float]] = {backend: [] for backend in backends}
    start = time.perf_counter()
    while len(durations[backends[0]]) < 3 or time.perf_counter() - start < TIMED_SECONDS * len(backends):
        for backend, trainer in trainers.items():
            durations[backend].append(_timed_step(trainer))
    tokens = trainers[backends[0]].sampler.batch_size * recipe.config.context
    return {backend: tokens / statistics.median(times) for backend, times in durations.items()}


def _with_backend(recipe: CharGPT, backend: str, device: torch.device) -> CharGPT:
    """The same recipe, sharing its data."""
    twin = copy.copy(recipe)
    twin.config = dataclasses.replace(recipe.config, backend=backend, device=str(device))
    return twin


def _timed_step(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - start
