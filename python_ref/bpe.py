"""Byte-pair encoding to read: how a vocabulary is learned from counted words, and how a word is then cut into pieces.

It works on characters and rereads all words for each merge. For real text take `tokenizers` or tiktoken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

END = "</w>"  # closes each word, so that "est" at the end of one is another piece than within one


class Merge(NamedTuple):
    """Two pieces that become one, and how many times they stood side by side then."""

    left: str
    right: str
    times: int

    @property
    def piece(self) -> str:
        return self.left + self.right


def learn_merges(words: Mapping[str, int], count: int, *, end: str = END) -> list[Merge]:
    """Merge the most frequent pair of neighbouring pieces, up to `count` times; among equals the one that occurs first.

    Args:
        words: how often each word occurs.
        end: a piece added to every word; "" for none.
    Returns:
        the merges in the order in which they were made; fewer than `count` where no pair is left.

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
    """Cut a word into pieces by making the merges in the order in which they were learned."""
    parts = _characters(word, end)
    for merge in merges:
        parts = _merged(parts, merge)
    return parts


def _characters(word: str, end: str) -> list[str]:
    return [*word, end] if end else [*word]


def _merged(parts: list[str], merge: Merge) -> list[str]:
    """The pieces with each occurrence of the pair as one, taken from the left."""
    result: list[str] = []
    for part in parts:
        if part == merge.right and result and result[-1] == merge.left:
            result[-1] = merge.piece
        else:
            result.append(part)
    return result
