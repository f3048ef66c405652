"""Tensor maps, which describe tensors to the copy engine, and the elements of a box.

NVIDIA does not document the 128 bytes that the driver makes, so that the maps that kernels get here have a form of
their own. A kernel only hands over the address of one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tests.support.ptx.types import Array, Fault

BYTES = 128
MAGIC = b"tmap"
FORM = "<4sBBHQ5Q4Q5H"
SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True)
class TensorMap:
    """A tensor at an address and the boxes that are copied of it; axes from the innermost, strides in bytes."""

    address: int
    width: int
    """Bytes of an element."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Of all axes but the innermost, whose elements are neighbours."""
    box: tuple[int, ...]
    swizzle: int
    """Bytes of a row within which chunks of 16 bytes are permuted, or 0."""

    def __post_init__(self) -> None:
        """The requirements of cuTensorMapEncodeTiled."""
        rank = len(self.sizes)
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(f"a tensor map of {self.sizes}, {self.strides} and {self.box}")
        if self.address % 16 or any(each % 16 or not 0 <= each < 2**40 for each in self.strides):
            raise ValueError("a tensor map needs an address and strides on 16 bytes")
        if not all(1 <= each <= 2**32 for each in self.sizes) or not all(1 <= each <= 256 for each in self.box):
            raise ValueError("a tensor map needs sizes of 1 to 2^32 and a box of 1 to 256")
        row = self.box[0] * self.width
        if self.swizzle not in SWIZZLES or row % 16 or (self.swizzle and row > self.swizzle):
            raise ValueError(f"a tensor map has rows of {row} bytes in a swizzle of {self.swizzle}")

    @property
    def box_bytes(self) -> int:
        """Of a box, in shared memory."""
        return self.width * int(np.prod(self.box))

    def pack(self) -> bytes:
        """The 128 bytes passed to a kernel."""

        def padded(values: tuple[int, ...], count: int) -> tuple[int, ...]:
            return (*values, *(0,) * (count - len(values)))

        axes = (*padded(self.sizes, 5), *padded(self.strides, 4), *padded(self.box, 5))
        return struct.pack(FORM, MAGIC, len(self.sizes), self.width, self.swizzle, self.address, *axes).ljust(BYTES)

    @classmethod
    def unpack(cls, data: bytes) -> TensorMap:
        """The map of 128 bytes.

        Raises:
            Fault: they are none.
        """
        magic, rank, width, swizzle, address, *axes = struct.unpack_from(FORM, data)
        if magic != MAGIC:
            raise Fault("an address that is not that of a tensor map")
        return cls(address, width, tuple(axes[:rank]), tuple(axes[5 : 4 + rank]), tuple(axes[9 : 9 + rank]), swizzle)

    def elements(self, first: tuple[int, ...]) -> tuple[Array, Array]:
        """Of the box whose first element is at these indices, in the order of shared memory: the address of each
        element, and whether it is inside the tensor.
        """
        address = np.full(self.box[::-1], self.address, np.int64)
        inside = np.ones(self.box[::-1], bool)
        for axis, (start, size, count) in enumerate(zip(first, self.sizes, self.box, strict=True)):
            index = start + np.arange(count, dtype=np.int64)
            index = index.reshape(-1, *(1,) * axis)
            address = address + index * (self.strides[axis - 1] if axis else self.width)
            inside = inside & (index >= 0) & (index < size)
        return address.reshape(-1), inside.reshape(-1)

    def positions(self, start: int) -> Array:
        """Offsets of the elements of a box in shared memory, from byte `start` of its window."""
        at = start + self.width * np.arange(int(np.prod(self.box)), dtype=np.int64)
        return swizzled(at, self.swizzle)


def swizzled(at: Array, span: int) -> Array:
    """Addresses in shared memory with the bits of their chunk of 16 bytes exchanged (PTX ISA, "Swizzling modes")."""
    return at ^ (((at >> 7) & (span // 16 - 1)) << 4) if span > 16 else at
