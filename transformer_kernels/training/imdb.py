"""The film review classifier: a BERT on GPT-2's byte pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_kernels.training._optional import require
from transformer_kernels.training.config import ImdbConfig
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.evaluation import Batch
from transformer_kernels.training.presets import build_preset
from transformer_kernels.training.reviews import Reviews, find_reviews, read_reviews
from transformer_kernels.training.sampler import BucketedSampler, PackedSampler, ShuffledSampler
from transformer_kernels.training.token_cache import TokenisedReviews, tokenise
from transformer_kernels.training.tokenizers import REVIEW_TOKENIZERS, ReviewTokenizer
from transformer_kernels.training.transfer import to_device

CLASSES = ("negative", "positive")
PADDED_MULTIPLE = 32  # so that 256 tokens make 8 widths, as many as there may be CUDA graphs
PACKED_MULTIPLE = 64  # tokens; whole tiles for the matrix products and the kernels


def build_imdb_bert(config: ImdbConfig, vocabulary_size: int) -> nn.Module:
    """A fresh classifier for that many token ids."""
    return build_preset("imdb_bert", config, vocab_size=vocabulary_size, context=config.max_length)


def truncate(review: Tensor, length: int, truncation: str) -> Tensor:
    """At most `length` ids: the first ones, or as many from the end as from the beginning."""
    if len(review) <= length:
        return review
    tail = length // 2 if truncation == "head+tail" else 0
    return torch.cat([review[: length - tail], review[len(review) - tail :]])


def pad_batch(reviews: Sequence[Tensor], tokenizer: ReviewTokenizer, config: ImdbConfig) -> tuple[Tensor, Tensor]:
    """CLS, the truncated review, SEP and padding: ids (B, L), and a mask (B, L) that is True at real tokens."""
    parts = [truncate(review, config.max_length - 2, config.truncation) for review in reviews]
    width = max(len(part) for part in parts) + 2 if config.padding != "max" else config.max_length
    if config.padding == "multiple":
        width = min(-(-width // PADDED_MULTIPLE) * PADDED_MULTIPLE, config.max_length)
    ids = torch.full((len(parts), width), tokenizer.pad)
    ids[:, 0] = tokenizer.cls
    for row, part in zip(ids, parts, strict=True):
        row[1 : 1 + len(part)] = part
        row[1 + len(part)] = tokenizer.sep
    return ids, ids != tokenizer.pad


class PackedReviews(NamedTuple):
    """Reviews one after the other: ids (1, T), where each begins and the last one ends (S + 1,), positions (1, T)."""

    ids: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor


def pack_batch(reviews: Sequence[Tensor], tokenizer: ReviewTokenizer, config: ImdbConfig, budget: int) -> PackedReviews:
    """CLS, the truncated review and SEP of each; T is `budget`, or what they need, up to a multiple of 64.

    Behind the last review stands PAD at position 0, which no review sees.
    """
    parts = [truncate(review, config.max_length - 2, config.truncation) for review in reviews]
    lengths = torch.tensor([0] + [len(part) + 2 for part in parts])
    cu_seqlens = lengths.cumsum(0)
    room = -(-max(budget, int(cu_seqlens[-1])) // PACKED_MULTIPLE) * PACKED_MULTIPLE
    ids, position_ids = torch.full((1, room), tokenizer.pad), torch.zeros(1, room, dtype=torch.int64)
    for part, start, end in zip(parts, cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        ids[0, start], ids[0, end - 1] = tokenizer.cls, tokenizer.sep
        ids[0, start + 1 : end - 1] = part
        position_ids[0, start:end] = torch.arange(end - start)
    return PackedReviews(ids, cu_seqlens.int(), position_ids)


def load_part(config: ImdbConfig, part: str) -> Reviews:
    """The "train" or "test" reviews that the config names."""
    if part == "test" and config.test_data:
        return read_reviews(config.test_data)
    is_file = Path(config.data).is_file()
    if part == "test" and is_file:
        raise ValueError("test_data is needed where data is a file")
    return read_reviews(config.data if is_file else find_reviews(config.data, part))


class Imdb:
    """The recipe: reviews, tokens, batches, and the model."""

    def __init__(self, config: ImdbConfig) -> None:
        self.config = config
        self.texts = load_part(config, "train")
        self.tokenizer = REVIEW_TOKENIZERS[config.tokenizer](config.vocab_dir)
        self.reviews = tokenise(self.texts, self.tokenizer, progress=config.progress)
        self.fingerprint = hashlib.sha256(self.reviews.ids.numpy().tobytes()).hexdigest()
        self.lengths = 2 + self.reviews.offsets.diff().clamp(max=config.max_length - 2)  # with CLS and SEP
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(self.reviews), generator=generator)
        kept = len(order) - int(config.validation * len(order))
        self.training, self.held_out = order[:kept], order[kept:].sort().values
        self.train_length = kept
        self.loss = packed_loss if config.batching == "packed" else padded_loss
        self.budget = 0

    def build_model(self) -> nn.Module:
        return build_imdb_bert(self.config, self.tokenizer.vocabulary_size)

    def sampler(self, processes: Processes) -> ShuffledSampler:
        """The reviews of the training part, in batches as the config wants them."""
        config, lengths = self.config, self.lengths[self.training]
        shared = (config.batch_size, config.seed, processes.rank, processes.count)
        if config.batching == "bucketed":
            return BucketedSampler(lengths, *shared)
        if config.batching == "packed":
            sampler = PackedSampler(lengths, *shared)
            self.budget = sampler.budget
            return sampler
        return ShuffledSampler(len(lengths), *shared)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """Reviews number `indices` of the training part."""
        if self.config.batching == "packed":
            return packed_batch(
                self.reviews, self.training[indices], self.tokenizer, self.config, device, budget=self.budget
            )
        return review_batch(self.reviews, self.training[indices], self.tokenizer, self.config, device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """The reviews held out from training, this process's share of them."""
        for part in self.held_out[processes.rank :: processes.count].split(2 * self.config.batch_size):
            if len(part):
                yield review_batch(self.reviews, part, self.tokenizer, self.config, device)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """scikit-learn's report on the reviews held out from training, and what TF-IDF reaches on them."""
        if not len(self.held_out):
            return ""
        held_out = self.reviews.part(self.held_out)
        probabilities = predict(model, held_out, self.tokenizer, self.config, device)
        accuracy, report = classification_report(held_out.labels.tolist(), probabilities)
        lines = ["", report, f"accuracy {accuracy:.2%} on the {len(held_out)} reviews held out from training"]
        if self.config.baseline:
            parts = (self._chosen(self.training), self._chosen(self.held_out))
            lines.append(f"TF-IDF with logistic regression: {baseline_accuracy(*parts):.2%}")
        return "\n".join(lines)

    def _chosen(self, indices: Tensor) -> Reviews:
        numbers = indices.tolist()
        return Reviews([self.texts.texts[n] for n in numbers], [self.texts.labels[n] for n in numbers])


def review_batch(
    reviews: TokenisedReviews, indices: Tensor, tokenizer: ReviewTokenizer, config: ImdbConfig, device: torch.device
) -> Batch:
    """The reviews of those numbers, padded, with their labels."""
    ids, mask = pad_batch([reviews.review(index) for index in indices.tolist()], tokenizer, config)
    labels = reviews.labels[indices]
    tokens = int(mask.sum())
    return Batch((to_device(ids, device), to_device(mask, device)), to_device(labels, device), tokens)


def packed_batch(
    reviews: TokenisedReviews,
    indices: Tensor,
    tokenizer: ReviewTokenizer,
    config: ImdbConfig,
    device: torch.device,
    *,
    budget: int,
) -> Batch:
    """The reviews of those numbers one after the other, with their labels."""
    packed = pack_batch([reviews.review(index) for index in indices.tolist()], tokenizer, config, budget)
    inputs = tuple(to_device(tensor, device) for tensor in packed)
    return Batch(inputs, to_device(reviews.labels[indices], device), int(packed.cu_seqlens[-1]))


def padded_loss(model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The model's mean loss over the labels of a padded batch."""
    return model.loss(targets, *inputs)


def packed_loss(model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The model's mean loss over the labels of a packed batch."""
    tokens, cu_seqlens, position_ids = inputs
    return model.loss(targets, tokens, cu_seqlens=cu_seqlens, position_ids=position_ids)


@torch.no_grad()
def predict(
    model: nn.Module, reviews: TokenisedReviews, tokenizer: ReviewTokenizer, config: ImdbConfig, device: torch.device
) -> Tensor:
    """The probabilities of both classes, (len(reviews), 2)."""
    model.eval()
    order = reviews.offsets.diff().argsort()  # texts of a length together, so that little is padded
    probabilities = torch.empty(len(reviews), len(CLASSES))
    for part in order.split(2 * config.batch_size):
        batch = review_batch(reviews, part, tokenizer, config, device)
        probabilities[part] = model(*batch.inputs).float().softmax(-1).cpu()
    return probabilities


def classification_report(labels: list[int], probabilities: Tensor) -> tuple[float, str]:
    """The accuracy, and scikit-learn's report with the confusion matrix as text."""
    metrics = require("sklearn.metrics")
    predicted = probabilities.argmax(-1).tolist()
    report = metrics.classification_report(
        labels, predicted, labels=[0, 1], target_names=CLASSES, digits=4, zero_division=0
    )
    matrix = metrics.confusion_matrix(labels, predicted, labels=[0, 1])
    lines = [f"{name:>12} {row[0]:>10} {row[1]:>10}" for name, row in zip(CLASSES, matrix.tolist(), strict=True)]
    header = f"{'true':>12} {CLASSES[0]:>10} {CLASSES[1]:>10}"
    return metrics.accuracy_score(labels, predicted), "\n".join([report, header, *lines])


def baseline_accuracy(train: Reviews, test: Reviews) -> float:
    """The test accuracy of logistic regression on TF-IDF of words and word pairs: what no transformer is needed for."""
    text: Any = require("sklearn.feature_extraction.text")
    linear: Any = require("sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    classifier = linear.LogisticRegression(C=10.0, max_iter=1000)
    classifier.fit(vectorizer.fit_transform(train.texts), train.labels)
    return float(classifier.score(vectorizer.transform(test.texts), test.labels))
