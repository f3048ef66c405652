"""Tokenizers: characters, words, GPT-2 byte pairs, byte pairs or words learned from the training text, plain bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformer_kernels.backends.build import cache_folder
from transformer_kernels.training._optional import require
from transformer_kernels.training.data.files import DataFileError, check_hash, fetch

VOCAB_BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
VOCAB_BPE_BYTES = 456318
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_END_OF_TEXT = 50256
NO_UTF8_BYTE = 0xFF
WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")  # letters, with apostrophes inside
UNKNOWN = "[UNK]"
MAX_VOCABULARY = 1 << 20  # for which the package tokenizers reserves memory before it has read a text
WORD_OR_PUNCTUATION = r"[\p{L}\p{N}]+(?:['\u2019]\p{L}+)*|[!?]+|\.{2,}|[^\s\p{L}\p{N}]"


class Tokenizer(Protocol):
    """The tokenizer interface of recipes; a checkpoint stores the result of `describe`."""

    vocabulary_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def describe(self) -> dict[str, Any]: ...


class CharacterTokenizer:
    """One id per character of the training text, in code point order."""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary_size = len(self.characters)
        self._ids = {character: index for index, character in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            unknown = sorted(set(text) - set(self._ids))
            raise ValueError(
                f"characters outside the model's vocabulary: {unknown}; known: {self.characters!r}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[index] for index in ids)

    def describe(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


class WordTokenizer:
    """One id per lower-case word, most frequent first; other words of a text are left out."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocabulary_size = len(self.words)
        self._ids = {word: index for index, word in enumerate(self.words)}

    @classmethod
    def learn(cls, text: str, minimum: int) -> WordTokenizer:
        """The words that occur at least `minimum` times in the text."""
        counts = Counter(WORD.findall(text.lower()))
        return cls(sorted((word for word in counts if counts[word] >= minimum), key=lambda word: (-counts[word], word)))

    def encode(self, text: str) -> list[int]:
        return [self._ids[word] for word in WORD.findall(text.lower()) if word in self._ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[index] for index in ids)

    def describe(self) -> dict[str, Any]:
        return {"kind": "words", "words": self.words}


class ReviewTokenizer:
    """A tokenizer of whole texts with three special ids at the end of the vocabulary: PAD, CLS and SEP.

    `mask` is an id that occurs in no text, for masked language modelling.
    """

    pad: int
    cls: int
    sep: int
    mask: int
    vocabulary_size: int

    def _add_special_ids(self, first: int, mask: int) -> None:
        self.pad, self.cls, self.sep, self.mask = first, first + 1, first + 2, mask
        self.vocabulary_size = first + 3

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        """The ids of each text, without PAD, CLS and SEP."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The description that a checkpoint stores; also the key of the token cache."""
        raise NotImplementedError


class Gpt2Tokenizer(ReviewTokenizer):
    """GPT-2's byte pairs from tiktoken, with PAD, CLS, SEP = 50257, 50258, 50259."""

    def __init__(self, vocab_dir: str = "") -> None:
        tiktoken = require("tiktoken")
        self._encoding = tiktoken.Encoding(
            name="gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=_byte_pair_ranks(_vocab_bpe(vocab_dir)),
            special_tokens={"<|endoftext|>": GPT2_END_OF_TEXT},
        )
        self._add_special_ids(GPT2_END_OF_TEXT + 1, GPT2_END_OF_TEXT)

    def encode_many(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(texts, num_threads=threads)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([index for index in ids if index <= GPT2_END_OF_TEXT])

    def bytes_of(self, index: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        return self._encoding.decode_single_token_bytes(index)

    def describe(self) -> dict[str, Any]:
        return {"kind": "gpt2", "sha256": VOCAB_BPE_SHA256}


class ByteTokenizer(ReviewTokenizer):
    """The UTF-8 bytes of a text, with PAD, CLS, SEP = 256, 257, 258."""

    def __init__(self) -> None:
        self._add_special_ids(256, NO_UTF8_BYTE)

    def encode_many(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index < 256).decode(errors="replace")

    def bytes_of(self, index: int) -> bytes:
        """The byte of one token."""
        return bytes([index])

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class PackagedTokenizer(ReviewTokenizer):
    """A tokenizer of the package `tokenizers`, by its description in JSON."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._tokenizer = require("tokenizers").Tokenizer.from_str(description)

    def encode_many(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encoding(self, text: str) -> Any:
        """The tokens of one text with their offsets, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


class LearnedTokenizer(PackagedTokenizer):
    """Byte pairs or words learned from the training texts by the package tokenizers, then MASK, PAD, CLS and SEP."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        pairs = self._tokenizer.get_vocab_size()
        self._add_special_ids(pairs + 1, mask=pairs)

    @classmethod
    def learn(cls, texts: Sequence[str], size: int) -> LearnedTokenizer:
        """At most `size` byte pairs learned from these texts, including the 256 bytes."""
        if size < 256:
            raise ValueError(f"vocabulary must hold the 256 bytes; got {size}")
        tokenizer = require("tokenizers").ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(texts, vocab_size=size, min_frequency=2, show_progress=False)
        return cls(tokenizer.to_str())

    @classmethod
    def learn_words(cls, texts: Sequence[str], size: int) -> LearnedTokenizer:
        """UNKNOWN and the most frequent lower-case words and punctuation marks that occur twice, at most `size` ids."""
        if size < 2:
            raise ValueError(f"vocabulary must hold {UNKNOWN} and a word; got {size}")
        package = require("tokenizers")
        tokenizer = package.Tokenizer(package.models.WordLevel(unk_token=UNKNOWN))
        tokenizer.normalizer = package.normalizers.Lowercase()
        pattern = package.Regex(WORD_OR_PUNCTUATION)
        tokenizer.pre_tokenizer = package.pre_tokenizers.Split(pattern, "removed", invert=True)
        options = {"vocab_size": size, "min_frequency": 2, "special_tokens": [UNKNOWN], "show_progress": False}
        tokenizer.train_from_iterator(texts, package.trainers.WordLevelTrainer(**options))
        return cls(tokenizer.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([index for index in ids if index < self.mask])

    def describe(self) -> dict[str, Any]:
        return {"kind": "learned", "tokenizer": self._description}


class PretrainedTokenizer(PackagedTokenizer):
    """The tokenizer of a pretrained encoder, by the package tokenizers, with its own special tokens.

    Args:
        description: its JSON.
        size: rows of the model's token embedding; at least the number of tokens.
    Raises:
        ValueError: it has the special tokens of neither BERT nor RoBERTa.
    """

    def __init__(self, description: str, size: int) -> None:
        super().__init__(description)
        self.vocabulary_size = size
        for names in (("[PAD]", "[CLS]", "[SEP]", "[MASK]"), ("<pad>", "<s>", "</s>", "<mask>")):
            ids = [self._tokenizer.token_to_id(name) for name in names]
            if None not in ids:
                self.pad, self.cls, self.sep, self.mask = ids
                return
        raise ValueError("the tokenizer has neither [PAD], [CLS], [SEP] and [MASK] nor <pad>, <s>, </s> and <mask>")

    def describe(self) -> dict[str, Any]:
        return {"kind": "pretrained", "tokenizer": self._description, "size": self.vocabulary_size}


REVIEW_TOKENIZERS: dict[str, Callable[[str], ReviewTokenizer]] = {
    "gpt2": Gpt2Tokenizer,
    "bytes": lambda vocab_dir: ByteTokenizer(),
}


def from_description(description: dict[str, Any], vocab_dir: str = "") -> Any:
    """The tokenizer with this description; ValueError for an invalid one."""
    kind = str(description.get("kind"))
    if kind == "characters" and isinstance(description.get("characters"), str):
        return CharacterTokenizer(description["characters"])
    if kind == "words" and isinstance(description.get("words"), list):
        return WordTokenizer([str(word) for word in description["words"]])
    if kind in ("learned", "pretrained") and isinstance(description.get("tokenizer"), str):
        try:
            if kind == "learned":
                return LearnedTokenizer(description["tokenizer"])
            return PretrainedTokenizer(description["tokenizer"], int(description["size"]))
        except ImportError:
            raise
        except Exception as error:  # the package raises bare Exceptions
            raise ValueError(f"the tokenizer cannot be loaded: {error}") from error
    if kind in REVIEW_TOKENIZERS:
        return REVIEW_TOKENIZERS[kind](vocab_dir)
    raise ValueError(f"unknown tokenizer {description!r:.200}")


def _vocab_bpe(vocab_dir: str) -> str:
    remedy = "download GPT-2's vocab.bpe elsewhere and pass its folder as --vocab-dir, or use --tokenizer bytes"
    if not vocab_dir:
        path = cache_folder() / "gpt2_bpe" / "vocab.bpe"
        return fetch(VOCAB_BPE_URL, path, VOCAB_BPE_SHA256, max_bytes=VOCAB_BPE_BYTES, remedy=remedy).decode()
    path = Path(vocab_dir) / "vocab.bpe"
    if not path.is_file():
        raise DataFileError(f"no vocab.bpe in {vocab_dir}: download it from {VOCAB_BPE_URL}")
    data = path.read_bytes()
    check_hash(path, data, VOCAB_BPE_SHA256, f"download it again from {VOCAB_BPE_URL}")
    return data.decode()


def _byte_pair_ranks(vocab_bpe: str) -> dict[bytes, int]:
    """The rank of each byte string: single bytes first, then the merges in file order.

    The file writes printable bytes as themselves and other bytes as characters from U+0100 on.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(printable + others)}
    for merge in vocab_bpe.split("\n")[1:-1]:
        ranks[bytes(byte_of[character] for character in merge.replace(" ", ""))] = len(ranks)
    return ranks
