"""The tokens of a text with readable names: without byte markers, whitespace made visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import GPT, BERTClassifier
from python_ref.encoder import Encoder
from python_ref.vit import ViT
from transformer_kernels.training._optional import require
from transformer_kernels.training.data.tokenizers import MAX_VOCABULARY, CharacterTokenizer, LearnedTokenizer
from transformer_kernels.training.recipes.vit import read_image

MASKS = ("[MASK]", "<mask>")
UNKNOWN = ("[UNK]", "<unk>")
NO_CHARACTER = "\ufffd"
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's tokens spell as themselves
BYTES = {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)}
BYTES |= {chr(byte): byte for byte in PRINTABLE}
BLANKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "⇤", "": "∅"}


class Reading(NamedTuple):
    """A text as token ids.

    Attributes:
        text: that was read; the mask is spelled as the tokenizer does.
        tokens: (1, L) int64, or an image (1, C, H, W), on the model's device.
        names: L words or subwords, spelled as in the text; words outside the vocabulary are [UNK].
        spans: (start, end) of each in its text; (0, 0) for special tokens such as [CLS].
        sentences: of a pair of texts, 0 or 1 for each token; else empty.
    """

    text: str
    tokens: Tensor
    names: list[str]
    spans: list[tuple[int, int]]
    sentences: Sequence[int] = ()

    @property
    def segments(self) -> Tensor | None:
        """(1, L) int64, what an encoder reads beside the tokens of a pair of texts."""
        return torch.tensor([self.sentences], device=self.tokens.device) if self.sentences else None


def read(loaded: Any, text: str, pair: str = "") -> Reading:
    """The tokens of a text and their names.

    Args:
        loaded: a `Pretrained`, or a `Trained` model of a recipe with one input text: `model`, `tokenizer`, `device`.
        text: encoded with the special tokens of an encoder. Of a trained ViT an image file; its tokens are the patches,
            named "row,column".
        pair: a second text, for a pretrained encoder.
    Raises:
        ValueError: the text has no tokens, or the model does not take one text, or no pair.
    """
    if isinstance(loaded.model, ViT) and hasattr(loaded, "recipe"):
        side = loaded.model.config.image // loaded.model.config.patch
        names = ["[CLS]", *(f"{row},{column}" for row in range(side) for column in range(side))]
        spans = [(0, 0), *((index, index + 1) for index in range(side * side))]
        return Reading(text, read_image(text)[None].to(loaded.device), names, spans)
    if not isinstance(loaded.model, GPT | BERTClassifier | Encoder):
        raise ValueError(f"a {type(loaded.model).__name__} does not take one input text, so it has no such plot")
    special = not isinstance(loaded.model, GPT)
    tokenizer, texts, sentences = loaded.tokenizer, [text, pair] if pair else [text], []
    if pair and not (isinstance(loaded.model, Encoder) and hasattr(tokenizer, "encode_batch")):
        raise ValueError("two texts are read together by a pretrained encoder such as BERT; pass one text")
    if hasattr(tokenizer, "encode_batch"):
        if special and tokenizer.token_to_id(MASKS[0]) is None and tokenizer.token_to_id(MASKS[1]) is not None:
            texts = [text.replace(*MASKS) for text in texts]
        encoding = tokenizer.encode(*texts, add_special_tokens=special)
        ids, names, spans = encoding.ids, _names(encoding, *texts), encoding.offsets
        if pair:
            sentences = [index or 0 for index in encoding.sequence_ids]
            sentences[-1] = 1  # the last separator
    else:
        ids, names, spans = _of_a_recipe(tokenizer, text, special)
    if not any(end > start for start, end in spans):
        raise ValueError(f"the text must have at least one token; got {text!r}")
    return Reading(" | ".join(texts), torch.tensor([ids], device=loaded.device), names, spans, sentences)


class Split(NamedTuple):
    """A text as one tokenizer splits it: its name, the size of its vocabulary, the ids and their names."""

    name: str
    vocabulary: int
    ids: list[int]
    names: list[str]

    def __str__(self) -> str:
        """The count, the names between bars, and the ids."""
        count = f"{len(self.ids)} token{'s' * (len(self.ids) != 1)}"
        ids = " ".join(map(str, self.ids))
        return f"{self.name}, {self.vocabulary:,} in the vocabulary: {count}\n  {'|'.join(self.names)}\n  {ids}"


def split_by(tokenizer: Any, text: str, name: str) -> Split:
    """A text as a tokenizer of this package or of the package `tokenizers` splits it, with its special tokens."""
    if hasattr(tokenizer, "encode_batch"):
        encoding = tokenizer.encode(text)
        return Split(name, tokenizer.get_vocab_size(), encoding.ids, _names(encoding, text))
    if not hasattr(tokenizer, "encode"):
        raise ValueError("tokenize: the model has no tokenizer of one language; pass another --checkpoint")
    ids, names, _ = _pieces(tokenizer, text)
    size = tokenizer.mask if isinstance(tokenizer, LearnedTokenizer) else tokenizer.vocabulary_size
    return Split(name, size, ids, names)


def split_in_every_way(texts: Sequence[str], corpus: str, size: int) -> list[list[Split]]:
    """Each text in characters, words, WordPieces and byte pairs, the last three learned from a corpus.

    Args:
        texts: to be split.
        corpus: from which vocabularies are learned.
        size: of the vocabularies of words, WordPieces and byte pairs, at least 300.
    Raises:
        ValueError: the size is below 300.
        ImportError: the package tokenizers is not installed.

    Schuster, Nakajima, "Japanese and Korean voice search", 2012; Sennrich, Haddow, Birch, "Neural machine translation
    of rare words with subword units", 2016.
    """
    if not 300 <= size <= MAX_VOCABULARY:
        bound = "at least 300" if size < 300 else f"at most {MAX_VOCABULARY:,}"
        raise ValueError(f"tokenize: --vocabulary must be {bound}; got {size}")
    package, lines = require("tokenizers"), corpus.splitlines()
    pieces = package.BertWordPieceTokenizer()
    pieces.train_from_iterator(lines, vocab_size=size, show_progress=False)
    inner = package.Tokenizer.from_str(pieces.to_str())
    inner.post_processor = package.processors.TemplateProcessing(single="$A", special_tokens=[])  # without [CLS], [SEP]
    learned = {
        "words": LearnedTokenizer.learn_words(lines, size),
        "WordPieces": inner,
        "byte pairs": LearnedTokenizer.learn(lines, size),
    }
    return [
        [
            split_by(tokenizer, text, name)
            for name, tokenizer in {"characters": CharacterTokenizer(corpus + text), **learned}.items()
        ]
        for text in texts
    ]


def readable(piece: str) -> str:
    """The token without surrounding whitespace; pure whitespace becomes visible symbols."""
    return piece.strip() or "".join(BLANKS.get(character, character) for character in piece) or BLANKS[""]


def _names(encoding: Any, *texts: str) -> list[str]:
    """The names of tokens by the package `tokenizers`: by their offsets "fox" for "Ġfox", but "##s" for a WordPiece,
    and the bytes of tokens that share one character."""
    keys = list(zip(encoding.sequence_ids, encoding.offsets, strict=True))
    count = Counter(keys)
    names = []
    for token, (sequence, (start, end)) in zip(encoding.tokens, keys, strict=True):
        if end == start or token in UNKNOWN:
            names.append(token)
        elif end - start == 1 and count[sequence, (start, end)] > 1:
            names.append(hexadecimal(BYTES[character] for character in token) if set(token) <= BYTES.keys() else token)
        else:
            names.append("##" * token.startswith("##") + readable(texts[sequence or 0][start:end]))
    return names


def hexadecimal(values: Iterable[int]) -> str:
    """Bytes as in the vocabulary of Llama: <0xC3>."""
    return "".join(f"<0x{value:02X}>" for value in values)


def _of_a_recipe(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Ids, names and spans by one of this package's tokenizers; an encoder's text may contain [MASK]."""
    ids: list[int] = []
    names: list[str] = []
    spans: list[tuple[int, int]] = []
    start = 0
    for number, part in enumerate(text.split(MASKS[0]) if special else [text]):
        if number:
            ids, names, spans = [*ids, tokenizer.mask], [*names, MASKS[0]], [*spans, (start, start + len(MASKS[0]))]
            start += len(MASKS[0])
        more, pieces, ends = _pieces(tokenizer, part)
        ids, names = ids + more, names + pieces
        spans += [(start + first, start + last) for first, last in ends]
        start += len(part)
    if special:
        return [tokenizer.cls, *ids, tokenizer.sep], ["[CLS]", *names, "[SEP]"], [(0, 0), *spans, (0, 0)]
    return ids, names, spans


def _pieces(tokenizer: Any, text: str) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Ids, names and spans of a text without special tokens: by offsets, or decoded one by one."""
    if hasattr(tokenizer, "encoding"):
        encoding = tokenizer.encoding(text)
        return encoding.ids, _names(encoding, text), encoding.offsets
    ids = tokenizer.encode(text)
    pieces = [tokenizer.decode([index]) for index in ids]
    if not hasattr(tokenizer, "bytes_of"):
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
        return ids, [readable(piece) for piece in pieces], list(zip([0, *ends], ends, strict=False))
    raw = [tokenizer.bytes_of(index) for index in ids]
    names = [
        hexadecimal(data) if NO_CHARACTER in piece else readable(piece) for piece, data in zip(pieces, raw, strict=True)
    ]
    encoded, spans, at = text.encode(), [], 0
    for data in raw:  # from the characters that are complete to those that have begun
        start, at = len(encoded[:at].decode(errors="ignore")), at + len(data)
        spans.append((start, sum(byte & 0xC0 != 0x80 for byte in encoded[:at])))
    return ids, names, spans
