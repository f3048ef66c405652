"""Arithmetic and comparisons of integers and floating-point numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx import hardware
from tests.support.ptx.form import Form, Step, Table, Write
from tests.support.ptx.types import INTEGERS, PRED, TYPES, WIDE, Array, Mask, Refused, Type, flush, narrow, widen

TABLE = Table()
FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
PAIRS = "f32x2"
"""Of add, sub, mul and fma alone."""
Function = Callable[..., Any]


def step_of(form: Form, types: list[Type], function: Function, result: Type) -> Step:
    """Compute operand 0 from the other operands."""
    write = form.writer(0, result)
    form.count(1 + len(types))
    readers = [form.reader(i, type) for i, type in enumerate(types, start=1)]
    if len(readers) == 1:
        (a,) = readers
        return lambda mask: write(function(a(mask)), mask)
    if len(readers) == 2:
        a, b = readers
        return lambda mask: write(function(a(mask), b(mask)), mask)
    return lambda mask: write(function(*(read(mask) for read in readers)), mask)


def halves(words: Array, type: Type) -> Array:
    """Both halves of packed words, as fp32 [..., 2]."""
    pieces = np.ascontiguousarray(words).view(np.uint16).reshape(*np.shape(words), 2)
    return widen(pieces if type.name == "bf16x2" else pieces.view(np.float16), _half(type))


def packed(values: Array, type: Type) -> Array:
    """fp32 [..., 2] as packed words."""
    narrowed = np.ascontiguousarray(narrow(values, _half(type))).view(np.uint32)
    return narrowed.reshape(np.shape(values)[:-1])[()]


def _flushing(function: Function) -> Function:
    return lambda *x: flush(function(*map(flush, x)))


def _of_pairs(function: Function) -> Function:
    """Two fp32 numbers packed in 64 bits."""

    def of_pairs(*words: Array) -> Array:
        given = (np.ascontiguousarray(each).view(np.float32).reshape(*np.shape(each), 2) for each in words)
        result = np.ascontiguousarray(function(*given), np.float32)
        return result.view(np.uint64).reshape(result.shape[:-1])[()]

    return of_pairs


def _half(type: Type) -> Type:
    return TYPES[type.name.removesuffix("x2")]


def floating(form: Form, type: Type, function: Function, operands: int) -> Step:
    """A function of fp32 or fp64 numbers for every floating type; halves are widened and rounded once."""
    types = [type] * operands
    if form.take("ftz"):
        if type.name not in ("f32", PAIRS):
            raise Refused(".ftz of halves")
        flushing = _flushing(function)
        return step_of(form, types, flushing if type.name == "f32" else _of_pairs(flushing), type)
    if type.name == PAIRS:
        return step_of(form, types, _of_pairs(function), type)
    if type.kind == "packed":
        return step_of(form, types, lambda *x: packed(function(*(halves(each, type) for each in x)), type), type)
    if type.bits == 16:
        return step_of(form, types, lambda *x: narrow(function(*(widen(each, type) for each in x)), type), type)
    return step_of(form, types, function, type)


@TABLE.add("add", "sub")
def _add(form: Form) -> Step:
    type = form.type(*INTEGERS, *FLOATS, PAIRS)
    function = np.add if form.instruction.opcode == "add" else np.subtract
    if type.kind in ("signed", "unsigned"):
        return step_of(form, [type] * 2, function, type)
    form.take("rn")
    return floating(form, type, function, 2)


@TABLE.add("mul")
def _mul(form: Form) -> Step:
    type = form.type(*INTEGERS, *FLOATS, PAIRS)
    if type.kind not in ("signed", "unsigned"):
        form.take("rn")
        return floating(form, type, np.multiply, 2)
    return _product(form, type, None)


@TABLE.add("mad", "fma")
def _mad(form: Form) -> Step:
    type = form.type(*INTEGERS, *FLOATS, PAIRS)
    if type.kind in ("signed", "unsigned"):
        if form.instruction.opcode == "fma":
            raise Refused("fma of integers")
        return _product(form, type, np.add)
    if type.name == "f64":
        raise Refused("fma of f64")
    rounding = form.need("rn", "rm", "rp", "rz")
    if type.name in ("f32", PAIRS):
        return floating(form, type, lambda a, b, c: hardware.fma(a, b, c, rounding), 3)
    if rounding != "rn":
        raise Refused(f"fma.{rounding} of halves")
    if form.take("relu"):
        return floating(form, type, lambda a, b, c: _relu(_exact_fma(a, b, c)), 3)
    return floating(form, type, _exact_fma, 3)


def _exact_fma(a: Array, b: Array, c: Array) -> Array:
    """In fp64, where a product of halves is exact, then rounded to a half."""
    return np.asarray(np.float64(a) * np.float64(b) + np.float64(c), np.float32)


def _product(form: Form, type: Type, add: Function | None) -> Step:
    part = form.need("wide", "lo", "hi")
    result = WIDE[type.name] if part == "wide" and type.name in WIDE else type

    def multiply(a: Array, b: Array) -> Array:
        if part == "lo":
            return np.multiply(a, b)
        if type.bits == 64:
            return _high64(a, b, type)
        wide = np.asarray(a).astype(WIDE[type.name].dtype) * np.asarray(b).astype(WIDE[type.name].dtype)
        return wide if part == "wide" else (wide >> type.bits).astype(type.dtype)

    if add is None:
        return step_of(form, [type] * 2, multiply, result)
    return step_of(form, [type, type, result], lambda a, b, c: multiply(a, b) + c, result)


def _high64(a: Array, b: Array, type: Type) -> Array:
    products = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return np.asarray(products >> 64).astype(type.dtype)


@TABLE.add("neg", "abs")
def _neg(form: Form) -> Step:
    type = form.type(*INTEGERS, *FLOATS)
    function = np.negative if form.instruction.opcode == "neg" else np.abs
    if type.kind in ("signed", "unsigned"):
        if type.kind == "unsigned":
            raise Refused("a sign of unsigned numbers")
        return step_of(form, [type], function, type)
    return floating(form, type, function, 1)


@TABLE.add("copysign")
def _copysign(form: Form) -> Step:
    type = form.type("f32", "f64")
    return step_of(form, [type] * 2, lambda a, b: np.copysign(b, a), type)


def _relu(x: Array) -> Array:
    return np.maximum(x, x.dtype.type(0))


@TABLE.add("min", "max")
def _max(form: Form) -> Step:
    type = form.type(*INTEGERS, *FLOATS)
    is_max, relu = form.instruction.opcode == "max", bool(form.take("relu"))
    if type.kind in ("signed", "unsigned"):
        if relu and type.name != "s32":
            raise Refused(".relu of other integers than s32")
        function: Function = np.maximum if is_max else np.minimum
        whole = (lambda a, b: _relu(function(a, b))) if relu else function
        return step_of(form, [type] * 2, whole, type)
    if relu:
        raise Refused(".relu of floats")
    if form.take("NaN"):
        return floating(form, type, np.maximum if is_max else np.minimum, 2)
    return floating(form, type, np.fmax if is_max else np.fmin, 2)


@TABLE.add("div", "rem")
def _div(form: Form) -> Step:
    type = form.type(*INTEGERS, "f32", "f64")
    if type.kind in ("signed", "unsigned"):
        return step_of(form, [type] * 2, _quotient if form.instruction.opcode == "div" else _remainder, type)
    if form.instruction.opcode == "rem":
        raise Refused("a remainder of floats")
    if (kind := form.need("rn", "full", "approx")) == "rn":
        return floating(form, type, np.divide, 2)
    if type.name != "f32":
        raise Refused(f"div.{kind} of f64")
    return floating(form, type, functools.partial(hardware.divide, full=kind == "full"), 2)


def _quotient(a: Array, b: Array) -> Array:
    """Truncated; all ones for a divisor of 0."""
    dtype = np.asarray(b).dtype
    safe = np.where(b == 0, dtype.type(1), b)
    if dtype.kind == "u":
        return np.where(b == 0, np.iinfo(dtype).max, a // safe).astype(dtype)
    quotient = a // safe
    inexact = (quotient * safe != a) & (quotient < 0)  # numpy rounds down
    return np.where(b == 0, dtype.type(-1), quotient + inexact.astype(dtype)).astype(dtype)


def _remainder(a: Array, b: Array) -> Array:
    return a - _quotient(a, b) * b


@TABLE.add("ex2", "lg2", "rcp", "rsqrt", "tanh", "sin", "cos", "sqrt")
def _approximate(form: Form) -> Step:
    type, name = form.type("f32"), form.instruction.opcode
    ftz = bool(form.take("ftz"))
    if form.need(*(("approx", "rn") if name in ("rcp", "sqrt") else ("approx",))) == "rn":
        if ftz:
            raise Refused(".rn with .ftz")
        exact = np.sqrt if name == "sqrt" else np.reciprocal
        return step_of(form, [type], exact, type)
    return step_of(form, [type], lambda x: hardware.approximate(name, x, ftz), type)


@TABLE.add("selp")
def _selp(form: Form) -> Step:
    type = form.type("b16", "b32", "b64", *INTEGERS, "f32", "f64")
    return step_of(form, [type, type, PRED], lambda a, b, p: np.where(p, a, b)[()], type)


COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
JOINS: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare_floats(name: str, a: Array, b: Array) -> Array:
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name in COMPARISONS:
        return COMPARISONS[name](a, b) & ~unordered
    return COMPARISONS[name[:-1]](a, b) | unordered


@TABLE.add("setp")
def _setp(form: Form) -> Step:
    type = form.type("b16", "b32", "b64", *INTEGERS, *FLOATS)
    is_float = type.kind in ("float", "packed")
    floats = (*COMPARISONS, *(f"{name}u" for name in COMPARISONS), "num", "nan")
    integers = ("eq", "ne") if type.kind == "bits" else (*COMPARISONS, *(UNSIGNED if type.kind == "unsigned" else ()))
    name = form.need(*(floats if is_float else integers))
    join, ftz = form.take(*JOINS), bool(form.take("ftz"))
    if ftz and type.name != "f32":
        raise Refused(".ftz of other types than f32")
    form.count(4 if join else 3)
    first, second = (form.machine.writer(each, PRED) for each in form.pair(0))
    a, b = form.reader(1, type), form.reader(2, type)
    third = form.reader(3, PRED) if join else None

    def test(mask: Mask) -> Array:
        x, y = a(mask), b(mask)
        if not is_float:
            return COMPARISONS[UNSIGNED.get(name, name)](x, y)
        if ftz:
            x, y = flush(x), flush(y)
        return _compare_floats(name, widen(x, type), widen(y, type))

    def step(mask: Mask) -> None:
        result = test(mask)
        values = (result, ~result) if third is None else (JOINS[join](r, third(mask)) for r in (result, ~result))
        for write, value in zip((first, second), values, strict=True):
            write(value, mask)

    if type.kind == "packed":
        if third is not None:
            raise Refused("packed halves with another predicate")
        return _setp_packed(name, type, a, b, first, second)
    return step


def _setp_packed(name: str, type: Type, a: Function, b: Function, first: Write, second: Write) -> Step:
    """The lower halves decide the first predicate, the upper ones the second."""

    def step(mask: Mask) -> None:
        result = _compare_floats(name, halves(a(mask), type), halves(b(mask), type))
        first(result[..., 0], mask)
        second(result[..., 1], mask)

    return step
