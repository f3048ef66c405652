"""Loads, stores, asynchronous copies and atomic operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.ptx import tensor_copies
from tests.support.ptx.form import Form, Step, Table
from tests.support.ptx.memory import GENERIC_SHARED, POISON
from tests.support.ptx.syntax import Address, Number, Sink, Symbol
from tests.support.ptx.types import INTEGERS, TYPES, U64, Array, Fault, Mask, Refused, Type

TABLE = Table()
ANY = ("b8", "u8", "s8", "b16", "b32", "b64", *INTEGERS, "f32", "f64")
SHARED = ("shared", "shared::cta")
SHARED_WINDOW = 1 << 20


def _take_hints(form: Form, operands: int) -> None:
    """Consume cache hints, which change no value; a policy is an additional operand."""
    for level in ("L1", "L2"):
        form.take(*(f"{level}::{hint}" for hint in ("evict_first", "evict_last", "no_allocate", "128B", "256B")))
    form.take("ca", "cg", "cs", "lu", "wb", "wt")
    if form.take("L2::cache_hint"):
        form.reader(operands, U64)
        operands += 1
    form.count(operands)


def _elements(form: Form, index: int) -> tuple[Any, ...]:
    """The registers of an access: 1, or 2 and 4 with `.v2` and `.v4`."""
    items, vector = form.items(index), form.take("v2", "v4", "v8")
    if len(items) != (int(vector[1]) if vector else 1):
        raise Refused(f"{len(items)} registers")
    return items


@TABLE.add("ld")
def _load(form: Form) -> Step:
    type = form.type(*ANY)
    is_parameter, source = bool(form.take("param")), form.operands[1]
    if is_parameter and isinstance(source, Address) and isinstance(source.base, Symbol):
        return _load_parameter(form, type)
    is_global, is_shared = is_parameter or bool(form.take("global", "const")), bool(form.take(*SHARED))
    form.take("nc", "weak")
    items = _elements(form, 0)
    _take_hints(form, 2)
    machine, width = form.machine, type.bits // 8
    writers = [machine.writer(each, type, wide=True) for each in items]
    address = machine.address(form.operands[1], is_shared)

    def step(mask: Mask) -> None:
        at, lanes = address(mask), machine.lanes_of(mask)
        at = at if mask is None else at[lanes]
        shared = is_shared
        if not (is_global or is_shared):
            at, shared = _of_window(at)
        if shared:
            values: Any = machine.shared.load(at, lanes, width, len(items), machine.note)
        else:
            values = machine.memory.load(at, lanes, width, len(items), machine.clock, machine.note)
        for write, value in zip(writers, values, strict=True):
            if mask is not None:
                everyone = np.zeros(machine.N, type.unsigned)
                everyone[lanes] = value
                value = everyone
            write(value.view(type.dtype), mask)

    return step


def _of_window(addresses: Array) -> tuple[Array, bool]:
    """A generic address is one of shared memory or one of global memory."""
    inside = (addresses >= np.uint64(GENERIC_SHARED)) & (addresses < np.uint64(GENERIC_SHARED + SHARED_WINDOW))
    if inside.any() and not inside.all():
        raise Fault("one access to both shared and global memory")
    return (addresses - np.uint64(GENERIC_SHARED), True) if inside.any() else (addresses, False)


def _load_parameter(form: Form, type: Type) -> Step:
    items = _elements(form, 0)
    form.count(2)
    source, width = form.operands[1], type.bits // 8
    assert isinstance(source, Address) and isinstance(source.base, Symbol)
    data = form.machine.parameters[source.base.name]
    if source.offset + width * len(items) > len(data):
        raise Refused(f"byte {source.offset} of a parameter of {len(data)} bytes")
    values = np.frombuffer(data, type.dtype, len(items), source.offset)
    writers = [form.machine.writer(each, type, wide=True) for each in items]

    def step(mask: Mask) -> None:
        for write, value in zip(writers, values, strict=True):
            write(value, mask)

    return step


@TABLE.add("st")
def _store(form: Form) -> Step:
    type = form.type(*ANY)
    form.take("weak", "volatile")
    is_global, is_shared = bool(form.take("global")), bool(form.take(*SHARED))
    items = _elements(form, 1)
    _take_hints(form, 2)
    machine, width = form.machine, type.bits // 8
    word = TYPES[f"b{type.bits}"]
    readers = [machine.reader(each, word, low=True) for each in items]
    address = machine.address(form.operands[0], is_shared)

    def step(mask: Mask) -> None:
        at, lanes = address(mask), machine.lanes_of(mask)
        values = [machine.full(read(mask)) for read in readers]
        if mask is not None:
            at, values = at[lanes], [value[lanes] for value in values]
        shared = is_shared
        if not (is_global or is_shared):
            at, shared = _of_window(at)
        if shared:
            machine.shared.store(at, lanes, values, width, machine.note)
        else:
            machine.memory.store(at, lanes, values, width, machine.clock, machine.note)

    return step


@dataclass
class Copy:
    """Bytes under way to shared memory, of some lanes; `group` is the number of each lane's groups before it."""

    lanes: Array
    at: Array
    data: Array
    size: int
    word: int
    group: Array

    def part(self, which: Array) -> Copy:
        return Copy(self.lanes[which], self.at[which], self.data[:, which], self.size, self.word, self.group[which])


class Copies:
    """The asynchronous copies of a machine: poison until their group has been waited for."""

    def __init__(self, form: Form) -> None:
        self.machine = form.machine
        self.committed = np.zeros(self.machine.N, np.int64)
        self.under_way: list[Copy] = []
        self.machine.at_end.append(self.check_end)

    def check_end(self) -> None:
        if self.under_way:
            self.machine.note("cp.async", "a copy that is never waited for")

    def start(self, copy: Copy) -> None:
        shared = self.machine.shared
        shared.note("copy", copy.at, copy.lanes, copy.size, self.machine.note)
        np.add.at(shared.arriving, _granules(copy, shared.granule), 1)
        self._fill(copy, np.full_like(copy.data, int.from_bytes(bytes([POISON]) * copy.word, "little")))
        self.under_way.append(copy)

    def wait(self, mask: Mask, groups: int) -> None:
        """All but the last `groups` groups of these lanes arrive; -1: every copy, of a group or not."""
        shared, kept = self.machine.shared, []
        for copy in self.under_way:
            arrives = (
                copy.group < self.committed[copy.lanes] - groups if groups >= 0 else np.ones(len(copy.lanes), bool)
            )
            if mask is not None:
                arrives = arrives & mask[copy.lanes]
            if arrives.any():
                done = copy if arrives.all() else copy.part(arrives)
                np.subtract.at(shared.arriving, _granules(done, shared.granule), 1)
                shared.note("arrive", done.at, done.lanes, done.size, self.machine.note)
                self._fill(done, done.data)
            if not arrives.all():
                kept.append(copy.part(~arrives))
        self.under_way = kept

    def _fill(self, copy: Copy, data: Array) -> None:
        words = self.machine.shared.views[copy.word]
        for i, values in enumerate(data):
            words[copy.at // copy.word + i] = values


def _granules(copy: Copy, granule: int) -> Array:
    return (copy.at[:, None] // granule + np.arange(copy.size // granule)).reshape(-1)


@TABLE.add("cp")
def _copy_async(form: Form) -> Step:
    form.need("async")
    if form.take("bulk"):
        return tensor_copies.bulk(form)
    copies = form.unit(Copies)
    what = form.need("ca", "cg", "commit_group", "wait_group", "wait_all")
    if what == "commit_group":
        form.count(0)
        return lambda mask: _commit(copies, mask)
    if what.startswith("wait"):
        groups = form.groups() if what == "wait_group" else -1
        return lambda mask: copies.wait(mask, groups)
    form.need(*SHARED)
    form.need("global")
    return _copy(form, copies, what)


def _commit(copies: Copies, mask: Mask) -> None:
    copies.committed[slice(None) if mask is None else mask] += 1


def _copy(form: Form, copies: Copies, cache: str) -> Step:
    machine = form.machine
    given = len(form.operands) - bool("L2::cache_hint" in form.modifiers)
    _take_hints(form, given)
    size = form.operands[2]
    if (
        given not in (3, 4)
        or not isinstance(size, Number)
        or size.value not in ((16,) if cache == "cg" else (4, 8, 16))
    ):
        raise Refused("a size that is no constant of 4, 8 or 16 (of 16 with .cg)")
    count, word = size.value, min(size.value, 8)
    destination, source = machine.address(form.operands[0], True), machine.address(form.operands[1], False)
    sized = given == 4 and not isinstance(form.operands[3], Sink)
    read_size = form.reader(3, TYPES["u32"]) if sized else None

    def step(mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        to, from_ = destination(mask)[lanes], source(mask)[lanes]
        data = np.zeros((count // word, len(lanes)), f"u{word}")
        copied = np.full(len(lanes), True)
        if read_size is not None:
            sizes = machine.full(read_size(mask))[lanes]
            if ((sizes != 0) & (sizes != count)).any():
                raise Refused("cp.async of a part of its bytes")
            copied = sizes > 0
        if copied.any():
            loaded = machine.memory.load(from_[copied], lanes[copied], word, count // word, machine.clock, machine.note)
            data[:, copied] = loaded
        at = machine.shared.offsets(to, lanes, count)
        copies.start(Copy(lanes, at, data, count, word, copies.committed[lanes].copy()))

    return step


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "exch": lambda old, value: value,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
}


@TABLE.add("atom", "red")
def _atomic(form: Form) -> Step:
    """On global memory, in the order of the lanes. Atomic accesses race with plain ones, not with each other."""
    type = form.type("b32", "b64", "u32", "s32", "u64", "s64", "f32", "f64")
    returns = form.instruction.opcode == "atom"
    form.need("global")
    form.take("relaxed", "acquire", "release", "acq_rel")  # the race check does not use them to order plain accesses
    form.take("cta", "gpu", "sys")
    compares = bool(form.take("cas"))
    function = None if compares else ATOMIC[form.need(*ATOMIC)]
    form.count(2 + returns + compares)
    machine = form.machine
    address, value = machine.address(form.operands[returns], False), form.reader(1 + returns, type)
    replacement = form.reader(2 + returns, type) if compares else value
    write = form.writer(0, type) if returns else None

    def step(mask: Mask) -> None:
        lanes, at, given = machine.lanes_of(mask), address(mask), machine.full(value(mask))
        new = machine.full(replacement(mask))
        before = np.zeros(machine.N, type.dtype)
        for lane in lanes.tolist():
            words, index = machine.memory.atomic(at[lane : lane + 1], type.bits // 8, machine.clock, machine.note, lane)
            old = before[lane] = words[index].view(type.dtype)[0]
            if function is not None:
                words[index] = np.array([function(old, given[lane])], type.dtype).view(type.unsigned)
            elif old == given[lane]:
                words[index] = np.array([new[lane]], type.dtype).view(type.unsigned)
        if write is not None:
            write(before, mask)

    return step


@TABLE.add("createpolicy")
def _create_policy(form: Form) -> Step:
    form.type("b64")
    form.need("fractional")
    form.need("L2::evict_first", "L2::evict_last", "L2::evict_normal")
    write = form.writer(0, U64)
    return lambda mask: write(np.uint64(0), mask)
