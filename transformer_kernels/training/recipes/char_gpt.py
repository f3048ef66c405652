"""The character GPT: next-character prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from transformer_kernels.pretrained.generation import Choice, Sampling, generate_many
from transformer_kernels.training.config import TrainingConfig, build_preset, option
from transformer_kernels.training.data.corpus import Windows, read_corpus
from transformer_kernels.training.data.tokenizers import CharacterTokenizer
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Recipe, Trained
from transformer_kernels.training.step import Batch

VALIDATION_WINDOWS = 2048
TRAINING_PART = 0.9
SAMPLE_LENGTH = 400


@dataclass(kw_only=True)
class CharGPTConfig(TrainingConfig):
    """A GPT on characters."""

    recipe: ClassVar[str] = "char-gpt"
    default_config: ClassVar[str] = "five_minutes"
    default_length: ClassVar[tuple[str, int]] = ("steps", 2000)
    counts: ClassVar[tuple[str, ...]] = (*TrainingConfig.counts, "context")

    corpus: str = option(
        "stdlib",
        "stdlib (source code of Python's standard library), tinyshakespeare (bundled), or a text file",
        fixed=True,
        later={"evaluate": "data"},
    )
    data_dir: str = option(
        "", "folder with another copy of tinyshakespeare's input.txt", later={"evaluate": "data_dir"}
    )
    split: str = option(
        "90/10",
        "90/10: hold out the last tenth for validation; none: no validation",
        choices=("90/10", "none"),
        fixed=True,
    )
    preset: str = option(
        "char_gpt", "model definition that --model changes", choices=("char_gpt", "deepseek"), fixed=True
    )
    context: int = option(64, "context length in characters", fixed=True)
    sample: bool = option(True, "print a generated sample at the end")


class CharGPT(Recipe):
    """The text, its character vocabulary, windows of the text, and the model."""

    Config = CharGPTConfig
    unit = "characters"
    predicts_tokens = True

    def __init__(self, config: CharGPTConfig | None = None, tokenizer: Any = None) -> None:
        self.config = config or self.Config()
        if self.config.corpus == "auto":  # of earlier configs
            self.config.corpus = "tinyshakespeare"
        text = read_corpus(self.config.corpus, self.config.data_dir)
        if not text:
            raise ValueError(
                f"corpus {self.config.corpus!r} has 0 characters; at least {self.config.context + 1} are needed"
            )
        self.tokenizer = tokenizer or self.make_tokenizer(self.config, text)
        kept = len(text) if self.config.split == "none" else int(TRAINING_PART * len(text))
        training, held_out = (
            torch.tensor(self.tokenizer.encode(part), dtype=torch.int32) for part in (text[:kept], text[kept:])
        )
        self.fingerprint = hashlib.sha256(torch.cat((training, held_out)).numpy().tobytes()).hexdigest()
        self.training = self._windows(training, "the training part")
        self.validation = None
        if self.config.split != "none":
            self.validation = self._windows(held_out, "the validation part (a tenth)")
        self.train_length = len(self.training)

    def _windows(self, tokens: Tensor, part: str) -> Windows:
        return Windows(tokens, self.config.context, f"{part} of corpus {self.config.corpus!r}", self.unit)

    @classmethod
    def make_tokenizer(cls, config: Any, text: str) -> Any:
        """The tokenizer of a new run."""
        return CharacterTokenizer(text)

    @classmethod
    def build(cls, config: Any, tokenizer: Any) -> nn.Module:
        return build_preset(config.preset, config, vocab_size=tokenizer.vocabulary_size, context=config.context)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """The windows that start at `indices`: characters (B, L), and the next characters (B, L)."""
        return self._batch(self.training, indices, device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of non-overlapping windows, evenly spaced over the validation part."""
        if self.validation is not None:
            for part in processes.parts(self.validation.spread(VALIDATION_WINDOWS), self.config.batch_size):
                yield self._batch(self.validation, part, device)

    def evaluation_batches(self, device: torch.device) -> Iterator[Batch]:
        """Non-overlapping windows over the whole validation part, or over the whole text if there is none."""
        windows = self.validation or self.training
        for part in windows.spread(len(windows)).split(self.config.batch_size):
            yield self._batch(windows, part, device)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """A generated sample, unless `sample` is off."""
        if not self.config.sample:
            return ""
        prompt = self.tokenizer.decode([int(self.training.tokens[0])])
        trained = Trained(model, self.tokenizer, self.config, device, 0, type(self))
        steps = self.generate(trained, [prompt], SAMPLE_LENGTH, Sampling(temperature=0.7))
        return "It writes:\n\n" + prompt + self.tokenizer.decode([choices[0].token for choices in steps])

    @classmethod
    def generate(cls, trained: Trained, prompts: list[str], count: int, sampling: Sampling) -> Iterator[list[Choice]]:
        """Generate `count` characters (or tokens) after each prompt, step by step."""
        tokens = [trained.tokenizer.encode(prompt) for prompt in prompts]
        context, device = trained.config.context, trained.device
        return generate_many(trained.model, tokens, count, sampling, context=context, device=device)

    def _batch(self, windows: Windows, starts: Tensor, device: torch.device) -> Batch:
        windows.tokens = windows.tokens.to(device)
        inputs, targets = windows.batch(starts)
        return Batch((inputs,), targets, inputs.numel())
