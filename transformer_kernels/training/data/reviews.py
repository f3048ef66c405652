"""Labelled reviews: the supported file formats, and cached token ids."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends.build import cache_folder
from transformer_kernels.pretrained.folder import check_regular, read_text
from transformer_kernels.training._optional import require
from transformer_kernels.training.data.files import is_unicode, locked, write_atomically
from transformer_kernels.training.data.tokenizers import ReviewTokenizer

FORMATS = (".csv", ".jsonl", ".parquet")
OPENERS = {".gz": gzip.decompress, ".xz": lzma.decompress}
SOURCE = "https://ai.stanford.edu/~amaas/data/sentiment/"
CHUNK = 1000  # reviews per tokenizer call
LABELS = {"0": 0, "1": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}


class Reviews(NamedTuple):
    """Texts with their labels, 0 negative and 1 positive."""

    texts: list[str]
    labels: list[int]


def find_reviews(data: str, part: str) -> Path:
    """The folder or file of `part` ("train" or "test") in the folder `data`."""
    folder = Path(data)
    if not data or not folder.exists():
        kinds = f"the aclImdb folder (from {SOURCE}) or a CSV, JSONL or Parquet file"
        raise ValueError(f"no reviews at {data!r}: pass {kinds} as --data" if data else f"--data must be {kinds}")
    if (folder / part / "pos").is_dir():
        return folder / part
    endings = [ending + packed for ending in FORMATS for packed in ("", *OPENERS)]
    for path in (folder / f"{part}{ending}" for ending in endings):
        if path.is_file():
            return path
    raise ValueError(f"{folder}: neither {part}/pos and {part}/neg nor a file {part} with {', '.join(FORMATS)}")


def read_reviews(path: str | Path) -> Reviews:
    """The reviews in a folder with pos and neg, or in a CSV, JSONL or Parquet file, optionally compressed.

    Files need a column `text` or `review`, and a column `label` or `sentiment` (0, 1, neg, pos, negative or positive).
    """
    path = Path(path)
    rows = _folder_rows(path) if path.is_dir() else _file_rows(path)
    texts, labels = [], []
    for number, (text, label) in enumerate(rows, start=1):
        key = str(label).strip().lower()
        if not isinstance(text, str) or not is_unicode(text) or key not in LABELS:
            raise ValueError(f"{path}, row {number}: expected a text and a label of {', '.join(LABELS)}; got {label!r}")
        texts.append(text.replace("<br />", "\n"))
        labels.append(LABELS[key])
    if not texts:
        raise ValueError(f"{path}: contains no reviews; at least one is needed")
    return Reviews(texts, labels)


def _folder_rows(folder: Path) -> Iterator[tuple[str, str]]:
    for label in ("neg", "pos"):
        for path in sorted((folder / label).glob("*.txt")):
            yield read_text(path), label


def _file_rows(path: Path) -> Iterator[tuple[object, object]]:
    packed = path.suffix if path.suffix in OPENERS else ""
    ending = Path(path.stem).suffix if packed else path.suffix
    if ending not in FORMATS:
        raise ValueError(f"{path}: a data file must end in {', '.join(FORMATS)}, optionally followed by .gz or .xz")
    check_regular(path)
    data = path.read_bytes()
    try:
        data = OPENERS[packed](data) if packed else data
        if ending == ".parquet":
            rows = require("pyarrow.parquet").read_table(io.BytesIO(data)).to_pylist()
        else:
            lines = io.StringIO(data.decode("utf-8-sig"), newline="")
            rows = _csv_rows(lines) if ending == ".csv" else _json_rows(path, lines)
        yield from _columns(path, rows)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of gzip, lzma, zlib, csv and pyarrow, which have no common base
        where = "" if str(error).startswith(str(path)) else f"{path}: corrupt or incomplete {packed or ending} file: "
        raise ValueError(where + str(error).partition("\n")[0]) from error


def _csv_rows(lines: Iterable[str]) -> Iterator[dict]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    return csv.DictReader(lines)


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object; got a {type(row).__name__}")
        yield row


def _columns(path: Path, rows: Iterable[dict]) -> Iterator[tuple[object, object]]:
    for row in rows:
        text = next((row[name] for name in ("text", "review") if name in row), None)
        label = next((row[name] for name in ("label", "sentiment") if name in row), None)
        if text is None or label is None:
            raise ValueError(f"{path}: expected columns text and label (or review and sentiment); got {list(row)}")
        yield text, label


class TokenisedReviews:
    """The ids of all reviews in one tensor, the offset of each review, and the labels."""

    def __init__(self, ids: Tensor, offsets: Tensor, labels: Tensor) -> None:
        self.ids, self.offsets, self.labels = ids, offsets, labels

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor) -> TokenisedReviews:
        """The reviews at these indices."""
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), self.offsets.diff()[indices]])
        ids = torch.cat(self.chosen(indices))
        return TokenisedReviews(ids, lengths.cumsum(0), self.labels[indices])

    def review(self, index: int) -> Tensor:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def chosen(self, indices: Tensor) -> list[Tensor]:
        """The ids of the reviews at these indices."""
        return list(map(self.review, indices.tolist()))


def tokenise(reviews: Reviews, tokenizer: ReviewTokenizer, *, progress: bool = False) -> TokenisedReviews:
    """The reviews as ids, read from the cache if this tokenizer already processed these texts."""
    key = _key(reviews.texts, tokenizer)
    path = cache_folder() / "tokens" / f"{key}.safetensors"
    with locked(path):
        tensors = _read(path)
        if tensors is None:
            tensors = _encode(reviews.texts, tokenizer, progress)
            pack = require("safetensors.torch").save
            write_atomically(path, pack(tensors, metadata={"sha256": _digest(tensors)}))
    return TokenisedReviews(tensors["ids"], tensors["offsets"], torch.tensor(reviews.labels))


def tokenise_uncached(texts: list[str], tokenizer: ReviewTokenizer) -> TokenisedReviews:
    """Texts as ids, with label 0, without using the cache."""
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
    options = {"desc": "tokenising", "unit": "review", "disable": not progress or None}  # None: only on a terminal
    with require("tqdm").tqdm(total=len(texts), **options) as bar:
        for start in range(0, len(texts), CHUNK):
            chunk = tokenizer.encode_many(texts[start : start + CHUNK], threads=os.cpu_count() or 1)
            ids += [torch.tensor(review, dtype=torch.int32) for review in chunk]
            bar.update(len(chunk))
    lengths = torch.tensor([0] + [len(review) for review in ids])
    return {"ids": torch.cat(ids), "offsets": lengths.cumsum(0)}


def _read(path: Path) -> dict[str, Tensor] | None:
    """The cached tensors; None if they are missing or corrupt."""
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
