"""Reviews as token ids: made once, kept in the cache folder, checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.backends.build import cache_folder
from transformer_kernels.training._optional import require
from transformer_kernels.training.files import locked, write_atomically
from transformer_kernels.training.reviews import Reviews
from transformer_kernels.training.tokenizers import ReviewTokenizer

CHUNK = 1000


class TokenisedReviews:
    """The ids of all reviews in one tensor, where each begins, and the labels."""

    def __init__(self, ids: Tensor, offsets: Tensor, labels: Tensor) -> None:
        self.ids, self.offsets, self.labels = ids, offsets, labels

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor) -> TokenisedReviews:
        """The reviews of those numbers alone."""
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), self.offsets.diff()[indices]])
        ids = torch.cat([self.review(index) for index in indices.tolist()])
        return TokenisedReviews(ids, lengths.cumsum(0), self.labels[indices])

    def review(self, index: int) -> Tensor:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def tokenise(reviews: Reviews, tokenizer: ReviewTokenizer, *, progress: bool = False) -> TokenisedReviews:
    """The reviews as ids, from the cache where the same texts met the same tokenizer before."""
    key = _key(reviews.texts, tokenizer)
    path = cache_folder() / "tokens" / f"{key}.safetensors"
    with locked(path):
        tensors = _read(path)
        if tensors is None:
            tensors = _encode(reviews.texts, tokenizer, progress)
            write_atomically(path, _pack(tensors))
    return TokenisedReviews(tensors["ids"], tensors["offsets"], torch.tensor(reviews.labels))


def tokenise_uncached(texts: list[str], tokenizer: ReviewTokenizer) -> TokenisedReviews:
    """A few texts as ids, with label 0, leaving no trace in the cache folder."""
    tensors = _encode(texts, tokenizer, progress=False)
    return TokenisedReviews(tensors["ids"], tensors["offsets"], torch.zeros(len(texts), dtype=torch.int64))


def _key(texts: list[str], tokenizer: ReviewTokenizer) -> str:
    digest = hashlib.sha256(json.dumps(tokenizer.describe(), sort_keys=True).encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _encode(texts: list[str], tokenizer: ReviewTokenizer, progress: bool) -> dict[str, Tensor]:
    ids: list[Tensor] = []
    with require("tqdm").tqdm(total=len(texts), desc="tokenising", unit="review", disable=not progress) as bar:
        for start in range(0, len(texts), CHUNK):
            chunk = tokenizer.encode_many(texts[start : start + CHUNK], threads=os.cpu_count() or 1)
            ids += [torch.tensor(review, dtype=torch.int32) for review in chunk]
            bar.update(len(chunk))
    lengths = torch.tensor([0] + [len(review) for review in ids])
    return {"ids": torch.cat(ids), "offsets": lengths.cumsum(0)}


def _pack(tensors: dict[str, Tensor]) -> bytes:
    return require("safetensors.torch").save(tensors, metadata={"sha256": _digest(tensors)})


def _read(path: Path) -> dict[str, Tensor] | None:
    """The cached tensors; None where there are none, or where they are damaged and must be made again."""
    safetensors = require("safetensors")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("ids", "offsets")}
            expected = (file.metadata() or {}).get("sha256")
    except (OSError, safetensors.SafetensorError):
        return None
    return tensors if _digest(tensors) == expected else None


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
