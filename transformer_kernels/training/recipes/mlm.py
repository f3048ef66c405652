"""Masked language modelling on film reviews, to initialise `train imdb --init`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from python_ref.encoder import MASKED_SHARE
from transformer_kernels.training.config import build_preset, option
from transformer_kernels.training.data.sampler import NumberedSampler
from transformer_kernels.training.data.tokenizers import ReviewTokenizer
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Trained
from transformer_kernels.training.recipes.imdb import ReviewRecipe, ReviewsConfig, pad_batch
from transformer_kernels.training.step import IGNORED, Batch, to_device

MASK = "[MASK]"
REPLACED, RANDOM = 0.8, 0.1  # fractions of the masked tokens: replaced by MASK, by a random token; others are unchanged


@dataclass(kw_only=True)
class MlmConfig(ReviewsConfig):
    """A BERT masked language model on film reviews, to initialise train imdb --init."""

    recipe: ClassVar[str] = "mlm"
    default_length: ClassVar[tuple[str, int]] = ("epochs", 2)

    batch_size: int = option(32, "batch size per process, in reviews", fixed=True)
    lr: float = option(1e-3, "peak learning rate")


def mask_tokens(
    ids: Tensor, tokenizer: ReviewTokenizer, generators: Iterable[torch.Generator]
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose 15 % of each sequence's tokens; replace 80 % of them by MASK and 10 % by a random token.

    Args:
        ids: int64 (B, L) with PAD, CLS and SEP, which are never chosen.
        generators: one for each sequence, whose masks therefore do not depend on the other sequences of the batch.
    Returns:
        the ids after replacement; the flattened indices of the chosen tokens, int64 (N,), where N depends on B and L
        alone; and the original tokens, int64 (N,), -100 at indices that only fill up to N.

    Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019, section 3.1.
    """
    rows, width = ids.shape
    special = torch.tensor([tokenizer.pad, tokenizer.cls, tokenizer.sep])
    text = ~torch.isin(ids, special)  # (B, L)
    most = max(1, round(MASKED_SHARE * (width - 2)))
    wanted = (MASKED_SHARE * text.sum(1)).round().clamp(min=1).minimum(text.sum(1))  # (B,)
    drawn, draw, others = torch.zeros(ids.shape), torch.zeros(rows, most), torch.zeros(rows, most, dtype=torch.int64)
    for row, (generator, count) in enumerate(zip(generators, wanted.int().tolist(), strict=True)):
        end = int((ids[row] != tokenizer.pad).sum())
        drawn[row, :end] = torch.rand(end, generator=generator)
        draw[row, :count] = torch.rand(count, generator=generator)
        others[row, :count] = torch.randint(tokenizer.pad, (count,), generator=generator)
    order = drawn.masked_fill(~text, 2.0).argsort(1)[:, :most]  # text first
    indices = (torch.arange(rows)[:, None] * width + order).flatten()  # (N,)
    chosen = (torch.arange(most) < wanted[:, None]).flatten()
    targets = ids.flatten()[indices]
    draw, others = draw.flatten(), others.flatten()
    kept = torch.where(draw < REPLACED + RANDOM, others, targets)
    masked = ids.flatten().clone()
    masked[indices[chosen]] = torch.where(draw < REPLACED, tokenizer.mask, kept)[chosen]
    return masked.view_as(ids), indices, targets.masked_fill(~chosen, IGNORED)


class Mlm(ReviewRecipe):
    """Reviews, masks drawn by item index, and the model; labels are not used."""

    Config = MlmConfig
    predicts_tokens = True
    targets_vary = True

    @classmethod
    def build(cls, config: MlmConfig, tokenizer: ReviewTokenizer) -> nn.Module:
        return build_preset("imdb_mlm", config, vocab_size=tokenizer.vocabulary_size, context=config.max_length)

    def sampler(self, processes: Processes) -> NumberedSampler:
        """The training reviews in batches of similar length; their masks are redrawn in each epoch."""
        config, lengths = self.config, self.lengths[self.training]
        return NumberedSampler(lengths, config.batch_size, config.seed, processes.rank, processes.count)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """The training reviews at `indices`, with the masks of these indices."""
        return self._masked(self.training[indices % self.train_length], indices, device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of the validation reviews, with fixed masks."""
        for part in processes.parts(self.held_out, self.config.batch_size):
            yield self._masked(part, part, device)

    def _masked(self, numbers: Tensor, seeds: Tensor, device: torch.device) -> Batch:
        seeds = (self.config.seed * 1_000_003 + seeds) % 2**32
        generators = (torch.Generator().manual_seed(seed) for seed in seeds.tolist())
        ids, mask = pad_batch(self.reviews.chosen(numbers), self.tokenizer, self.config)
        masked, indices, targets = mask_tokens(ids, self.tokenizer, generators)
        inputs = tuple(to_device(tensor, device) for tensor in (masked, mask, indices))
        return Batch(inputs, to_device(targets, device), int(mask.sum()), ids.numel())

    @classmethod
    @torch.inference_mode()
    def fill_mask(cls, trained: Trained, text: str, count: int) -> list[tuple[str, float]]:
        """The `count` most likely tokens at [MASK], special tokens excluded, with their probabilities."""
        if text.count(MASK) != 1:
            raise ValueError(f"fill-mask: the text must contain {MASK} exactly once; got {text!r}")
        tokenizer = trained.tokenizer
        before, after = tokenizer.encode_many(text.split(MASK))
        ids = [tokenizer.cls, *before, tokenizer.mask, *after, tokenizer.sep]
        if len(ids) > trained.config.max_length:
            most = trained.config.max_length
            raise ValueError(f"fill-mask: the text must have at most {most} tokens; got {len(ids)}; shorten it")
        index = torch.tensor([1 + len(before)], device=trained.device)
        logits = trained.model(torch.tensor([ids], device=trained.device), None, index)[0]
        shares = logits.float().softmax(-1)
        shares[[tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask]] = -1.0
        likely = shares.topk(min(count, len(shares)))
        words = (tokenizer.decode([index]) for index in likely.indices.tolist())
        return [(word.strip() or repr(word), share) for word, share in zip(words, likely.values.tolist(), strict=True)]
