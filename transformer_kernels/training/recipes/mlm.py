"""Masked language modelling on film reviews: what `train imdb --init` starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from python_ref.encoder import MASKED_SHARE
from transformer_kernels.training.config import build_preset, option
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipes.imdb import ReviewRecipe, ReviewsConfig, pad_batch
from transformer_kernels.training.sampler import BucketedSampler
from transformer_kernels.training.step import IGNORED, Batch, to_device
from transformer_kernels.training.tokenizers import ReviewTokenizer

REPLACED, RANDOM = 0.8, 0.1  # of the masked tokens: by MASK, by any other; the rest stay


@dataclass(kw_only=True)
class MlmConfig(ReviewsConfig):
    """A BERT that fills in masked words of film reviews, to start train imdb --init from."""

    recipe: ClassVar[str] = "mlm"
    default_length: ClassVar[tuple[str, int]] = ("epochs", 2)

    batch_size: int = option(32, "reviews a step, in each process", fixed=True)
    lr: float = option(1e-3, "peak learning rate of AdamW")


class MaskingSampler(BucketedSampler):
    """Batches of similar length; in each epoch the items have other numbers, and so are masked anew."""

    def peek(self) -> Tensor:
        """The item numbers of the next batch of this process, counted on from epoch to epoch."""
        return super().peek() + self.epoch * self.length


def mask_tokens(ids: Tensor, tokenizer: ReviewTokenizer, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Choose 15 % of each sequence's tokens; 80 % of these become MASK, 10 % any token, 10 % stay.

    Args:
        ids: int64 (B, L) with PAD, CLS and SEP, which are never chosen.
    Returns:
        the ids with what was replaced; places int64 (N,), where N depends on B and L alone, counted through all
        sequences; and the tokens that stood there, int64 (N,), -100 at places that only make up the number.

    Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019, section 3.1.
    """
    rows, width = ids.shape
    special = torch.tensor([tokenizer.pad, tokenizer.cls, tokenizer.sep])
    text = ~torch.isin(ids, special)  # (B, L)
    most = max(1, round(MASKED_SHARE * (width - 2)))
    wanted = (MASKED_SHARE * text.sum(1)).round().clamp(min=1).minimum(text.sum(1))  # (B,)
    order = torch.rand(ids.shape, generator=generator).masked_fill(~text, 2.0).argsort(1)[:, :most]  # text first
    places = (torch.arange(rows)[:, None] * width + order).flatten()  # (N,)
    chosen = (torch.arange(most) < wanted[:, None]).flatten()
    targets = ids.flatten()[places]
    draw = torch.rand(places.shape, generator=generator)
    others = torch.randint(tokenizer.pad, places.shape, generator=generator)
    kept = torch.where(draw < REPLACED + RANDOM, others, targets)
    masked = ids.flatten().clone()
    masked[places[chosen]] = torch.where(draw < REPLACED, tokenizer.mask, kept)[chosen]
    return masked.view_as(ids), places, targets.masked_fill(~chosen, IGNORED)


class Mlm(ReviewRecipe):
    """Reviews, masks drawn by item number, and the model; labels are not looked at."""

    Config = MlmConfig

    @classmethod
    def build(cls, config: MlmConfig, tokenizer: ReviewTokenizer) -> nn.Module:
        return build_preset("imdb_mlm", config, vocab_size=tokenizer.vocabulary_size, context=config.max_length)

    def sampler(self, processes: Processes) -> MaskingSampler:
        """The reviews of the training part."""
        config = self.config
        lengths = self.lengths[self.training]
        return MaskingSampler(lengths, config.batch_size, config.seed, processes.rank, processes.count)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """Reviews number `indices` of the training part, with masks of these numbers."""
        return self._masked(self.training[indices % self.train_length], int(indices[0]), device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """The reviews held out from training, this process's share of them, always with the same masks."""
        for part in self.held_out[processes.rank :: processes.count].split(self.config.batch_size):
            if len(part):
                yield self._masked(part, int(part[0]), device)

    def _masked(self, numbers: Tensor, seed: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + seed) % 2**32)
        reviews = [self.reviews.review(number) for number in numbers.tolist()]
        ids, mask = pad_batch(reviews, self.tokenizer, self.config)
        masked, places, targets = mask_tokens(ids, self.tokenizer, generator)
        inputs = tuple(to_device(tensor, device) for tensor in (masked, mask, places))
        return Batch(inputs, to_device(targets, device), int(mask.sum()), ids.numel())
