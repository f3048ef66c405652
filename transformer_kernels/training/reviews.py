"""Labelled reviews from the file formats they come in."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from transformer_kernels.training._optional import require

FORMATS = (".csv", ".jsonl", ".parquet")
OPENERS = {".gz": gzip.decompress, ".xz": lzma.decompress}
SOURCE = "https://ai.stanford.edu/~amaas/data/sentiment/"
LABELS = {"0": 0, "1": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}


class Reviews(NamedTuple):
    """Texts with their labels, 0 negative and 1 positive."""

    texts: list[str]
    labels: list[int]


def find_reviews(data: str, part: str) -> Path:
    """The folder or file of `part` ("train" or "test") in the folder `data`."""
    folder = Path(data)
    if not data or not folder.exists():
        raise ValueError(
            f"data must be the aclImdb folder (from {SOURCE}) or a CSV, JSONL or Parquet file; got {data!r}"
        )
    if (folder / part / "pos").is_dir():
        return folder / part
    endings = [ending + packed for ending in FORMATS for packed in ("", *OPENERS)]
    for path in (folder / f"{part}{ending}" for ending in endings):
        if path.is_file():
            return path
    raise ValueError(f"{folder}: neither {part}/pos and {part}/neg nor a file {part} with {', '.join(FORMATS)}")


def read_reviews(path: str | Path) -> Reviews:
    """The reviews of a folder with pos and neg, or of a CSV, JSONL or Parquet file, packed or not.

    Files need a text (`text` or `review`) and a label (`label` or `sentiment`: 0, 1, neg, pos, negative or positive).
    """
    path = Path(path)
    rows = _folder_rows(path) if path.is_dir() else _file_rows(path)
    texts, labels = [], []
    for number, (text, label) in enumerate(rows, start=1):
        key = str(label).strip().lower()
        if not isinstance(text, str) or key not in LABELS:
            raise ValueError(f"{path}, row {number}: expected a text and a label of {', '.join(LABELS)}; got {label!r}")
        texts.append(text.replace("<br />", "\n"))
        labels.append(LABELS[key])
    if not texts:
        raise ValueError(f"{path}: no reviews in it; at least one is needed")
    return Reviews(texts, labels)


def _folder_rows(folder: Path) -> Iterator[tuple[str, str]]:
    for label in ("neg", "pos"):
        for path in sorted((folder / label).glob("*.txt")):
            yield path.read_text(encoding="utf-8"), label


def _file_rows(path: Path) -> Iterator[tuple[object, object]]:
    packed = path.suffix if path.suffix in OPENERS else ""
    ending = Path(path.stem).suffix if packed else path.suffix
    if ending not in FORMATS:
        raise ValueError(f"{path}: a data file ends in {', '.join(FORMATS)}, with .gz or .xz or without")
    data = path.read_bytes()
    if packed:
        try:
            data = OPENERS[packed](data)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"{path}: damaged or incomplete {packed} file: {error}") from error
    if ending == ".parquet":
        rows = require("pyarrow.parquet", "parquet").read_table(io.BytesIO(data)).to_pylist()
    else:
        lines = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = _csv_rows(lines) if ending == ".csv" else _json_rows(path, lines)
    return _columns(path, rows)


def _csv_rows(lines: Iterable[str]) -> Iterator[dict]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    return csv.DictReader(lines)


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
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
