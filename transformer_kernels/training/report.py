"""Console output: the summary of a run, likely next tokens, and a demo with the speed of each backend."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from typing import Any

import torch

from transformer_kernels.backends.dispatch import BACKENDS, unavailable
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.training.files import numbered_folder
from transformer_kernels.training.generation import Choice
from transformer_kernels.training.recipes.char_gpt import CharGPT, CharGPTConfig
from transformer_kernels.training.trainer import Result, Trainer

TIMED_SECONDS = 4.0
UNTIMED_STEPS = WARM_UP_CALLS + 2  # compilation and graph capture are finished by then
MODEL: dict[str, int] = {}


def describe_result(trainer: Trainer, result: Result) -> str:
    """The summary of a run in a few lines."""
    trained = not math.isnan(result.train_loss)
    lines = [f"ended by {result.ended_by} after {_progress(trainer, result)}"]
    if trained:
        lines.append(f"training loss    {result.train_loss:.4f}")
    else:
        lines = [_nothing_left(trainer, result)]
    if result.validation:
        loss, accuracy = result.validation["loss"], result.validation["accuracy"]
        lines.append(f"validation       loss {loss:.4f}, accuracy {accuracy:.2%}, best loss {result.best_loss:.4f}")
    if trained:
        speed = f"{result.tokens_per_second:,.0f} tokens/s, {result.compile_seconds:.1f} s startup"
        lines.append(f"speed            {speed}")
    if result.model_flop_utilisation is not None:
        lines.append(f"utilisation      {result.model_flop_utilisation:.1%} of the device's peak FLOP/s")
    if result.padding_fraction:
        lines.append(f"padding          {result.padding_fraction:.1%} of the computed positions")
    lines.append(f"peak memory      {result.peak_memory_bytes / 2**20:,.0f} MiB")
    return "\n".join([*lines, f"checkpoints in   {trainer.folder}"])


def _nothing_left(trainer: Trainer, result: Result) -> str:
    """What resuming a finished run reports."""
    options = {"steps": f"--steps N above {result.step}", "patience": "a larger --patience, or --patience 0"}
    return (
        f"{trainer.folder}: the run has ended ({result.ended_by}) after {_progress(trainer, result)}, "
        f"so nothing was trained; to continue it, pass --resume {trainer.folder} with "
        f"{options.get(result.ended_by, 'a larger --time-limit')}"
    )


def _progress(trainer: Trainer, result: Result) -> str:
    return f"step {result.step}" + ("" if math.isinf(trainer.total_steps) else f" of {trainer.total_steps}")


def most_likely(choice: Choice, tokenizer: Any, count: int) -> str:
    """The sampled token, followed by the `count` most likely tokens with their probabilities."""
    top = choice.probabilities.topk(min(count, len(choice.probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    listed = "  ".join(f"{tokenizer.decode([index])!r} {probability:.4f}" for index, probability in pairs)
    return f"{tokenizer.decode([choice.token])!r:>6} | {listed}"


def demo(*, seconds: float = 120.0, backend: str = "auto", out: str = "") -> None:
    """Train a character GPT on the standard library's source and print a summary."""
    out = out or str(numbered_folder("runs/demo"))
    config = CharGPTConfig(
        backend=backend, out=out, time_limit=seconds, schedule="constant", eval_every=100, model=MODEL
    )
    print(f"Training a small GPT on the source code of Python's standard library for {seconds:g} seconds.\n")
    recipe = CharGPT(config)
    trainer = Trainer(recipe)
    result = trainer.fit()
    print(f"\n{describe_result(trainer, result)}\n\n{recipe.report(trainer.model, trainer.device)}\n")
    print(speed_table(recipe, trainer.device))


def speed_table(recipe: CharGPT, device: torch.device) -> str:
    """Tokens per second of a training step with each backend, relative to the reference, or why it is unavailable."""
    reasons = {backend: unavailable(backend, device) for backend in BACKENDS}
    working = ["reference", *(backend for backend, reason in reasons.items() if reason is None)]
    speeds = training_speeds(recipe, working, device)
    lines = [f"{'backend':<10} {'tokens/s':>10}   speedup over reference"]
    for backend, speed in speeds.items():
        lines.append(f"{backend:<10} {speed:>10,.0f}   {speed / speeds['reference']:.2f}x")
    lines += [f"{backend:<10} {'-':>10}   {reason}" for backend, reason in reasons.items() if reason is not None]
    return "\n".join(lines)


def training_speeds(recipe: CharGPT, backends: list[str], device: torch.device) -> dict[str, float]:
    """Tokens per second of the median training step; backends alternate, so that they see the same machine load."""
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
    """A copy of the recipe for another backend; it shares the data."""
    twin = copy.copy(recipe)
    twin.config = dataclasses.replace(recipe.config, backend=backend, device=str(device))
    return twin


def _timed_step(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - start
