"""The types of PTX, and how their values are stored: a register is a numpy array with one element per thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Mask = Array | None
"""Which threads execute an instruction; None: all of them."""


class Refused(Exception):
    """An instruction, a modifier, a type or a directive that the interpreter does not implement."""


class Fault(Exception):
    """An error that ends a kernel on a device: an address in no tensor, a misaligned access, a missing lane."""


@dataclass(frozen=True)
class Type:
    """A scalar type; `dtype` is how numpy stores its bits: for bf16 and the packed types an integer."""

    name: str
    kind: str
    dtype: np.dtype[Any]

    @property
    def bits(self) -> int:
        return 1 if self.kind == "pred" else 8 * self.dtype.itemsize

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The unsigned integers of the same width."""
        return np.dtype(f"u{self.dtype.itemsize}")


def _type(name: str, kind: str, dtype: str) -> Type:
    return Type(name, kind, np.dtype(dtype))


TYPES = {
    each.name: each
    for each in (
        *(_type(f"b{8 * size}", "bits", f"u{size}") for size in (1, 2, 4, 8)),
        *(_type(f"u{8 * size}", "unsigned", f"u{size}") for size in (1, 2, 4, 8)),
        *(_type(f"s{8 * size}", "signed", f"i{size}") for size in (1, 2, 4, 8)),
        _type("f16", "float", "f2"),
        _type("f32", "float", "f4"),
        _type("f64", "float", "f8"),
        _type("bf16", "float", "u2"),
        _type("f16x2", "packed", "u4"),
        _type("bf16x2", "packed", "u4"),
        _type("f32x2", "packed", "u8"),
        _type("tf32", "bits", "u4"),
        _type("pred", "pred", "?"),
    )
}
PRED, B32, B64, U32, U64, F32 = (TYPES[name] for name in ("pred", "b32", "b64", "u32", "u64", "f32"))
INTEGERS = tuple(f"{kind}{size}" for kind in "us" for size in (16, 32, 64))
WIDE = {name: TYPES[f"{name[0]}{2 * int(name[1:])}"] for name in ("u16", "s16", "u32", "s32")}
"""What a product of two integers has twice the bits of."""


def bf16_to_f32(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Rounded to nearest even; every NaN becomes the canonical NaN of the device."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint16(0x7FFF), rounded.astype(np.uint16))


def widen(values: Array, type: Type) -> Array:
    """Halves as fp32; other floats unchanged."""
    if type.name == "bf16":
        return bf16_to_f32(values)
    return np.asarray(values, np.float32) if type.name == "f16" else values


def narrow(values: Array, type: Type) -> Array:
    """fp32 (or fp64) rounded to a half; other floats unchanged."""
    if type.name == "bf16":
        return f32_to_bf16(values)
    return np.asarray(values).astype(np.float16) if type.name == "f16" else values


def flush(values: Array) -> Array:
    """Subnormal fp32 numbers as zeros of their sign."""
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values).astype(np.float32)
