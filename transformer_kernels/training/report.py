"""What the commands print: the end of a run, likely next tokens, and a demonstration with the speed of each backend."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from typing import Any

import torch

import transformer_kernels
from transformer_kernels._dispatch import unavailable
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.training.files import numbered_folder
from transformer_kernels.training.generation import Choice
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.training.trainer import Result, Trainer

TIMED_SECONDS = 4.0
UNTIMED_STEPS = WARM_UP_CALLS + 2  # compiling and capturing are done by then
MODEL: dict[str, int] = {}


def describe_result(trainer: Trainer, result: Result) -> str:
    """The end of a run in a few lines."""
    lines = [
        f"ended by {result.ended_by} after step {result.step} of {trainer.total_steps}",
        f"training loss    {result.train_loss:.4f}",
    ]
    if result.validation:
        loss, accuracy = result.validation["loss"], result.validation["accuracy"]
        lines.append(f"validation       loss {loss:.4f}, accuracy {accuracy:.2%}, best loss {result.best_loss:.4f}")
    lines.append(
        f"speed            {result.tokens_per_second:,.0f} tokens/s, {result.compile_seconds:.1f} s to start up"
    )
    if result.model_flop_utilisation is not None:
        lines.append(f"utilisation      {result.model_flop_utilisation:.1%} of the device's peak FLOP/s")
    if result.padding_fraction:
        lines.append(f"padding          {result.padding_fraction:.1%} of what the model worked on")
    lines.append(f"peak memory      {result.peak_memory_bytes / 2**20:,.0f} MiB")
    return "\n".join([*lines, f"checkpoints in   {trainer.folder}"])


def most_likely(choice: Choice, tokenizer: Any, count: int) -> str:
    """The chosen token, then the `count` most likely ones with their probabilities."""
    top = choice.probabilities.topk(min(count, len(choice.probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    listed = "  ".join(f"{tokenizer.decode([index])!r} {probability:.4f}" for index, probability in pairs)
    return f"{tokenizer.decode([choice.token])!r:>6} | {listed}"


def demo(*, seconds: float = 120.0, backend: str = "auto", out: str = "") -> None:
    """Train the character GPT on the standard library's source and print what came of it."""
    out = out or str(numbered_folder("runs/demo"))
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
    """Tokens per second of a training step with each backend, against the reference; or why it is not available."""
    reasons = {backend: unavailable(backend, device) for backend in transformer_kernels.BACKENDS}
    working = ["reference", *(backend for backend, reason in reasons.items() if reason is None)]
    speeds = training_speeds(recipe, working, device)
    lines = [f"{'backend':<10} {'tokens/s':>10}   against reference"]
    for backend, speed in speeds.items():
        lines.append(f"{backend:<10} {speed:>10,.0f}   {speed / speeds['reference']:.2f}x")
    lines += [f"{backend:<10} {'-':>10}   {reason}" for backend, reason in reasons.items() if reason is not None]
    return "\n".join(lines)


def training_speeds(recipe: CharGPT, backends: list[str], device: torch.device) -> dict[str, float]:
    """Tokens per second in the median of whole training steps; backends alternate, for equal load."""
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
