"""A reader of GGUF files: metadata and tensors, unquantised or in Q8_0, Q4_0 and Q4_1."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
BLOCK = 32  # weights that share a scale
STORED = {  # format number: name, weights per block, bytes per block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", BLOCK, 2 + BLOCK // 2),
    3: ("Q4_1", BLOCK, 4 + BLOCK // 2),
    8: ("Q8_0", BLOCK, 2 + BLOCK),
}


class GGUF:
    """An open file: `metadata`, and `tensor(name)` in float32.

    Raises:
        ValueError: not a GGUF file of version 2 or 3, or it ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        with path.open("rb") as file:
            magic, version, tensors, entries = self._read(file, "4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path}: not a GGUF file of version 2 or 3")
            self.metadata = {self._string(file): self._value(file, *self._read(file, "I")) for _ in range(entries)}
            self.index = {self._string(file): self._tensor_entry(file) for _ in range(tensors)}
            alignment = self.metadata.get("general.alignment", 32)
            if not (isinstance(alignment, int) and alignment > 0):
                raise ValueError(f"{path}: general.alignment must be a positive integer; got {alignment!r}")
            self.start = -(-file.tell() // alignment) * alignment

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, dequantised to float32, in the row-major shape.

        Raises:
            KeyError: no such tensor.
            ValueError: its format is not supported, or the file is truncated.
        """
        shape, form, offset = self.index[name]
        if form not in STORED:
            known = ", ".join(name for name, _, _ in STORED.values())
            raise ValueError(f"{self.path}: {name} has format {form}; supported are {known}")
        kind, weights, size = STORED[form]
        length = math.prod(shape) // weights * size
        if self.start + offset + length > self._size:
            raise ValueError(f"{self.path}: truncated within {name}")
        with self.path.open("rb") as file:
            file.seek(self.start + offset)
            content = file.read(length)
        return torch.from_numpy(_dequantised(np.frombuffer(content, np.uint8), kind).reshape(shape))

    def _read(self, file: BinaryIO, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self._bytes(file, struct.calcsize("<" + form)))

    def _bytes(self, file: BinaryIO, size: int) -> bytes:
        if file.tell() + size > self._size:
            raise ValueError(f"{self.path}: truncated within its header")
        return file.read(size)

    def _string(self, file: BinaryIO) -> str:
        (length,) = self._read(file, "Q")
        return self._bytes(file, length).decode("utf-8", "replace")

    def _value(self, file: BinaryIO, kind: int) -> Any:
        if kind == STRING:
            return self._string(file)
        if kind == ARRAY:
            element, count = self._read(file, "IQ")
            return [self._value(file, element) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: unknown metadata type {kind}")
        return self._read(file, SCALARS[kind])[0]

    def _tensor_entry(self, file: BinaryIO) -> tuple[tuple[int, ...], int, int]:
        (dimensions,) = self._read(file, "I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{self.path}: a tensor of {dimensions} axes")
        shape = self._read(file, f"{dimensions}Q")
        form, offset = self._read(file, "IQ")
        return shape[::-1], form, offset


def _dequantised(content: np.ndarray, kind: str) -> np.ndarray:
    """The weights, float32 (N,). The low nibbles of a block are its first sixteen weights."""
    if kind == "F32":
        return content.view(np.float32).copy()
    if kind == "F16":
        return content.view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        blocks = content.reshape(-1, 2 + BLOCK)
        return (_halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)
    header = 4 if kind == "Q4_1" else 2
    blocks = content.reshape(-1, header + BLOCK // 2)
    packed = blocks[:, header:]
    levels = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    weights = levels * _halves(blocks, 0) + _halves(blocks, 1) if kind == "Q4_1" else (levels - 8) * _halves(blocks, 0)
    return weights.reshape(-1)


def _halves(blocks: np.ndarray, index: int) -> np.ndarray:
    """The float16 number at `index` of each block's header, (blocks, 1)."""
    return blocks[:, 2 * index : 2 * index + 2].copy().view(np.float16).astype(np.float32)
