"""Two minutes of training, a sample of what was learned, and the speed of each backend that works here."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time

import torch

import transformer_kernels
from transformer_kernels._errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.training.char_gpt import CharGPT
from transformer_kernels.training.config import CharGPTConfig
from transformer_kernels.training.generation import Sampling, generate
from transformer_kernels.training.report import describe_result
from transformer_kernels.training.trainer import Trainer

PROMPT = "def "
SAMPLE_LENGTH = 400
TIMED_SECONDS = 4.0
UNTIMED_STEPS = 2
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
    print(f"\n{describe_result(trainer, result)}\n\nIt writes:\n\n{_sample(trainer, recipe)}\n")
    print(speed_table(recipe, trainer.device))


def _sample(trainer: Trainer, recipe: CharGPT) -> str:
    prompt = recipe.tokenizer.encode(PROMPT)
    choices = generate(
        trainer.model,
        prompt,
        SAMPLE_LENGTH,
        Sampling(temperature=0.7),
        context=recipe.config.context,
        device=trainer.device,
    )
    return PROMPT + recipe.tokenizer.decode([choice.token for choice in choices])


def speed_table(recipe: CharGPT, device: torch.device) -> str:
    """Tokens per second of a training step with each backend, against the reference; or why it does not run here."""
    reference = training_speed(recipe, "reference", device)
    lines = [f"{'backend':<10} {'tokens/s':>10}   against reference", f"{'reference':<10} {reference:>10,.0f}   1.00x"]
    for backend in transformer_kernels.BACKENDS:
        try:
            speed = training_speed(recipe, backend, device)
        except (BackendUnavailable, UnsupportedByBackend) as error:
            lines.append(f"{backend:<10} {'-':>10}   {error}")
        else:
            lines.append(f"{backend:<10} {speed:>10,.0f}   {speed / reference:.2f}x")
    return "\n".join(lines)


def training_speed(recipe: CharGPT, backend: str, device: torch.device) -> float:
    """Tokens per second in the median of the whole training steps of a few seconds, three at least."""
    same_data = copy.copy(recipe)
    same_data.config = dataclasses.replace(recipe.config, backend=backend, device=str(device))
    trainer = Trainer(same_data)
    durations: list[float] = []
    for _ in range(UNTIMED_STEPS):
        trainer.step()
    while len(durations) < 3 or sum(durations) < TIMED_SECONDS:
        start = time.perf_counter()
        trainer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return trainer.sampler.batch_size * recipe.config.context / statistics.median(durations)
