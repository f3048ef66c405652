"""Word vectors of a model's embedding table, or of a file of GloVe or word2vec; nearest words, analogies."""

from __future__ import annotations

import difflib
import math
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref.skip_gram import SkipGram

BLANK = "␣"  # before a token that begins a word


class WordVectors(NamedTuple):
    """V words, and their vectors scaled to unit length, float32 (V, E)."""

    words: list[str]
    vectors: Tensor

    def index_of(self, word: str) -> int:
        """The index of a word; in a table of subwords, the index of the token with which a word begins, if any.

        Raises:
            ValueError: it is not in the table; similar words are named.
        """
        for spelling in (BLANK + word, word, BLANK + word.lower(), word.lower()):
            if spelling in self.words:
                return self.words.index(spelling)
        similar = difflib.get_close_matches(word, self.words, n=3)
        remedy = f"; similar words: {', '.join(similar)}" if similar else ""
        raise ValueError(f"nearest: {word!r} is not one of the {len(self.words):,} words of the table{remedy}")


class Term(NamedTuple):
    """A word of an expression with its sign, 1 or -1."""

    sign: int
    word: str


def parse_expression(text: str) -> list[Term]:
    """The terms of `king`, or of `king - man + woman`: words and signs alternating, separated by blanks.

    Raises:
        ValueError: a word or a sign is missing.
    """
    parts = text.split()
    signs = ["+", *parts[1::2]]
    if len(parts) % 2 == 0 or set(signs) - {"+", "-"} or {"+", "-"} & set(parts[::2]):
        raise ValueError(f"nearest: expected a word, or an expression such as king - man + woman; got {text!r}")
    return [Term(1 if sign == "+" else -1, word) for sign, word in zip(signs, parts[::2], strict=True)]


def nearest(table: WordVectors, terms: Sequence[Term], count: int, *, keep: bool = False) -> list[tuple[str, float]]:
    """The words whose vectors have the largest cosines with the signed sum of the terms' unit vectors.

    Args:
        table: words and unit vectors.
        terms: of an expression.
        count: number of words, at most.
        keep: whether the result may have words of the expression.
    Returns:
        (word, cosine), best first.
    Raises:
        ValueError: a word is unknown, or the count is below 1.

    Mikolov, Yih and Zweig, "Linguistic regularities in continuous space word representations", 2013, section 4.

    Example:
        >>> table = WordVectors(["a", "b", "c"], torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))
        >>> [word for word, _ in nearest(table, parse_expression("a"), 2)]
        ['b', 'c']
    """
    if count < 1:
        raise ValueError(f"nearest: --top must be at least 1; got {count}")
    indices, direction = _combined(table, terms)
    cosines = table.vectors @ direction  # (V,)
    own = set() if keep else set(indices)
    cosines[list(own)] = -math.inf
    best = cosines.topk(min(count, len(table.words) - len(own)))
    return [(table.words[index], cosine) for cosine, index in zip(*map(Tensor.tolist, best), strict=True)]


def cosine(table: WordVectors, terms: Sequence[Term], word: str) -> float:
    """The cosine of the signed sum of the terms' unit vectors and the vector of a word; ValueError for unknown ones."""
    return float(table.vectors[table.index_of(word)] @ _combined(table, terms)[1])


def _combined(table: WordVectors, terms: Sequence[Term]) -> tuple[list[int], Tensor]:
    """The terms' indices, and the signed sum of their vectors, scaled to unit length, (E,)."""
    indices = [table.index_of(word) for _, word in terms]
    signs = torch.tensor([float(sign) for sign, _ in terms])
    return indices, torch.nn.functional.normalize(signs @ table.vectors[indices], dim=0)


def table_of_model(loaded: Any) -> WordVectors:
    """The embedding table of a `Trained` or `Pretrained` model; a token that begins a word is written with a blank.

    Raises:
        ValueError: the model has no token embedding.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    embedding = getattr(model, "embedding", None)
    table = model.words if isinstance(model, SkipGram) else getattr(embedding, "tokens", None)
    if tokenizer is None or table is None:
        raise ValueError(f"nearest: a {type(model).__name__} has no embedding table of words")
    rows = (table if isinstance(table, Tensor) else table.weight).detach().float().cpu()
    if hasattr(tokenizer, "decode_batch"):  # of the package tokenizers
        size = min(len(rows), tokenizer.get_vocab_size())
        names = tokenizer.decode_batch([[index] for index in range(size)], skip_special_tokens=False)
        begins = [tokenizer.id_to_token(index).startswith(("Ġ", "▁")) for index in range(size)]
    else:
        names = [tokenizer.decode([index]) for index in range(min(len(rows), tokenizer.vocabulary_size))]
        begins = [name.startswith(" ") for name in names]
    kept = [index for index, name in enumerate(names) if name.strip()]
    words = [BLANK * begins[index] + names[index].strip() for index in kept]
    return _table(words, rows[kept])


def read_vectors(path: str | Path) -> WordVectors:
    """Read word vectors: a word and E numbers per line, as GloVe writes them, or word2vec's binary form (*.bin).

    A first line with two integers, as word2vec writes it, is skipped. Of a repeated word the first one counts.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not UTF-8 text or has no vectors, or a line has another number of values than the first,
            or a value is not a finite number; the line is named. A binary file is shorter than it says.
    """
    path, values = Path(path), array("f")
    words: dict[str, None] = {}
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected word vectors as text, such as glove.6B.100d.txt")
    if path.suffix == ".bin":
        return _read_binary(path)
    width = 0
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                fields = line.rstrip().split(" ")
                if number == 1 and len(fields) == 2 and all(field.isdecimal() for field in fields):
                    continue
                width = width or len(fields) - 1
                word, row = " ".join(fields[:-width]), _numbers(fields[-width:])  # some words of GloVe contain blanks
                if not (width and word and row) or _numbers(word.split(" ")[1:]):
                    wanted = f"a word and {width or 'its'} finite numbers"
                    raise ValueError(f"{path}: line {number}: expected {wanted}; got {line[:60]!r}")
                if word not in words:
                    words[word] = None
                    values.extend(row)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not UTF-8 text: {error.reason}; a binary file of word2vec must end in .bin"
            ) from error
    if not words:
        raise ValueError(f"{path}: no word vectors; expected a word and its numbers on each line")
    return _table(list(words), torch.frombuffer(values, dtype=torch.float32).view(-1, width))


def _read_binary(path: Path) -> WordVectors:
    """The form of word2vec's option -binary 1: "V E" in a line, then V times a word, a blank and E float32."""
    with path.open("rb") as file:
        header = file.readline(64)
        sizes = header.split()
        if len(sizes) != 2 or not all(size.isdigit() for size in sizes):
            raise ValueError(f"{path}: expected the numbers of words and values in the first line; got {header!r}")
        count, width = map(int, sizes)
        if not 0 < count * width <= path.stat().st_size // 4:
            raise ValueError(f"{path}: its first line has {count:,} words of {width:,} values; the file does not")
        words: dict[str, None] = {}
        vectors = torch.empty(count, width)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = len(header)
            for number in range(1, count + 1):
                blank = data.find(b" ", at)
                row = data[blank + 1 : blank + 1 + 4 * width]
                if blank < 0 or len(row) < 4 * width:
                    raise ValueError(f"{path}: it ends at word {number:,} of {count:,}")
                word = data[at:blank].decode(errors="replace").lstrip("\n")
                if word not in words:
                    vectors[len(words)] = torch.frombuffer(bytearray(row), dtype=torch.float32)
                    words[word] = None
                at = blank + 1 + 4 * width
    vectors = vectors[: len(words)]
    if not vectors.isfinite().all():
        raise ValueError(f"{path}: a value is not a finite number")
    return _table(list(words), vectors)


def _numbers(fields: list[str]) -> array[float] | None:
    """The fields in float32; None if one of them is not a finite number there."""
    try:
        row = array("f", map(float, fields))
    except ValueError:
        return None
    return row if all(map(math.isfinite, row)) else None


def _table(words: list[str], vectors: Tensor) -> WordVectors:
    return WordVectors(words, torch.nn.functional.normalize(vectors, dim=1))
