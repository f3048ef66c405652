"""The tokens of a text with readable names: without byte markers, whitespace made visible."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import GPT, BERTClassifier
from python_ref.encoder import Encoder

BLANKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "⇤", "": "∅"}


class Reading(NamedTuple):
    """A text as token ids.

    Attributes:
        tokens: (1, L) int64, on the model's device.
        names: L words or subwords, spelled as in the text.
        spans: (start, end) of each in the text; (0, 0) for special tokens such as [CLS].
    """

    tokens: Tensor
    names: list[str]
    spans: list[tuple[int, int]]


def read(loaded: Any, text: str) -> Reading:
    """The tokens of a text and their names.

    Args:
        loaded: a `Pretrained`, or a `Trained` model of a recipe with one input text: `model`, `tokenizer`, `device`.
        text: encoded with the special tokens of an encoder.
    Raises:
        ValueError: the text has no tokens, or the model does not take one text.
    """
    if not isinstance(loaded.model, GPT | BERTClassifier | Encoder):
        raise ValueError(f"a {type(loaded.model).__name__} does not take one input text, so it has no such plot")
    named = _by_offsets if hasattr(loaded.tokenizer, "encode_batch") else _one_by_one
    ids, names, spans = named(loaded.tokenizer, text, special=not isinstance(loaded.model, GPT))
    if not any(end > start for start, end in spans):
        raise ValueError(f"the text must have at least one token; got {text!r}")
    return Reading(torch.tensor([ids], device=loaded.device), names, spans)


def readable(piece: str) -> str:
    """The token without surrounding whitespace; pure whitespace becomes visible symbols."""
    return piece.strip() or "".join(BLANKS.get(character, character) for character in piece) or BLANKS[""]


def _by_offsets(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Tokens by the package `tokenizers`, whose offsets give "fox" and "s" for "Ġfox" and "##s"."""
    encoding = tokenizer.encode(text, add_special_tokens=special)
    pairs = zip(encoding.tokens, encoding.offsets, strict=True)
    names = [readable(text[start:end]) if end > start else token for token, (start, end) in pairs]
    return encoding.ids, names, encoding.offsets


def _one_by_one(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Tokens by one of this package's tokenizers, decoded one by one."""
    ids = tokenizer.encode(text)
    pieces = [tokenizer.decode([index]) for index in ids]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    names, spans = [readable(piece) for piece in pieces], list(zip([0, *ends], ends, strict=False))
    if special:
        ids, names = [tokenizer.cls, *ids, tokenizer.sep], ["[CLS]", *names, "[SEP]"]
        spans = [(0, 0), *spans, (0, 0)]
    return ids, names, spans
