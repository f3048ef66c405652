"""The character GPT: the next character of a text, from the ones before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.training.config import CharGPTConfig
from transformer_kernels.training.corpus import Windows, read_corpus
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.evaluation import Batch
from transformer_kernels.training.generation import Sampling, generate
from transformer_kernels.training.presets import build_preset
from transformer_kernels.training.sampler import ShuffledSampler
from transformer_kernels.training.tokenizers import CharacterTokenizer

VALIDATION_WINDOWS = 2048
TRAINING_PART = 0.9
SAMPLE_LENGTH = 400


def build_char_gpt(config: CharGPTConfig, vocabulary_size: int) -> nn.Module:
    """A fresh model for that many characters."""
    return build_preset("char_gpt", config, vocab_size=vocabulary_size, context=config.context)


class CharGPT:
    """The recipe: text, characters, windows of them, and the model."""

    def __init__(self, config: CharGPTConfig | None = None, tokenizer: CharacterTokenizer | None = None) -> None:
        self.config = config or CharGPTConfig()
        text = read_corpus(self.config.corpus, self.config.data_dir)
        if not text:
            raise ValueError(
                f"corpus {self.config.corpus!r} has 0 characters; at least {self.config.context + 1} are needed"
            )
        self.tokenizer = tokenizer or CharacterTokenizer(text)
        tokens = torch.tensor(self.tokenizer.encode(text), dtype=torch.int32)
        self.fingerprint = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
        kept = len(tokens) if self.config.split == "none" else int(TRAINING_PART * len(tokens))
        self.training = Windows(
            tokens[:kept], self.config.context, f"the training part of corpus {self.config.corpus!r}"
        )
        self.validation = None
        if self.config.split != "none":
            name = f"the validation part (a tenth) of corpus {self.config.corpus!r}"
            self.validation = Windows(tokens[kept:], self.config.context, name)
        self.train_length = len(self.training)

    def build_model(self) -> nn.Module:
        return build_char_gpt(self.config, self.tokenizer.vocabulary_size)

    @staticmethod
    def loss(model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The model's mean loss over the characters that come next."""
        return model.loss(*inputs, targets)

    def sampler(self, processes: Processes) -> ShuffledSampler:
        """The windows of the training part, shuffled."""
        config = self.config
        return ShuffledSampler(self.train_length, config.batch_size, config.seed, processes.rank, processes.count)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """The windows that start at `indices`: characters (B, L), and each one's successor (B, L)."""
        return self._batch(self.training, indices, device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """Windows that do not overlap, spread evenly over the validation part, this process's share of them."""
        if self.validation is not None:
            starts = self.validation.spread(VALIDATION_WINDOWS)[processes.rank :: processes.count]
            for part in starts.split(self.config.batch_size):
                yield self._batch(self.validation, part, device)

    def evaluation_batches(self, device: torch.device) -> Iterator[Batch]:
        """Windows that do not overlap over all of the validation part, or over the whole text where there is none."""
        windows = self.validation or self.training
        for part in windows.spread(len(windows)).split(self.config.batch_size):
            yield self._batch(windows, part, device)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """A sample of what the model writes."""
        prompt = self.tokenizer.decode([int(self.training.tokens[0])])
        sampling = Sampling(temperature=0.7)
        choices = generate(
            model,
            self.tokenizer.encode(prompt),
            SAMPLE_LENGTH,
            sampling,
            context=self.config.context,
            device=device,
        )
        return "It writes:\n\n" + prompt + self.tokenizer.decode([choice.token for choice in choices])

    def _batch(self, windows: Windows, starts: Tensor, device: torch.device) -> Batch:
        windows.tokens = windows.tokens.to(device)
        inputs, targets = windows.batch(starts)
        return Batch((inputs,), targets, inputs.numel())
