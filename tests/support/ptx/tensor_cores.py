"""Matrix products of a warp (mma) and of a warp group (wgmma), and the fences between the proxies.

A wgmma runs at the wait that completes its group: until then its accumulators are NaN, and its operands in shared
memory must not change.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.ptx import hardware
from tests.support.ptx.barriers import barriers_of
from tests.support.ptx.form import Form, Read, Step, Table
from tests.support.ptx.syntax import Number, Register, Vector
from tests.support.ptx.tensor_maps import swizzled
from tests.support.ptx.types import B32, B64, F32, PRED, TYPES, Array, Mask, Refused, bf16_to_f32

TABLE = Table()
SHAPES = {"f16": "m16n8k16", "bf16": "m16n8k16", "tf32": "m16n8k8"}
GROUP = 128
"""Threads of a warp group."""
NO_FENCE = {
    True: "wgmma reads what cp.async wrote without fence.proxy.async",
    False: "wgmma reads what ordinary stores wrote without fence.proxy.async",
}


@TABLE.add("mma")
def _mma(form: Form) -> Step:
    form.need("sync")
    form.need("aligned")
    kind = form.modifiers[-2]
    if kind not in SHAPES or form.modifiers != [SHAPES[kind], "row", "col", "f32", kind, kind, "f32"]:
        raise Refused("only products of f16, bf16 and tf32 that are added in f32")
    form.modifiers.clear()
    form.count(4)
    machine = form.machine
    if [len(form.items(i)) for i in range(4)] != [4, 4, 2, 4]:
        raise Refused("fragments of another size")
    writers = [machine.writer(each, F32) for each in form.items(0)]
    operands = [[machine.reader(each, B32) for each in form.items(i)] for i in (1, 2)]
    addend = [machine.reader(each, F32) for each in form.items(3)]
    depth = 8 if kind == "tf32" else 16

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        a, b, c = (
            [np.ascontiguousarray(machine.full(read(mask))) for read in readers] for readers in (*operands, addend)
        )
        for write, sums in zip(writers, hardware.mma(machine.architecture, kind, depth, a, b, c), strict=True):
            write(sums, mask)

    return step


@TABLE.add("fence", "membar")
def _fence(form: Form) -> Step:
    machine = form.machine
    form.count(0)
    if form.instruction.opcode == "membar":
        form.need("gl", "cta", "sys")
        return lambda mask: None
    if form.take("mbarrier_init"):
        form.need("release")
        form.need("cluster")
        return lambda mask: barriers_of(form).fence(machine.lanes_of(mask))
    if not form.take("proxy"):
        form.need("acq_rel", "sc")
        form.need("cta", "gpu", "sys", "cluster")
        return lambda mask: None
    form.need("async")
    form.take("shared::cta", "shared::cluster", "global")

    def step(mask: Mask) -> None:
        machine.shared.fence(machine.lanes_of(mask))
        if machine.barriers:
            machine.barriers.fence(machine.lanes_of(mask))

    return step


@TABLE.add("wgmma")
def _wgmma(form: Form) -> Step:
    products = form.unit(Products)
    what = form.need("fence", "commit_group", "wait_group", "mma_async")
    form.need("sync")
    form.need("aligned")
    if what == "mma_async":
        return _product(form, products)
    if what == "wait_group":
        groups = form.groups()
        return lambda mask: products.wait(mask, groups)
    form.count(0)
    return products.commit if what == "commit_group" else products.fence


@dataclass
class Product:
    """One wgmma of one warp group; a is a matrix, or where it is read from."""

    kind: str
    sums: tuple[int, ...]
    a: Array
    b: Array
    keep: bool
    read: Array
    fragments: tuple[int, ...]
    issued: int
    text: str


class Products:
    """What the warp groups of a machine multiply: not committed, and in groups; sums under way by their registers."""

    def __init__(self, form: Form) -> None:
        self.machine = machine = form.machine
        count = machine.N // GROUP
        if machine.threads % GROUP:
            raise Refused("a CTA that is not made of warp groups")
        self.open: list[list[Product]] = [[] for _ in range(count)]
        self.committed: list[list[list[Product]]] = [[] for _ in range(count)]
        self.sums: list[dict[tuple[int, ...], Array]] = [{} for _ in range(count)]
        self.under_way: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(count)]
        self.fenced = np.full(count, -1)
        """The instruction, counted as executed, that was the last fence of each warp group."""
        machine.at_end.append(self.check_end)

    def check_end(self) -> None:
        if any(self.open) or any(self.committed):
            self.machine.note("wgmma", "a product that is never waited for")

    def groups(self, mask: Mask) -> list[int]:
        self.machine.whole_warps(mask, GROUP)
        if mask is None:
            return list(range(self.machine.N // GROUP))
        return [int(group) for group in np.nonzero(mask[::GROUP])[0]]

    def fence(self, mask: Mask) -> None:
        self.fenced[self.groups(mask)] = self.machine.executed

    def commit(self, mask: Mask) -> None:
        for group in self.groups(mask):
            self.committed[group].append(self.open[group])
            self.open[group] = []

    def wait(self, mask: Mask, groups: int) -> None:
        """Complete the products of all but the last `groups` groups."""
        finished: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
        for group in self.groups(mask):
            while len(self.committed[group]) > groups:
                for product in self.committed[group].pop(0):
                    sums = self._finish(group, product)
                    if sums is not None:
                        finished.setdefault(product.sums, []).append((group, sums))
        for registers, pieces in finished.items():
            self._write(registers, pieces)

    def start(self, group: int, product: Product) -> None:
        pending = self.under_way[group]
        if product.sums not in self.sums[group]:
            registers = set(product.sums)
            if any(registers & set(other) for other in pending):
                raise Refused("sums in a part of the registers of another product under way")
            self.sums[group][product.sums] = self._gather(group, product)
        pending[product.sums] += 1
        self.open[group].append(product)

    def _finish(self, group: int, product: Product) -> Array | None:
        """The sums, once no pending product accumulates into them."""
        machine, pending = self.machine, self.under_way[group]
        machine.shared.finish_product(product.read, _lanes(group))
        if any(self.changed(i, group) > product.issued for i in (*product.sums, *product.fragments)):
            machine.note("wgmma", "a register of a product under way is written")
        words = machine.shared.views[TYPES[product.kind].bits // 8]
        a = product.a if product.fragments else _values(words[product.a], product.kind)
        b = _values(words[product.b], product.kind)
        before = self.sums[group][product.sums]
        c = before if product.keep else np.zeros_like(before)
        after = hardware.wgmma(machine.architecture, product.kind, a[None], b.T[None], c[None])[0]
        self.sums[group][product.sums] = after
        pending[product.sums] -= 1
        if pending[product.sums]:
            return None
        del pending[product.sums]
        return self.sums[group].pop(product.sums)

    def changed(self, register: int, group: int) -> int:
        """The instruction that last wrote a register in a warp group."""
        found = self.machine.changed[register]
        return int(found[group]) if np.ndim(found) else int(found)

    def _gather(self, group: int, product: Product) -> Array:
        """[64, columns] of the fragments of the sums."""
        machine, lanes = self.machine, slice(group * GROUP, (group + 1) * GROUP)
        columns = 2 * len(product.sums)
        if not product.keep:
            return np.zeros((64, columns), np.float32)
        pieces = [machine.full(machine.values[i]).view(np.float32)[lanes] for i in product.sums]
        fragments = np.stack(pieces).reshape(columns // 8, 2, 2, 4, 8, 4)  # tile, half, element, warp, row, pair
        return np.ascontiguousarray(fragments.transpose(3, 1, 4, 0, 5, 2)).reshape(64, columns)

    def _write(self, registers: tuple[int, ...], pieces: list[tuple[int, Array]]) -> None:
        machine = self.machine
        for group, sums in pieces:
            tiles = sums.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)  # as in _gather
            fragments = np.ascontiguousarray(tiles).reshape(len(registers), GROUP)
            for i, values in zip(registers, fragments, strict=True):
                if group == pieces[0][0]:
                    machine.values[i] = np.array(machine.values[i]).view(np.float32)
                machine.values[i][group * GROUP : (group + 1) * GROUP] = values


def _values(words: Array, kind: str) -> Array:
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    return bf16_to_f32(words) if kind == "bf16" else words.view(np.float16).astype(np.float32)


def _product(form: Form, products: Products) -> Step:
    machine = form.machine
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", form.modifiers[0])
    kind = form.modifiers[-1]
    depth = 8 if kind == "tf32" else 16
    if shape is None or kind not in SHAPES or form.modifiers[1:] != ["f32", kind, kind] or int(shape[2]) != depth:
        raise Refused("only products of f16, bf16 and tf32 that are added in f32")
    form.modifiers.clear()
    columns, in_registers = int(shape[1]), isinstance(form.operands[1], Vector)
    flags = [operand.value if isinstance(operand, Number) else None for operand in form.operands[4:]]
    transposes = 0 if kind == "tf32" else 1 if in_registers else 2
    if flags[:2] != [1, 1] or len(flags) != 2 + transposes or any(flag not in (0, 1) for flag in flags):
        raise Refused("a sign, or flags that are no constants")
    transposed_b = bool(flags[-1]) if transposes else False
    transposed_a = bool(flags[2]) if transposes == 2 else False
    sums = _numbers(form, 0)
    for operand in form.items(0):
        machine.writer(operand, F32)  # checks the type
    if len(sums) != columns // 2 or (in_registers and len(form.items(1)) != 4):
        raise Refused("fragments of another size")
    fragments = _numbers(form, 1) if in_registers else ()
    a: list[Read] = [machine.reader(each, B32 if in_registers else B64) for each in form.items(1)]
    b, scale = form.reader(2, B64), form.reader(3, PRED)

    def step(mask: Mask) -> None:
        groups = products.groups(mask)
        keep = machine.full(scale(mask))[::GROUP]
        right = machine.full(b(mask))[::GROUP]
        left = [machine.full(read(mask)) for read in a]
        for group in groups:
            if products.fenced[group] < 0:
                machine.note("wgmma", "the first product comes before any wgmma.fence")
            written = [products.changed(i, group) for i in (*sums, *fragments)]
            if max(written) > products.fenced[group] and not products.under_way[group][sums]:
                machine.note("wgmma", "a register is written after the last wgmma.fence")
            at_b = _offsets(form, int(right[group]), columns, depth, transposed_b, kind, group)
            if in_registers:
                matrix, read = _fragments(left, group, kind), at_b
            else:
                matrix = _offsets(form, int(left[0][group * GROUP]), 64, depth, transposed_a, kind, group)
                read = np.concatenate([matrix.reshape(-1), at_b.reshape(-1)])
            noted = _note_read(form, group, read, kind)
            given = (matrix, at_b, bool(keep[group]), noted, fragments, machine.executed, machine.current)
            products.start(group, Product(kind, sums, *given))
        for i in sums:
            old = machine.values[i]
            nothing = np.full(machine.N, np.nan, np.float32)
            if mask is not None:
                old = nothing if old is None else machine.full(old).view(np.float32)
                nothing = np.where(mask, nothing, old)
            machine.values[i] = nothing
            machine.written[i] = True

    return step


def _lanes(group: int) -> Array:
    return np.arange(group * GROUP, (group + 1) * GROUP)


def _numbers(form: Form, index: int) -> tuple[int, ...]:
    names = [operand.name for operand in form.items(index) if isinstance(operand, Register)]
    if len(names) != len(form.items(index)):
        raise Refused("fragments that are no registers")
    return tuple(form.machine.number[name] for name in names)


def _fragments(words: list[Any], group: int, kind: str) -> Array:
    """[64, depth] of the registers of A."""
    lanes = slice(group * GROUP, (group + 1) * GROUP)
    pieces = []
    for each in words:
        rows = np.ascontiguousarray(each[lanes]).reshape(4, 8, 4)
        pieces.append(_values(rows if kind == "tf32" else rows.view(np.uint16), kind))
    halves = [np.concatenate([pieces[i], pieces[i + 1]], 1) for i in (0, 2)]  # [4, 16, depth / 2]
    return np.concatenate(halves, 2).reshape(64, -1)


def _offsets(form: Form, descriptor: int, rows: int, depth: int, transposed: bool, kind: str, group: int) -> Array:
    """Positions of a matrix [rows, depth] in shared memory, counted in elements (PTX ISA, matrix descriptor)."""
    machine = form.machine
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Refused("a descriptor with a base offset")
    swizzle = (16, 128, 64, 32)[descriptor >> 62]  # bytes of a row
    width = TYPES[kind].bits // 8
    i, j = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if transposed:
        panel = swizzle // width
        at = start + i // panel * leading + j // 8 * stride + j % 8 * swizzle + i % panel * width
    else:
        at = start + i // 8 * stride + i % 8 * swizzle + j * width
    at = swizzled(at, swizzle)
    lanes = np.full(at.size, group * GROUP)
    return machine.shared.offsets(at.reshape(-1), lanes, width).reshape(at.shape) // width


def _note_read(form: Form, group: int, elements: Array, kind: str) -> Array:
    """Check that wgmma may read these elements; returns their granules."""
    shared, note = form.machine.shared, form.machine.note
    pieces = np.unique(elements.reshape(-1) * (TYPES[kind].bits // 8) // 16) * 16
    places = shared.start_product(pieces, _lanes(group), note)
    unfenced = shared.missing_fence(places, _lanes(group))
    for copied, message in NO_FENCE.items():
        if (unfenced & (shared.copied[places] == copied)).any():
            note("proxy", message)
    return places
