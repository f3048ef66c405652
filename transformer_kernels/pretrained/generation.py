"""Autoregressive text generation."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_kernels._bind import BoundOperations
from transformer_kernels.graphs import WARM_UP_CALLS, Graphs, Work, dispatched_to_cpu, graphs_on


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: sample from the `top_k` most likely tokens; 0 means all.
        top_p: sample from the smallest set of tokens with this cumulative probability.
        repetition_penalty: values above 1 reduce the probability of tokens that already occur in the text.
        seed: of the random generator.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative; got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 means all tokens); got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits; got {self.seed}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be positive and finite; got {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0 in float32, denormals included."""
        return self.temperature < torch.finfo(torch.float32).tiny


class Choice(NamedTuple):
    """A sampled token, and the model's probabilities (V,), before temperature, top-k and top-p."""

    token: int
    probabilities: Tensor


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The sampling distribution (V,) for logits (V,)."""
    if sampling.greedy:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    logits = (logits - logits.max()) / sampling.temperature  # at most 0, so that a small temperature cannot give inf
    if 0 < sampling.top_k < len(logits):
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # 0 for the most likely token, which is always kept
        probabilities = probabilities.index_fill(0, order[before >= sampling.top_p], 0.0)
    return probabilities / probabilities.sum()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token from logits (V,), on the CPU."""
    if sampling.greedy:
        return int(logits.argmax())
    return int(torch.multinomial(sampling_distribution(logits, sampling), 1, generator=generator))


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (V,) with the tokens `seen` penalised: divided by `penalty` if positive, multiplied by it if negative.

    Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019, section 4.1.
    """
    chosen = logits[seen]
    return logits.scatter(0, seen, torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def generate(
    model: nn.Module, prompt: Sequence[int], count: int, sampling: Sampling, *, context: int, device: torch.device
) -> Iterator[Choice]:
    """Generate `count` tokens after a non-empty `prompt`; the model reads the last `context` tokens."""
    for choices in generate_many(model, [prompt], count, sampling, context=context, device=device):
        yield choices[0]


@torch.no_grad()
def generate_many(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    *,
    context: int,
    device: torch.device,
    ends: Collection[int] = (),
    graphs: Graphs | None = None,
) -> Iterator[list[Choice]]:
    """Generate `count` tokens after each of several prompts, step by step, as one batch.

    Shorter prompts are padded on the left. Each prompt gets the same tokens as when generated alone, with the seed
    `sampling.seed + n` for prompt n. Generation ends early once every sequence has produced one of the tokens `ends`;
    tokens of a sequence after its end token are to be ignored. With a KV cache, a step is replayed from a CUDA graph
    on a GPU and from a recorded call list on the `cpu` backend; `graphs` overrides this choice.
    """
    if not prompts or not all(prompts):
        raise ValueError("the prompt must have at least one token")
    if count < 0:
        raise ValueError(f"the number of tokens to write must not be negative; got {count}")
    model.eval()
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(padded, device="cpu")  # (B, longest)
    real = torch.arange(longest, device="cpu") >= tokens.new_tensor([[longest - len(prompt)] for prompt in prompts])
    if graphs is None:
        graphs = _graphs_for(model, device)
    reader = _Reader(model, context, device, longest + count, graphs)
    ended = [False] * len(prompts)
    for _ in range(count):
        logits = reader.logits(tokens, real).float().cpu()  # (B, V)
        choices = []
        for row, generator in zip(range(len(prompts)), generators, strict=True):
            scores = logits[row]
            if sampling.repetition_penalty != 1.0:
                scores = penalised(scores, tokens[row][real[row]], sampling.repetition_penalty)
            choices.append(Choice(draw(scores, sampling, generator), logits[row].softmax(-1)))
        tokens = torch.cat((tokens, tokens.new_tensor([[choice.token] for choice in choices])), 1)
        real = torch.cat((real, real.new_ones(len(prompts), 1)), 1)
        yield choices
        ended = [before or choice.token in ends for before, choice in zip(ended, choices, strict=True)]
        if all(ended):
            return


def _graphs_for(model: Any, device: torch.device) -> Graphs | None:
    """The object that captures the steps of a model, or None."""
    ops = getattr(model, "ops", None)
    recorded = device.type == "cpu" and isinstance(ops, BoundOperations) and dispatched_to_cpu(ops.backend, device)
    return graphs_on(device) if device.type == "cuda" or recorded else None


class _Reader:
    """The logits after a growing sequence: from the KV cache while it has room, else by recomputation.

    A model with absolute positions recomputes the last `context` tokens for every token beyond `context`. A model with
    a window in every layer and rotary positions continues with its cache.
    """

    def __init__(self, model: Any, context: int, device: torch.device, total: int, graphs: Graphs | None) -> None:
        self.model, self.context, self.device, self.total, self.graphs = model, context, device, total, graphs
        self.cache: Any = None
        self.step: _GraphedStep | None = None

    def logits(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, L); padding on the left is False in `real`."""
        batch, length = tokens.shape
        if self.cache is None and hasattr(self.model, "new_cache"):
            self.cache = self.model.new_cache(batch, min(self.context, self.total), steady=self.graphs is not None)
            self.step = None if self.graphs is None else _GraphedStep(self.model, self.cache, self.graphs)
        if self.cache is None or (length > self.cache.length and not self.cache.endless):
            tokens, real = tokens[:, -self.context :], real[:, -self.context :]
            options = {}
        else:
            tokens, real = tokens[:, self.cache.tokens :], real[:, self.cache.tokens :]
            if self.step is not None and self.cache.tokens and tokens.shape[1] == 1:
                return self.step(tokens)
            options = {"cache": self.cache, "last_only": True}
        mask = () if real.all() else (real.to(self.device),)
        return self.model(tokens.to(self.device), *mask, **options)[:, -1]


class _GraphedStep:
    """A decoding step of one token per sequence: a few eager steps as warm-up, then captured and replayed."""

    def __init__(self, model: Any, cache: Any, graphs: Graphs) -> None:
        self.model, self.cache, self.graphs = model, cache, graphs
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.device)
        self.replay: Work | None = None
        self.eager_steps_left: float = WARM_UP_CALLS

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, V) after tokens (B, 1)."""
        self.tokens.copy_(tokens)
        if self.replay is None and self.eager_steps_left == 0:
            self._capture()
        if self.replay is None:
            self.eager_steps_left -= 1
            return self.graphs.run(self._work)
        self.cache.tokens += 1  # the graph updates only the counter on the device
        return self.replay()

    def _work(self) -> Tensor:
        return self.model(self.tokens, cache=self.cache, last_only=True)[:, -1]

    def _work_from_there(self) -> Tensor:
        self.cache.tokens = self.before  # a capture may run it twice
        return self._work()

    def _capture(self) -> None:
        """Capture the step. The computation during capture is discarded; the first replay counts it."""
        before = self.before = self.cache.tokens
        try:
            self.replay = self.graphs.capture(self._work_from_there)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.eager_steps_left = float("inf")
            reason = str(error).partition("\n")[0]
            warnings.warn(f"generate: steps are not captured, kernels are launched one by one: {reason}", stacklevel=2)
            self.cache.position.fill_(before)
        finally:
            self.cache.tokens = before
