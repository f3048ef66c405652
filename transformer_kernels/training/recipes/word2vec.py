"""Word vectors of a text: skip-gram with negative sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from python_ref.skip_gram import SkipGram, keep_probabilities, noise_probabilities
from transformer_kernels._bind import bind
from transformer_kernels.training.config import TrainingConfig, option
from transformer_kernels.training.data.corpus import read_corpus
from transformer_kernels.training.data.sampler import ShuffledSampler
from transformer_kernels.training.data.tokenizers import WordTokenizer
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Recipe
from transformer_kernels.training.step import Batch, to_device


@dataclass(kw_only=True)
class Word2VecConfig(TrainingConfig):
    """Word vectors of a text, by skip-gram with negative sampling (word2vec)."""

    recipe: ClassVar[str] = "word2vec"
    default_length: ClassVar[tuple[str, int]] = ("epochs", 50)
    counts: ClassVar[tuple[str, ...]] = (*TrainingConfig.counts, "width", "window", "noise", "min_count")
    fractions: ClassVar[tuple[str, ...]] = (*TrainingConfig.fractions, "subsample")

    text: str = option(
        "stdlib",
        "text file, or stdlib (source code of Python's standard library) or tinyshakespeare (bundled)",
        fixed=True,
        later={"evaluate": "data"},
    )
    data_dir: str = option(
        "", "folder with another copy of tinyshakespeare's input.txt", later={"evaluate": "data_dir"}
    )
    width: int = option(100, "elements of a word vector", fixed=True)
    window: int = option(5, "largest distance of a neighbour, in words", fixed=True)
    noise: int = option(5, "noise words per neighbour", fixed=True)
    min_count: int = option(5, "leave out words with fewer occurrences", fixed=True)
    subsample: float = option(1e-3, "frequency above which words are subsampled; 0: keep all", fixed=True)
    batch_size: int = option(4096, "batch size per process, in pairs of a word and a neighbour", fixed=True)
    lr: float = option(5e-3, "peak learning rate")
    weight_decay: float = option(0.0, "AdamW weight decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate != 1:
            raise ValueError(f"accumulate: word2vec draws noise for whole batches; got {self.accumulate}")
        if self.model:
            raise ValueError(f"model: word2vec has no model fields, only --width; got {', '.join(self.model)}")


class PairSampler(ShuffledSampler):
    """Positions of centre words; indices differ between epochs, so that neighbours and noise are redrawn in each."""

    def peek(self) -> Tensor:
        """The item indices of this process's next batch; indices continue from epoch to epoch."""
        return super().peek() + self.epoch * self.length


class Word2Vec(Recipe):
    """The words of a text without a random part of the frequent ones; an item is a word at one position.

    Each epoch draws for each item a neighbour and `noise` words. The distance of the neighbour is uniform in 1 to R,
    and R in 1 to `window`, as in word2vec, so that near words count more.
    """

    Config = Word2VecConfig

    def __init__(self, config: Word2VecConfig, tokenizer: WordTokenizer | None = None) -> None:
        self.config = config
        text = read_corpus(config.text, config.data_dir)
        self.tokenizer = tokenizer or WordTokenizer.learn(text, config.min_count)
        ids = torch.tensor(self.tokenizer.encode(text), dtype=torch.int64)
        self.fingerprint = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        counts = ids.bincount(minlength=self.tokenizer.vocabulary_size)
        generator = torch.Generator().manual_seed(config.seed)
        draws = torch.rand(len(ids), dtype=torch.float64, generator=generator)
        kept = ids[draws < keep_probabilities(counts, config.subsample)[ids]] if len(ids) else ids
        self.noise = noise_probabilities(counts)
        self.words, self.train_length = kept, len(kept)
        if self.train_length <= 2 * config.window:
            raise ValueError(
                f"text {config.text!r} has {self.train_length} words after subsampling that occur at least "
                f"{config.min_count} times (--min-count); a window of {config.window} needs {2 * config.window + 1}"
            )

    @classmethod
    def build(cls, config: Word2VecConfig, tokenizer: WordTokenizer) -> nn.Module:
        return SkipGram(tokenizer.vocabulary_size, config.width, bind(config.backend))

    def sampler(self, processes: Processes) -> PairSampler:
        """The positions of the text."""
        config = self.config
        return PairSampler(self.train_length, config.batch_size, config.seed, processes.rank, processes.count)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """Words (B,), for each a neighbour and noise words (B, 1 + noise), and targets, 1 for the neighbour."""
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + int(indices[0])) % 2**32)
        positions, size, window = indices % self.train_length, len(indices), self.config.window
        reach = torch.randint(1, window + 1, (size,), generator=generator)
        distance = 1 + (torch.rand(size, generator=generator) * reach).long()
        side = 2 * torch.randint(2, (size,), generator=generator) - 1
        neighbours = positions + side * distance
        outside = (neighbours < 0) | (neighbours >= self.train_length)  # the neighbour on the other side instead
        neighbours = torch.where(outside, positions - side * distance, neighbours)
        noise = torch.multinomial(self.noise, size * self.config.noise, replacement=True, generator=generator)
        candidates = torch.cat((self.words[neighbours].unsqueeze(1), noise.view(size, -1)), 1)
        targets = torch.zeros_like(candidates)
        targets[:, 0] = 1
        inputs = tuple(to_device(tensor, device) for tensor in (self.words[positions], candidates))
        return Batch(inputs, to_device(targets, device), candidates.numel(), candidates.numel())

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """None: the loss of held-out text is lowest long before the vectors are good, so it selects no checkpoint."""
        yield from ()

    def evaluation_batches(self, device: torch.device) -> Iterator[Batch]:
        """Each word of the text once, in order."""
        for part in torch.arange(self.train_length).split(self.config.batch_size):
            yield self.batch(part, device)
