"""Moves and conversions between types."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ptx.arithmetic import packed, step_of
from tests.support.ptx.form import Form, Step, Table
from tests.support.ptx.memory import GENERIC_SHARED
from tests.support.ptx.syntax import Vector
from tests.support.ptx.types import F32, INTEGERS, TYPES, Array, Mask, Refused, Type, flush, narrow, widen

TABLE = Table()
WORDS = ("b16", "b32", "b64")
SMALL = ("u8", "s8", *INTEGERS)
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@TABLE.add("mov")
def _mov(form: Form) -> Step:
    type = form.type(*WORDS, *INTEGERS, "f32", "f64", "f16", "bf16", "pred")
    form.count(2)
    if isinstance(form.operands[1], Vector):
        return _join(form, type)
    if isinstance(form.operands[0], Vector):
        return _take_apart(form, type)
    return step_of(form, [type], lambda a: a, type)


def _piece(type: Type, count: int) -> Type:
    if type.kind != "bits" or count not in (2, 4) or type.bits // count < 8:
        raise Refused(f"{count} pieces of {type.name}")
    return TYPES[f"b{type.bits // count}"]


def _join(form: Form, type: Type) -> Step:
    small = _piece(type, len(form.items(1)))
    readers, write, machine = (
        [form.machine.reader(each, small) for each in form.items(1)],
        form.writer(0, type),
        form.machine,
    )

    def step(mask: Mask) -> None:
        pieces = np.stack([machine.full(read(mask)) for read in readers], 1)
        write(pieces.reshape(-1).view(type.dtype), mask)

    return step


def _take_apart(form: Form, type: Type) -> Step:
    small = _piece(type, len(form.items(0)))
    writers, read, machine = (
        [form.machine.writer(each, small) for each in form.items(0)],
        form.reader(1, type),
        form.machine,
    )

    def step(mask: Mask) -> None:
        pieces = np.ascontiguousarray(machine.full(read(mask))).view(small.dtype).reshape(machine.N, -1)
        for i, write in enumerate(writers):
            write(np.ascontiguousarray(pieces[:, i]), mask)

    return step


@TABLE.add("cvta")
def _cvta(form: Form) -> Step:
    """Between generic addresses and those of a space; global ones are the same."""
    to, space = bool(form.take("to")), form.need("shared", "global", "param")
    type = form.type("u64")
    if space != "shared":
        return step_of(form, [type], lambda a: a, type)
    shift = np.uint64(GENERIC_SHARED)
    return step_of(form, [type], (lambda a: a - shift) if to else (lambda a: a + shift), type)


@TABLE.add("cvt")
def _cvt(form: Form) -> Step:
    if form.modifiers[-2:-1] in (["f16x2"], ["bf16x2"]):
        return _cvt_packed(form)
    of = form.type(*SMALL, "f16", "bf16", "f32", "f64")
    to = form.type(*SMALL, "f16", "bf16", "f32", "f64", "tf32")
    form.count(2)
    ftz = bool(form.take("ftz"))
    if ftz and "f32" not in (of.name, to.name):
        raise Refused(".ftz without f32")
    write, read = form.writer(0, to, wide=True), form.reader(1, of, low=True)
    if to.name == "tf32":
        if of is not F32 or form.need("rna", "rn") != "rna":
            raise Refused("only .rna.tf32.f32")
        function = _to_tf32
    elif of.kind == "float" and to.kind == "float":
        function = _float_to_float(form, of, to)
    elif of.kind == "float":
        function = _float_to_integer(form, of, to)
    elif to.kind == "float":
        form.need("rn")
        wide = np.float32 if to.bits == 16 else to.dtype
        function = lambda x: narrow(np.asarray(x).astype(wide), to)[()]  # noqa: E731
        if to.bits == 16 and of.bits > 16:
            raise Refused("rounded twice")
    else:
        function = lambda x: np.asarray(x).astype(to.dtype)[()]  # noqa: E731
    flushes = ftz and of is F32
    return lambda mask: write(function(flush(read(mask)) if flushes else read(mask)), mask)


def _cvt_packed(form: Form) -> Step:
    form.type("f32")
    type = form.type("f16x2", "bf16x2")
    form.need("rn")
    relu = bool(form.take("relu"))
    machine = form.machine

    def convert(upper: Array, lower: Array) -> Array:
        pair = np.stack([machine.full(lower), machine.full(upper)], -1)
        return packed(np.where(pair > 0, pair, np.where(np.isnan(pair), pair, 0)) if relu else pair, type)

    return step_of(form, [F32, F32], convert, type)


def _to_tf32(x: Array) -> Array:
    """To 10 bits of fraction, ties away from zero."""
    bits = np.asarray(x).view(np.uint32)
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)[()]


def _float_to_float(form: Form, of: Type, to: Type) -> Any:
    whole = form.take(*ROUND)
    if not whole and to.bits < of.bits:
        form.need("rn")
        if of.name == "f64" and to.bits == 16:
            raise Refused("rounded twice")
    saturate = bool(form.take("sat"))

    def convert(x: Array) -> Array:
        x = widen(x, of)
        x = ROUND[whole](x) if whole else x
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype) if saturate else x
        return narrow(x, to) if to.bits == 16 else np.asarray(x).astype(to.dtype)[()]

    return convert


def _float_to_integer(form: Form, of: Type, to: Type) -> Any:
    """Clamped to the range of the type; NaN becomes 0."""
    rounding = ROUND[form.need(*ROUND)]
    limits = np.iinfo(to.dtype)
    most = float(limits.max) if limits.bits < 64 else float(limits.max) - 1024

    def convert(x: Array) -> Array:
        whole = np.nan_to_num(rounding(np.asarray(widen(x, of), np.float64)), nan=0.0)
        clamped = np.clip(whole, float(limits.min), most).astype(to.dtype)
        return np.where(whole > most, limits.max, clamped).astype(to.dtype)[()]

    return convert
