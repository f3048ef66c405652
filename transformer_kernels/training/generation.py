"""Text from a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: `temperature` 0 takes the most likely one, always."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative; got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 means all tokens); got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")


class Choice(NamedTuple):
    """A chosen token, and the probabilities (V,) that the model gave, before temperature, top-k and top-p."""

    token: int
    probabilities: Tensor


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities (V,) that a token is drawn from, given logits (V,)."""
    if sampling.temperature == 0.0:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # the most likely token always stays
        probabilities = probabilities.index_fill(0, order[before >= sampling.top_p], 0.0)
    return probabilities / probabilities.sum()


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Sequence[int], count: int, sampling: Sampling, *, context: int, device: torch.device
) -> Iterator[Choice]:
    """Choose `count` tokens after `prompt`, which must not be empty; the model sees the last `context` tokens."""
    if not prompt:
        raise ValueError("the prompt must have at least one token")
    model.eval()
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(count):
        visible = torch.tensor([tokens[-context:]], device=device)  # (1, at most context)
        logits = model(visible)[0, -1].float().cpu()  # (V,)
        drawn = torch.multinomial(sampling_distribution(logits, sampling), 1, generator=generator)
        tokens.append(int(drawn))
        yield Choice(tokens[-1], logits.softmax(-1))


def text_until(pieces: Iterable[str], stop: str = "") -> Iterator[str]:
    """The pieces as they come, up to `stop` without it; what may be the beginning of `stop` is held back."""
    held = ""
    for piece in pieces:
        held += piece
        if stop and stop in held:
            held = held[: held.index(stop)]
            break
        safe = len(held) - _overlap(held, stop)
        if safe:
            yield held[:safe]
        held = held[safe:]
    if held:
        yield held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
