"""Text corpora of the GPT recipes, and batches of text windows."""

from __future__ import annotations

import bz2
import importlib.resources
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.pretrained.folder import read_text
from transformer_kernels.training.data.files import DataFileError, check_hash
from transformer_kernels.training.step import to_device

TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
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
    return read_text(path)


def _stdlib_text() -> str:
    """The standard library's top-level modules, sorted by name, in printable ASCII, up to STDLIB_CHARACTERS."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    keep = {chr(code) for code in range(ord(" "), ord("~") + 1)} | {"\n"}
    parts: list[str] = []
    length = 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        parts.append("".join(character for character in text if character in keep))
        length += len(parts[-1])
        if length >= STDLIB_CHARACTERS:
            break
    return "".join(parts)[:STDLIB_CHARACTERS]


def _tinyshakespeare_text(data_dir: str) -> str:
    """The bundled text, or the input.txt in `data_dir`, which must be identical."""
    if not data_dir:
        packed = importlib.resources.files("transformer_kernels") / "texts" / "tinyshakespeare.txt.bz2"
        return bz2.decompress(packed.read_bytes()).decode()
    candidates = [Path(data_dir, "input.txt"), Path(data_dir, "tinyshakespeare", "input.txt")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise DataFileError(f"no tinyshakespeare in {data_dir}: looked for {candidates[0]} and {candidates[1]}")
    data = found.read_bytes()
    check_hash(found, data, TINYSHAKESPEARE_SHA256, "leave --data-dir out: the text is bundled")
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
