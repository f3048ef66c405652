"""The translator: sentence pairs, byte pairs of both languages, batches of similar length, BLEU and chrF."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from transformer_kernels.pretrained.folder import read_text
from transformer_kernels.training._optional import require
from transformer_kernels.training.config import TrainingConfig, build_preset, option
from transformer_kernels.training.data.files import DataFileError
from transformer_kernels.training.data.sampler import NumberedSampler
from transformer_kernels.training.data.tokenizers import MAX_VOCABULARY
from transformer_kernels.training.decoding import GREEDY, BeamSearch, MinimumBayesRisk, Search, translate_batch
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Alignment, Recipe, Trained, Translated
from transformer_kernels.training.step import IGNORED, Batch, to_device

SPECIAL = ("<pad>", "<unknown>", "<begin>", "<end>")
PAD, UNKNOWN, BEGIN, END = range(len(SPECIAL))
WORD = "\N{LOWER ONE EIGHTH BLOCK}"  # marks the beginning of a word
SPLIT_SEED = 0  # the test sentences do not depend on a run's seed


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(kw_only=True)
class TranslateConfig(TrainingConfig):
    """An encoder-decoder translator."""

    recipe: ClassVar[str] = "translate"
    default_config: ClassVar[str] = "translate_small"
    default_length: ClassVar[tuple[str, int]] = ("steps", 1500)
    fractions: ClassVar[tuple[str, ...]] = (
        *TrainingConfig.fractions,
        "test",
        "validation",
        "label_smoothing",
        "bpe_dropout",
    )

    limits: ClassVar[dict[str, float]] = {
        **TrainingConfig.limits,
        **dict.fromkeys(("source_vocabulary", "target_vocabulary"), MAX_VOCABULARY),
    }

    data: str = option("", "tab-separated file of sentence pairs, one per line", later={"evaluate": "data"})
    test: float = option(0.1, "fraction of the source sentences held out for `evaluate`", fixed=True)
    validation: float = option(0.0, "fraction of the remaining source sentences held out for validation", fixed=True)
    source_vocabulary: int = option(1000, "maximum vocabulary size of the source language", fixed=True)
    target_vocabulary: int = option(1000, "maximum vocabulary size of the target language", fixed=True)
    lowercase: bool = option(True, "convert the source to lower case", fixed=True)
    max_length: int = option(64, "maximum tokens per sentence, including its end token", fixed=True)
    label_smoothing: float = option(0.1, "label smoothing", fixed=True)
    bpe_dropout: float = option(
        0.0, "probability of leaving out a merge of byte pairs in training, in both languages", fixed=True
    )
    beam: int = option(1, "number of beams of `evaluate`; 1 is greedy decoding", later={"evaluate": "beam"})
    length_penalty: float = option(
        0.6, "beam search length penalty; larger favours longer translations", later={"evaluate": "length_penalty"}
    )
    mbr: int = option(
        0, "number of samples of `evaluate` for minimum-Bayes-risk decoding; 0: none", later={"evaluate": "mbr"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_vocabulary", "target_vocabulary"):
            if getattr(self, name) <= len(SPECIAL):
                raise ValueError(f"{name} must be more than {len(SPECIAL)}; got {getattr(self, name)}")
        if self.max_length < 2:
            raise ValueError(f"max_length must leave room for a token and the end: at least 2; got {self.max_length}")
        BeamSearch(width=self.beam, length_penalty=self.length_penalty)
        if self.mbr:
            MinimumBayesRisk(samples=self.mbr)
        if self.mbr and self.beam > 1:
            raise ValueError(f"beam and mbr exclude each other; got {self.beam} and {self.mbr}; set beam 1 or mbr 0")


class BytePairs:
    """Byte pairs of one language (Sennrich et al. 2016), by the package `tokenizers`.

    Merges start from characters and stay within words. A mark precedes each word, and punctuation is a separate word.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.vocabulary_size = inner.get_vocab_size()

    @classmethod
    def train(cls, texts: Sequence[str], size: int, *, lowercase: bool = False) -> BytePairs:
        """Learn at most `size` tokens, including PAD, UNKNOWN, BEGIN and END."""
        tokenizers: Any = require("tokenizers")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNKNOWN]))
        steps = [tokenizers.normalizers.NFC(), *([tokenizers.normalizers.Lowercase()] if lowercase else [])]
        inner.normalizer = tokenizers.normalizers.Sequence(steps)
        split = [tokenizers.pre_tokenizers.Metaspace(), tokenizers.pre_tokenizers.Punctuation()]
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(split)
        inner.decoder = tokenizers.decoders.Metaspace()
        options = {"vocab_size": size, "special_tokens": list(SPECIAL), "show_progress": False}
        inner.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options))
        return cls(inner)

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BytePairs:
        """The tokenizer with this description; ValueError if it is invalid."""
        try:
            return cls(require("tokenizers").Tokenizer.from_str(json.dumps(description)))
        except ImportError:
            raise
        except Exception as error:  # the package raises bare Exceptions
            raise ValueError(f"not a description of byte pairs: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence, and END."""
        return [*self.inner.encode(text).ids, END]

    def encode_sampled(self, text: str, dropout: float, generator: random.Random) -> list[int]:
        """The ids of a sentence, and END, where each possible merge is left out with probability `dropout`.

        The package `tokenizers` samples such ids too, but its generator cannot be seeded.

        Provilkov, Emelianenko, Voita, "BPE-dropout: simple and effective subword regularization", 2020.
        """
        words = self.inner.pre_tokenizer.pre_tokenize_str(self.inner.normalizer.normalize_str(text))
        parts = (part for word, _ in words for part in self._split(word, dropout, generator))
        return [*(self._ids.get(part, UNKNOWN) for part in parts), END]

    def _split(self, word: str, dropout: float, generator: random.Random) -> list[str]:
        parts = [*word]
        while True:
            ranks = [self._ranks.get(pair) for pair in itertools.pairwise(parts)]
            kept = [
                (rank, index) for index, rank in enumerate(ranks) if rank is not None and generator.random() >= dropout
            ]
            if not kept:
                return parts
            index = min(kept)[1]
            parts[index : index + 2] = [parts[index] + parts[index + 1]]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return self.inner.get_vocab()

    @functools.cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        """The rank of each merge."""
        return {(left, right): rank for rank, (left, right) in enumerate(self.describe()["model"]["merges"])}

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id, without the word mark."""
        tokens = [self.inner.id_to_token(index) for index in ids]
        return [token.removeprefix(WORD) or WORD for token in tokens]

    def unseen(self, text: str) -> str:
        """The characters that have no id."""
        characters = sorted(set(self.inner.normalizer.normalize_str(text)))
        return "".join(character for character in characters if UNKNOWN in self.inner.encode(character).ids)

    def describe(self) -> dict[str, Any]:
        return json.loads(self.inner.to_str())


class PairTokenizer:
    """The tokenizers of both languages."""

    def __init__(self, source: BytePairs, target: BytePairs) -> None:
        self.source, self.target = source, target

    def describe(self) -> dict[str, Any]:
        return {"kind": "pairs", "source": self.source.describe(), "target": self.target.describe()}


def read_pairs(path: str | Path) -> list[Pair]:
    """The first two columns of a tab-separated file, NFC, with single spaces.

    Raises:
        ValueError: no path, or no pair in the file.
        DataFileError: the file is missing or is not text, or a line has no second column.
    """
    if not path:
        raise ValueError("--data is required: a tab-separated file of sentence pairs, one per line")
    try:
        lines = read_text(Path(path)).split("\n")  # other separators of lines may be part of a sentence
    except (FileNotFoundError, ValueError) as error:
        raise DataFileError(f"{error}; it cannot be read as sentence pairs") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        columns = [_cleaned(column) for column in line.split("\t")]
        if not any(columns):
            continue
        if len(columns) < 2 or not all(columns[:2]):
            raise DataFileError(f"{path}: line {number} must be a sentence, a tab and a translation; got {line!r:.80}")
        pairs.append(Pair(*columns[:2]))
    if not pairs:
        raise ValueError(f"{path}: 0 sentence pairs; at least 1 is needed")
    return pairs


def _cleaned(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def split_pairs(pairs: Sequence[Pair], *parts: float) -> list[list[Pair]]:
    """The pairs of each part of the distinct source sentences, and last the pairs of all remaining sentences.

    Each fraction applies to the sentences that the previous parts leave. Pairs with the same source stay together.
    """
    left = sorted({pair.source for pair in pairs})
    random.Random(SPLIT_SEED).shuffle(left)
    chosen = []
    for part in parts:
        count = int(part * len(left))
        chosen.append(set(left[:count]))
        left = left[count:]
    return [[pair for pair in pairs if pair.source in sources] for sources in (*chosen, set(left))]


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Rows of ids, padded on the right to the longest, int64 (B, L)."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


class Encoded(NamedTuple):
    """The ids of a pair, each with END."""

    source: list[int]
    target: list[int]


def pair_batch(pairs: Sequence[Encoded], device: torch.device) -> Batch:
    """Source (B, Ls), BEGIN and target (B, Lt), and the source's mask; the targets are the target and END."""
    source, target = padded([pair.source for pair in pairs], PAD), padded([pair.target for pair in pairs], IGNORED)
    written = torch.cat(
        (torch.full((len(pairs), 1), BEGIN), target[:, :-1].masked_fill(target[:, :-1] == IGNORED, PAD)), 1
    )
    inputs = tuple(to_device(tensor, device) for tensor in (source, written, source != PAD))
    tokens = sum(len(pair.source) + len(pair.target) for pair in pairs)
    return Batch(inputs, to_device(target, device), tokens, source.numel() + target.numel())


class Translate(Recipe):
    """Sentence pairs, their byte pairs, batches, and the model."""

    Config = TranslateConfig
    predicts_tokens = True

    def __init__(self, config: TranslateConfig, tokenizer: PairTokenizer | None = None) -> None:
        self.config = config
        _, held_out, training = split_pairs(read_pairs(config.data), config.test, config.validation)
        if not training:
            raise ValueError(f"{config.data}: no sentence pair is left for training; lower test and validation")
        self.tokenizer = tokenizer or PairTokenizer(
            BytePairs.train([pair.source for pair in training], config.source_vocabulary, lowercase=config.lowercase),
            BytePairs.train([pair.target for pair in training], config.target_vocabulary),
        )
        self.training, self.held_out = ([self._encode(pair) for pair in part] for part in (training, held_out))
        self.training_pairs, self.held_out_pairs = training, held_out
        self.fingerprint = hashlib.sha256(json.dumps([training, held_out]).encode()).hexdigest()
        self.train_length = len(training)

    def _encode(self, pair: Pair) -> Encoded:
        encoded = Encoded(self.tokenizer.source.encode(pair.source), self.tokenizer.target.encode(pair.target))
        if (longest := max(map(len, encoded))) > self.config.max_length:
            raise ValueError(
                f"max_length must be at least {longest} for {pair.source!r:.60}; got {self.config.max_length}"
            )
        return encoded

    @classmethod
    def build(cls, config: TranslateConfig, tokenizer: PairTokenizer) -> nn.Module:
        sizes = {"source_vocab_size": tokenizer.source.vocabulary_size, "vocab_size": tokenizer.target.vocabulary_size}
        return build_preset("translator", config, **sizes, context=config.max_length)

    @classmethod
    def load_tokenizer(cls, description: dict[str, Any], config: TranslateConfig) -> PairTokenizer:
        parts = [description.get(name, {}) for name in ("source", "target")]
        return PairTokenizer(*map(BytePairs.from_description, parts))

    targets_vary = True

    def sampler(self, processes: Processes) -> NumberedSampler:
        """Batches of pairs of similar length."""
        config, lengths = self.config, torch.tensor([len(pair.source) + len(pair.target) for pair in self.training])
        return NumberedSampler(lengths, config.batch_size, config.seed, processes.rank, processes.count)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """The training pairs of these numbers of `NumberedSampler`."""
        return pair_batch([self._drawn(number) for number in indices.tolist()], device)

    def _drawn(self, number: int) -> Encoded:
        """A training pair; with bpe_dropout its tokens are sampled with a seed derived from the number."""
        index, dropout = number % len(self.training), self.config.bpe_dropout
        if not dropout:
            return self.training[index]
        generator, pair = random.Random(self.config.seed * 1_000_003 + number), self.training_pairs[index]
        source = self.tokenizer.source.encode_sampled(pair.source, dropout, generator)
        target = self.tokenizer.target.encode_sampled(pair.target, dropout, generator)
        fits = max(len(source), len(target)) <= self.config.max_length
        return Encoded(source, target) if fits else self.training[index]

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of the validation pairs."""
        share = sorted(self.held_out, key=lambda pair: len(pair.source))[processes.rank :: processes.count]
        for start in range(0, len(share), self.config.batch_size):
            yield pair_batch(share[start : start + self.config.batch_size], device)

    def loss(self, model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return model.loss(*inputs, targets, label_smoothing=self.config.label_smoothing)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """BLEU and chrF on the validation sentences, if there are any."""
        if not self.held_out:
            return ""
        model.eval()
        trained = Trained(model, self.tokenizer, self.config, device, 0, type(self))
        return scores(trained, self.held_out_pairs, "validation")

    @classmethod
    def evaluate(cls, trained: Trained) -> str:
        """BLEU and chrF on the test sentences."""
        test = split_pairs(read_pairs(trained.config.data), trained.config.test)[0]
        if not test:
            raise ValueError(f"translate: test is {trained.config.test}: there is no sentence to evaluate on")
        return scores(trained, test, "test")

    @classmethod
    def translate(cls, trained: Trained, texts: list[str], search: Search = GREEDY) -> list[Translated]:
        """The translations of sentences, in their order; ValueError for an empty or too long one."""
        if isinstance(search, MinimumBayesRisk):
            sampled = [cls.translate(trained, texts, sampling) for sampling in search.samplings()]
            return [
                candidates[search.choose([one.translation for one in candidates])]
                for candidates in zip(*sampled, strict=True)
            ]
        sources = [trained.tokenizer.source.encode(_cleaned(text)) for text in texts]
        longest = trained.config.max_length
        for text, source in zip(texts, sources, strict=True):
            if not text.strip():
                raise ValueError(f"translate: the text must not be empty; got {text!r}")
            if len(source) > longest:
                raise ValueError(
                    f"the model reads at most {longest} tokens; {text!r:.60} has {len(source)}; shorten it"
                )
        targets: dict[int, list[int]] = {}
        order = sorted(range(len(texts)), key=lambda index: len(sources[index]))  # batch similar lengths
        for start in range(0, len(order), trained.config.batch_size):
            part = order[start : start + trained.config.batch_size]
            source = padded([sources[index] for index in part], PAD).to(trained.device)
            options = {"begin": BEGIN, "end": END, "length": min(longest, 2 * source.shape[1] + 10)}
            targets.update(
                zip(part, translate_batch(trained.model, source, source != PAD, search, **options), strict=True)
            )
        return [
            Translated(
                text,
                trained.tokenizer.target.decode(targets[index]),
                sources[index],
                [*targets[index], END],
                trained.tokenizer.source.unseen(text),
            )
            for index, text in enumerate(texts)
        ]

    @classmethod
    @torch.no_grad()
    def alignment(cls, trained: Trained, translated: Translated) -> Alignment:
        """The cross-attention weights of each layer and head for a translation."""
        source, written = (
            torch.tensor([ids], device=trained.device) for ids in (translated.source, [BEGIN, *translated.target[:-1]])
        )
        _, maps = trained.model(source, written, return_attention=True)
        weights = torch.cat(maps.cross).float().cpu()
        tokenizer = trained.tokenizer
        return Alignment(
            weights, tokenizer.target.pieces(translated.target), tokenizer.source.pieces(translated.source)
        )


def scores(trained: Trained, pairs: Sequence[Pair], name: str) -> str:
    """sacrebleu's BLEU and chrF of a translator; a sentence may have several references."""
    sacrebleu: Any = require("sacrebleu")
    config = trained.config
    references: dict[str, list[str]] = {}
    for pair in pairs:
        references.setdefault(pair.source, []).append(pair.target)
    search: Search = GREEDY
    if config.mbr:
        search = MinimumBayesRisk(samples=config.mbr)
    elif config.beam > 1:
        search = BeamSearch(width=config.beam, length_penalty=config.length_penalty)
    translations = [found.translation for found in trained.recipe.translate(trained, list(references), search)]
    most = max(map(len, references.values()))
    columns = [[texts[n] if n < len(texts) else None for texts in references.values()] for n in range(most)]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    lines = [
        f"BLEU {bleu.corpus_score(translations, columns).score:.2f}, "
        f"chrF {chrf.corpus_score(translations, columns).score:.2f} on {len(references)} {name} sentences",
        f"BLEU: {bleu.get_signature()}; chrF: {chrf.get_signature()}",
    ]
    return "\n".join(lines)
