"""A text as tokens, each under the name that a person reads: no byte markers, and blanks that can be seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import GPT, BERTClassifier
from python_ref.encoder import Encoder

BLANKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "⇤", "": "∅"}


class Reading(NamedTuple):
    """A text as its model reads it.

    Attributes:
        tokens: (1, L) int64, on the model's device.
        names: L words or pieces of words, as they stand in the text.
        spans: where each of them stands in the text, (start, end); (0, 0) for [CLS] and its like.
    """

    tokens: Tensor
    names: list[str]
    spans: list[tuple[int, int]]


def read(loaded: Any, text: str) -> Reading:
    """Tokens and their names.

    Args:
        loaded: a `Pretrained`, or a `Trained` model of a recipe that reads one text: `model`, `tokenizer`, `device`.
        text: is read with the special tokens of an encoder.
    Raises:
        ValueError: the text has no tokens, or the model reads something else than a text.
    """
    if not isinstance(loaded.model, GPT | BERTClassifier | Encoder):
        raise ValueError(f"a {type(loaded.model).__name__} does not read one text, so there is nothing to look at")
    named = _by_offsets if hasattr(loaded.tokenizer, "encode_batch") else _one_by_one
    ids, names, spans = named(loaded.tokenizer, text, special=not isinstance(loaded.model, GPT))
    if not any(end > start for start, end in spans):
        raise ValueError(f"the text must have at least one token; got {text!r}")
    return Reading(torch.tensor([ids], device=loaded.device), names, spans)


def readable(piece: str) -> str:
    """The piece without the blanks around it; blanks alone become signs."""
    return piece.strip() or "".join(BLANKS.get(character, character) for character in piece) or BLANKS[""]


def _by_offsets(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """By the package `tokenizers`, which says where each token stands: so "Ġfox" and "##s" read "fox" and "s"."""
    encoding = tokenizer.encode(text, add_special_tokens=special)
    pairs = zip(encoding.tokens, encoding.offsets, strict=True)
    names = [readable(text[start:end]) if end > start else token for token, (start, end) in pairs]
    return encoding.ids, names, encoding.offsets


def _one_by_one(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """By a tokenizer of our own: what each token alone decodes to."""
    ids = tokenizer.encode(text)
    pieces = [tokenizer.decode([index]) for index in ids]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    names, spans = [readable(piece) for piece in pieces], list(zip([0, *ends], ends, strict=False))
    if special:
        ids, names = [tokenizer.cls, *ids, tokenizer.sep], ["[CLS]", *names, "[SEP]"]
        spans = [(0, 0), *spans, (0, 0)]
    return ids, names, spans
