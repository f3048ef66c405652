"""Text corpora of the GPT recipes, and batches of text windows."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.backends.build import cache_folder
from transformer_kernels.training.data.files import DataFileError, check_hash, fetch
from transformer_kernels.training.step import to_device

TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINYSHAKESPEARE_BYTES = 1115394
STDLIB_CHARACTERS = 4_000_000


def read_corpus(name: str, data_dir: str = "") -> str:
    """The text of a named corpus, or of the text file at this path."""
    if name == "stdlib":
        return _stdlib_text()
    if name == "tinyshakespeare":
        return _tinyshakespeare_text(data_dir)
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"corpus must be stdlib, tinyshakespeare or a text file; {name!r} is a folder")
    if not path.is_file():
        raise ValueError(f"corpus must be stdlib, tinyshakespeare or a text file; there is no file {name!r}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def found_corpus(data_dir: str = "") -> tuple[str, str]:
    """The corpus that "auto" selects, and its folder; nothing is downloaded.

    Tiny Shakespeare in `data_dir`, in the folder TRANSFORMER_KERNELS_DATA or in the cache, else the standard library.
    """
    for folder in filter(None, (data_dir, os.environ.get("TRANSFORMER_KERNELS_DATA"), str(cache_folder()))):
        if folder == data_dir or any(path.is_file() for path in _candidates(folder)):
            return "tinyshakespeare", folder
    print(
        "Tiny Shakespeare is not on this machine, so the model learns the standard library's sources. To get it, pass "
        f"--corpus tinyshakespeare (1.1 MB from {TINYSHAKESPEARE_URL}) or the folder of its input.txt as --data-dir.",
        file=sys.stderr,
    )
    return "stdlib", ""


def _candidates(folder: str) -> list[Path]:
    return [Path(folder, "input.txt"), Path(folder, "tinyshakespeare", "input.txt")]


def _stdlib_text(limit: int = STDLIB_CHARACTERS) -> str:
    """The standard library's top-level modules, sorted by name, in printable ASCII, up to `limit` characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    keep = {chr(code) for code in range(ord(" "), ord("~") + 1)} | {"\n"}
    parts: list[str] = []
    length = 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        parts.append("".join(character for character in text if character in keep))
        length += len(parts[-1])
        if length >= limit:
            break
    return "".join(parts)[:limit]


def _tinyshakespeare_text(data_dir: str) -> str:
    remedy = "get the file elsewhere and give its folder as --data-dir"
    shared = os.environ.get("TRANSFORMER_KERNELS_DATA", "")
    if not data_dir and shared and any(path.is_file() for path in _candidates(shared)):
        data_dir = shared
    if not data_dir:
        path = cache_folder() / "tinyshakespeare" / "input.txt"
        data = fetch(TINYSHAKESPEARE_URL, path, TINYSHAKESPEARE_SHA256, max_bytes=TINYSHAKESPEARE_BYTES, remedy=remedy)
        return data.decode()
    candidates = _candidates(data_dir)
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise DataFileError(f"no tinyshakespeare in {data_dir}: looked for {candidates[0]} and {candidates[1]}")
    data = found.read_bytes()
    check_hash(found, data, TINYSHAKESPEARE_SHA256, f"fetch it again from {TINYSHAKESPEARE_URL}")
    return data.decode()


class Windows:
    """All windows of `context` tokens with their next-token targets, as views of one tensor."""

    def __init__(self, tokens: Tensor, context: int, name: str, unit: str = "characters") -> None:
        if len(tokens) <= context:
            raise ValueError(f"{name} has {len(tokens)} {unit}; a context of {context} needs at least {context + 1}")
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def batch(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (len(starts), context), on the device of the tokens."""
        starts = to_device(starts, self.tokens.device)
        offsets = torch.arange(self.context + 1, device=self.tokens.device)
        window = self.tokens[starts[:, None] + offsets].long()  # (batch, context + 1)
        return window[:, :-1], window[:, 1:]

    def spread(self, count: int) -> Tensor:
        """Starts of at most `count` non-overlapping windows, evenly spaced over the text."""
        starts = torch.arange(0, len(self), self.context)
        if len(starts) > count:
            starts = starts[torch.linspace(0, len(starts) - 1, count, dtype=torch.float64).long()]
        return starts
