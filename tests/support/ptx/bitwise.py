"""Logic, shifts and fields of bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.arithmetic import step_of
from tests.support.ptx.form import Form, Step, Table
from tests.support.ptx.syntax import Number
from tests.support.ptx.types import B32, TYPES, U32, Array, Refused

TABLE = Table()
WORDS = ("b16", "b32", "b64")


@TABLE.add("and", "or", "xor")
def _logic(form: Form) -> Step:
    type = form.type(*WORDS, "pred")
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[form.instruction.opcode]
    return step_of(form, [type] * 2, function, type)


@TABLE.add("not")
def _not(form: Form) -> Step:
    type = form.type(*WORDS, "pred")
    return step_of(form, [type], np.invert, type)


@TABLE.add("popc", "clz")
def _popc(form: Form) -> Step:
    type = form.type("b32", "b64")
    if form.instruction.opcode == "popc":
        return step_of(form, [type], lambda a: np.bitwise_count(a).astype(np.uint32), B32)
    if type is not B32:
        raise Refused("clz of 64 bits")
    return step_of(form, [type], lambda a: (32 - np.frexp(np.asarray(a, np.float64))[1]).astype(np.uint32), B32)


@TABLE.add("brev")
def _brev(form: Form) -> Step:
    type = form.type("b32")

    def reverse(a: Array) -> Array:
        for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
            by, low = np.uint32(shift), np.uint32(mask)
            a = ((a >> by) & low) | ((a & low) << by)
        return a

    return step_of(form, [type], reverse, type)


@TABLE.add("shl", "shr")
def _shift(form: Form) -> Step:
    """Amounts beyond the width shift everything out."""
    left = form.instruction.opcode == "shl"
    type = form.type(*WORDS) if left else form.type(*WORDS, "u16", "u32", "u64", "s16", "s32", "s64")

    def shift(a: Array, b: Array) -> Any:
        amount = np.minimum(b, np.uint32(type.bits)).astype(type.dtype)
        inside = np.minimum(amount, type.dtype.type(type.bits - 1))
        if not left and type.kind == "signed":
            return a >> inside
        shifted = a << inside if left else a >> inside
        return np.where(amount >= type.bits, type.dtype.type(0), shifted)[()]

    return step_of(form, [type, U32], shift, type)


@TABLE.add("shf")
def _funnel(form: Form) -> Step:
    left, wrap = form.need("l", "r") == "l", form.need("wrap", "clamp") == "wrap"
    form.type("b32")

    def shift(a: Array, b: Array, c: Array) -> Array:
        amount = np.asarray(c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
        return ((both << amount) >> np.uint64(32) if left else both >> amount).astype(np.uint32)

    return step_of(form, [B32, B32, U32], shift, B32)


@TABLE.add("bfe")
def _extract(form: Form) -> Step:
    type = form.type("u32", "s32", "u64")

    def extract(a: Array, b: Array, c: Array) -> Array:
        first = np.asarray(b & np.uint32(255)).astype(np.uint64)
        length = np.asarray(c & np.uint32(255)).astype(np.uint64)
        if ((length > 63) | (length < 1) | (first + length > type.bits)).any():
            raise Refused("bfe: a field beyond the word, or of 64 bits")
        field = (np.asarray(a).astype(np.uint64) >> first) & ((np.uint64(1) << length) - np.uint64(1))
        if type.kind == "signed":
            field, length = field.astype(np.int64), length.astype(np.int64)
            field = np.where((field >> (length - 1)) & 1, field - (np.int64(1) << length), field)
        return field.astype(type.dtype)

    return step_of(form, [type, U32, U32], extract, type)


@TABLE.add("bfi")
def _insert(form: Form) -> Step:
    type = form.type("b32", "b64")
    whole = np.uint64(2**type.bits - 1)

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        first, length = np.asarray(c).astype(np.uint64), np.asarray(d).astype(np.uint64)
        if (first + length > type.bits).any():
            raise Refused("bfi: a field beyond the word")
        if (length > 63).any():
            raise Refused("bfi: a field of 64 bits")
        bits = ((np.uint64(1) << length) - np.uint64(1)) << first
        field = (np.asarray(a).astype(np.uint64) << first) & bits
        return (((np.asarray(b).astype(np.uint64) & ~bits) | field) & whole).astype(type.dtype)

    return step_of(form, [type, type, U32, U32], insert, type)


@TABLE.add("prmt")
def _permute(form: Form) -> Step:
    form.type("b32")

    def permute(a: Array, b: Array, c: Array) -> Array:
        both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
        selector = np.asarray(c).astype(np.uint64)
        result: Any = np.uint64(0)
        for i in range(4):
            chosen = (selector >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result = result | (np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * i))
        return np.asarray(result).astype(np.uint32)

    return step_of(form, [B32] * 3, permute, B32)


@TABLE.add("lop3")
def _lookup(form: Form) -> Step:
    form.type("b32")
    form.count(5)
    table = form.operands[4]
    if not isinstance(table, Number):
        raise Refused("lop3 without a table")
    entries = [i for i in range(8) if table.value >> i & 1]
    form.operands = form.operands[:4]

    def look_up(a: Array, b: Array, c: Array) -> Any:
        result: Any = np.uint32(0)
        for i in entries:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return result

    return step_of(form, [TYPES["b32"]] * 3, look_up, TYPES["b32"])
