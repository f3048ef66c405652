"""A readable byte-pair encoding: learning the vocabulary from word counts, and splitting words.

It works on characters and rereads all words for each merge. For real text use `tokenizers` or tiktoken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

END = "</w>"  # ends each word, so that "est" at the end of a word differs from "est" within one


class Merge(NamedTuple):
    """A merge of two adjacent pieces, and their number of adjacent occurrences when it was learned."""

    left: str
    right: str
    times: int

    @property
    def piece(self) -> str:
        return self.left + self.right


def learn_merges(words: Mapping[str, int], count: int, *, end: str = END) -> list[Merge]:
    """Merge the most frequent pair of adjacent pieces, up to `count` times; ties go to the pair that occurs first.

    Args:
        words: the count of each word.
        end: a piece appended to every word; "" for none.
    Returns:
        the merges in order; fewer than `count` if no pair is left.

    Sennrich, Haddow, Birch, "Neural machine translation of rare words with subword units", 2016, section 3.2.
    """
    pieces = {word: _characters(word, end) for word in words}
    merges: list[Merge] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=pairs.__getitem__)
        merges.append(Merge(*best, pairs[best]))
        pieces = {word: _merged(parts, merges[-1]) for word, parts in pieces.items()}
    return merges


def split_word(word: str, merges: Sequence[Merge], *, end: str = END) -> list[str]:
    """Split a word into pieces by applying the merges in the order in which they were learned."""
    parts = _characters(word, end)
    for merge in merges:
        parts = _merged(parts, merge)
    return parts


def _characters(word: str, end: str) -> list[str]:
    return [*word, end] if end else [*word]


def _merged(parts: list[str], merge: Merge) -> list[str]:
    """The pieces with each occurrence of the pair merged, from left to right."""
    result: list[str] = []
    for part in parts:
        if part == merge.right and result and result[-1] == merge.left:
            result[-1] = merge.piece
        else:
            result.append(part)
    return result
