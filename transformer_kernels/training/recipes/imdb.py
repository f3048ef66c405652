"""The film review classifier: a BERT on GPT-2's byte pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from transformer_kernels.training._optional import require
from transformer_kernels.training.config import TrainingConfig, build_preset, option
from transformer_kernels.training.data.reviews import (
    Reviews,
    TokenisedReviews,
    find_reviews,
    read_reviews,
    tokenise,
    tokenise_uncached,
)
from transformer_kernels.training.data.sampler import BucketedSampler, PackedSampler, ShuffledSampler
from transformer_kernels.training.data.tokenizers import (
    MAX_VOCABULARY,
    REVIEW_TOKENIZERS,
    LearnedTokenizer,
    ReviewTokenizer,
)
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Classified, Recipe, Trained
from transformer_kernels.training.recipes.initial import load_encoder, read_encoder
from transformer_kernels.training.step import Batch, to_device

CLASSES = ("negative", "positive")
PADDED_MULTIPLE = 32  # at most 8 different lengths for 256 tokens, hence at most 8 CUDA graphs
PACKED_MULTIPLE = 64  # tokens; whole tiles for the matrix products and the kernels


@dataclass(kw_only=True)
class ReviewsConfig(TrainingConfig):
    """Options shared by the recipes on film reviews."""

    fractions: ClassVar[tuple[str, ...]] = (*TrainingConfig.fractions, "validation")
    limits: ClassVar[dict[str, float]] = {**TrainingConfig.limits, "vocabulary": MAX_VOCABULARY}

    data: str = option(
        "",
        "aclImdb folder, folder with train.* and test.*, or training file (CSV, JSONL, Parquet; optionally .gz, .xz)",
        later={"evaluate": "data"},
    )
    validation: float = option(0.1, "fraction of the training reviews held out for validation", fixed=True)
    tokenizer: str = option(
        "gpt2",
        "GPT-2 byte pairs, byte pairs or lower-case words learned from the reviews, or bytes",
        choices=("gpt2", "learned", "words", "bytes"),
        fixed=True,
    )
    vocabulary: int = option(8000, "vocabulary size of --tokenizer learned and words", fixed=True)
    vocab_dir: str = option(
        "", "folder with GPT-2's vocab.bpe, for offline use", later={"evaluate": "vocab_dir", "classify": "vocab_dir"}
    )
    max_length: int = option(256, "maximum tokens per review, including CLS and SEP", fixed=True)
    truncation: str = option("head", "which part of a long review is kept", choices=("head", "head+tail"), fixed=True)
    padding: str = option(
        "longest",
        "pad to the longest review of the batch, rounded up to a multiple of 32 (few shapes, for CUDA graphs), or to "
        "--max-length",
        choices=("longest", "multiple", "max"),
        fixed=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 3:
            raise ValueError(f"max_length must leave room for CLS, SEP and a token: at least 3; got {self.max_length}")


@dataclass(kw_only=True)
class ImdbConfig(ReviewsConfig):
    """A BERT classifier of film reviews (positive or negative)."""

    recipe: ClassVar[str] = "imdb"
    default_config: ClassVar[str] = "imdb_cpu"
    default_length: ClassVar[tuple[str, int]] = ("epochs", 3)
    fractions: ClassVar[tuple[str, ...]] = (*ReviewsConfig.fractions, "token_dropout", "label_smoothing")

    batch_size: int = option(16, "batch size per process, in reviews", fixed=True)
    lr: float = option(3e-4, "peak learning rate")
    test_data: str = option("", "test file, if --data is a file", later={"evaluate": "test_data"})
    init: str = option(
        "",
        "initialise encoder and tokenizer from this folder: a run of train mlm with a model of the same size, or a "
        "pretrained BERT, MiniLM, DistilBERT or RoBERTa, which also sets the model size",
        fixed=True,
    )
    batching: str = option(
        "shuffled",
        "batch composition: shuffled; bucketed, similar lengths with less padding; or packed, concatenated without "
        "padding to nearly equal total lengths and one shape",
        choices=("shuffled", "bucketed", "packed"),
        fixed=True,
    )
    sparse_embedding: bool = option(
        False,
        "update only the batch's rows of the token embedding; a different algorithm: absent rows are not updated and "
        "their moments do not decay; single process only",
        fixed=True,
    )
    token_dropout: float = option(0.0, "probability that a training step replaces a token by MASK", fixed=True)
    label_smoothing: float = option(0.0, "label smoothing", fixed=True)
    baseline: bool = option(
        False, "also report the accuracy of TF-IDF with logistic regression", later={"evaluate": "baseline"}
    )


def truncate(review: Tensor, length: int, truncation: str) -> Tensor:
    """At most `length` ids: the first ones, or equally many from the beginning and the end."""
    if len(review) <= length:
        return review
    tail = length // 2 if truncation == "head+tail" else 0
    return torch.cat([review[: length - tail], review[len(review) - tail :]])


def pad_batch(reviews: Sequence[Tensor], tokenizer: ReviewTokenizer, config: ReviewsConfig) -> tuple[Tensor, Tensor]:
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
    """Concatenated reviews: ids (1, T), the offsets of the sequences (S + 1,), positions (1, T)."""

    ids: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor


def pack_batch(reviews: Sequence[Tensor], tokenizer: ReviewTokenizer, config: ImdbConfig, budget: int) -> PackedReviews:
    """CLS, the truncated review and SEP of each; T is `budget`, or the total rounded up to a multiple of 64.

    After the last review T is filled with PAD at position 0, which no review attends to.
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


def load_part(config: ReviewsConfig, part: str) -> Reviews:
    """The "train" or "test" reviews of the config."""
    if part == "test" and isinstance(config, ImdbConfig) and config.test_data:
        return read_reviews(config.test_data)
    is_file = Path(config.data).is_file()
    if part == "test" and is_file:
        raise ValueError(f"the training data is a file, {config.data}: give a file of test reviews as --test-data")
    return read_reviews(config.data if is_file else find_reviews(config.data, part))


class ReviewRecipe(Recipe):
    """The reviews, their tokens, and the split into training and validation."""

    def __init__(self, config: Any, tokenizer: ReviewTokenizer | None = None) -> None:
        self.config = config
        self.texts = load_part(config, "train")
        self.tokenizer = tokenizer or self.make_tokenizer()
        self.reviews = tokenise(self.texts, self.tokenizer, progress=config.progress)
        self.fingerprint = hashlib.sha256(self.reviews.ids.numpy().tobytes()).hexdigest()
        self.lengths = 2 + self.reviews.offsets.diff().clamp(max=config.max_length - 2)  # with CLS and SEP
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(self.reviews), generator=generator)
        kept = len(order) - int(config.validation * len(order))
        self.training, self.held_out = order[:kept], order[kept:].sort().values
        self.train_length = kept

    def loss(self, model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The model's mean loss over the targets of a padded batch."""
        return model.loss(targets, *inputs)

    def make_tokenizer(self) -> ReviewTokenizer:
        """The tokenizer that the config names."""
        if self.config.tokenizer == "learned":
            return LearnedTokenizer.learn(self.texts.texts, self.config.vocabulary)
        if self.config.tokenizer == "words":
            return LearnedTokenizer.learn_words(self.texts.texts, self.config.vocabulary)
        return REVIEW_TOKENIZERS[self.config.tokenizer](self.config.vocab_dir)


class Imdb(ReviewRecipe):
    """Labelled reviews, batches, and the model."""

    Config = ImdbConfig

    def __init__(self, config: ImdbConfig, tokenizer: ReviewTokenizer | None = None) -> None:
        self.initial = read_encoder(config.init) if config.init and tokenizer is None else None
        if self.initial is not None:
            config.model = {**self.initial.fields, **config.model}
        super().__init__(config, tokenizer)
        labels = self.reviews.labels[self.training].unique().tolist()
        if len(labels) < len(CLASSES):
            raise ValueError(f"{config.data}: all {self.train_length} reviews for training are {CLASSES[labels[0]]}")
        self.budget = 0

    @classmethod
    def build(cls, config: ImdbConfig, tokenizer: ReviewTokenizer) -> nn.Module:
        return build_preset("imdb_bert", config, vocab_size=tokenizer.vocabulary_size, context=config.max_length)

    def make_tokenizer(self) -> ReviewTokenizer:
        """The tokenizer of the `--init` folder, or else the one that the config names."""
        if self.initial is None:
            return super().make_tokenizer()
        return self.load_tokenizer(self.initial.tokenizer, self.config)

    def loss(self, model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The model's mean loss over the labels of a padded or packed batch."""
        tokens, *others = inputs
        if self.config.token_dropout:
            dropped = torch.rand(tokens.shape, device=tokens.device) < self.config.token_dropout
            tokens = torch.where(dropped, self.tokenizer.mask, tokens)
        names = ("cu_seqlens", "position_ids") if self.config.batching == "packed" else ("padding_mask",)
        options = dict(zip(names, others, strict=True))
        return model.loss(targets, tokens, label_smoothing=self.config.label_smoothing, **options)

    def begin(self, model: nn.Module) -> None:
        """Load the encoder of the `--init` folder."""
        if self.initial is not None:
            load_encoder(model, self.initial)

    def sampler(self, processes: Processes) -> ShuffledSampler:
        """The training reviews, batched according to the config."""
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
        """The training reviews at `indices`."""
        chosen = self.training[indices]
        if self.config.batching != "packed":
            return review_batch(self.reviews, chosen, self.tokenizer, self.config, device)
        packed = pack_batch(self.reviews.chosen(chosen), self.tokenizer, self.config, self.budget)
        inputs = tuple(to_device(tensor, device) for tensor in packed)
        return Batch(inputs, to_device(self.reviews.labels[chosen], device), int(packed.cu_seqlens[-1]))

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of the validation reviews."""
        for part in processes.parts(self.held_out, 2 * self.config.batch_size):
            yield review_batch(self.reviews, part, self.tokenizer, self.config, device)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """scikit-learn's report on the validation reviews, and the accuracy of TF-IDF on them."""
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

    @classmethod
    def evaluate(cls, trained: Trained) -> str:
        """scikit-learn's report and the confusion matrix on the test reviews, and the accuracy of TF-IDF."""
        config = trained.config
        test = load_part(config, "test")
        reviews = tokenise(test, trained.tokenizer, progress=config.progress)
        probabilities = predict(trained.model, reviews, trained.tokenizer, config, trained.device)
        accuracy, report = classification_report(test.labels, probabilities)
        lines = [report, f"accuracy {accuracy:.2%} on {len(test.labels)} test reviews"]
        if config.baseline:
            lines.append(f"TF-IDF with logistic regression: {baseline_accuracy(load_part(config, 'train'), test):.2%}")
        return "\n".join(lines)

    @classmethod
    def classify(cls, trained: Trained, texts: list[str]) -> Classified:
        """Classify each text as a positive or negative review."""
        reviews = tokenise_uncached(texts, trained.tokenizer)
        return Classified(CLASSES, predict(trained.model, reviews, trained.tokenizer, trained.config, trained.device))

    def _chosen(self, indices: Tensor) -> Reviews:
        numbers = indices.tolist()
        return Reviews([self.texts.texts[n] for n in numbers], [self.texts.labels[n] for n in numbers])


def review_batch(
    reviews: TokenisedReviews, indices: Tensor, tokenizer: ReviewTokenizer, config: ImdbConfig, device: torch.device
) -> Batch:
    """The reviews at these indices, padded, with their labels."""
    ids, mask = pad_batch(reviews.chosen(indices), tokenizer, config)
    labels = reviews.labels[indices]
    tokens = int(mask.sum())
    return Batch((to_device(ids, device), to_device(mask, device)), to_device(labels, device), tokens)


@torch.no_grad()
def predict(
    model: nn.Module, reviews: TokenisedReviews, tokenizer: ReviewTokenizer, config: ImdbConfig, device: torch.device
) -> Tensor:
    """The probabilities of both classes, (len(reviews), 2)."""
    model.eval()
    order = reviews.offsets.diff().argsort()  # batch similar lengths, to reduce padding
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
    """Test accuracy of logistic regression on TF-IDF of words and word pairs, a baseline without a transformer."""
    text: Any = require("sklearn.feature_extraction.text")
    linear: Any = require("sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    classifier = linear.LogisticRegression(C=10.0, max_iter=1000)
    classifier.fit(vectorizer.fit_transform(train.texts), train.labels)
    return float(classifier.score(vectorizer.transform(test.texts), test.labels))
