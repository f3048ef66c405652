"""`cp.async.bulk.tensor`: the copy engine moves boxes of tensors to shared memory and back.

An mbarrier counts the bytes that arrive in shared memory; copies from there belong to groups that a thread waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.support.ptx.barriers import barriers_of
from tests.support.ptx.form import Form, Step
from tests.support.ptx.memory import POISON
from tests.support.ptx.syntax import SHARED_BASE, Address
from tests.support.ptx.tensor_maps import BYTES, TensorMap
from tests.support.ptx.types import TYPES, U64, Array, Fault, Mask, Refused

WORD = 8
Box = tuple[TensorMap, tuple[int, ...]]
"""A map and the indices of the first element."""


def bulk(form: Form) -> Step:
    """What follows `cp.async.bulk`."""
    if not form.take("tensor"):
        return _groups(form)
    rank = int(form.need("1d", "2d", "3d", "4d", "5d")[0])
    source = form.instruction.modifiers[4]
    form.need("global")
    form.need("shared::cluster", "shared::cta")
    form.take("tile")
    loads = source != "global"
    form.need("mbarrier::complete_tx::bytes" if loads else "bulk_group")
    operands = 3 if loads else 2
    if form.take("L2::cache_hint"):
        form.reader(operands, U64)
        operands += 1
    form.count(operands)
    return _load(form, rank) if loads else _store(form, rank)


def _load(form: Form, rank: int) -> Step:
    """.shared::cluster.global.tile.mbarrier::complete_tx::bytes [to], [map, {...}], [barrier]"""
    machine, box = form.machine, _box(form, 1, rank)
    barriers_of(form)  # required
    destination, counter = machine.address(form.operands[0], True), machine.address(form.operands[2], True)

    def step(mask: Mask) -> None:
        lanes = machine.lanes_of(mask)
        to, at = destination(mask), machine.shared.offsets(counter(mask)[lanes], lanes, 8)
        for lane, offset in zip(lanes.tolist(), at.tolist(), strict=True):
            _start_load(form, lane, *box(mask, lane), int(to[lane]), offset)

    return step


def _store(form: Form, rank: int) -> Step:
    """.global.shared::cta.tile.bulk_group [map, {...}], [from]"""
    machine, box, stores = form.machine, _box(form, 0, rank), form.unit(Stores)
    source = machine.address(form.operands[1], True)

    def step(mask: Mask) -> None:
        from_ = source(mask)
        for lane in machine.lanes_of(mask).tolist():
            stores.start(lane, *box(mask, lane), int(from_[lane]))

    return step


def _groups(form: Form) -> Step:
    stores, lanes_of = form.unit(Stores), form.machine.lanes_of
    if form.need("commit_group", "wait_group") == "commit_group":
        form.count(0)
        return lambda mask: stores.commit(lanes_of(mask))
    form.take("read")
    groups = form.groups()
    return lambda mask: stores.wait(lanes_of(mask), groups)


def _box(form: Form, index: int, rank: int) -> Callable[[Mask, int], Box]:
    """The box that a lane names."""
    machine, operand = form.machine, form.operands[index]
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise Refused(f"{operand} as a box of {rank} axes")
    base = machine.address(Address(operand.base, operand.offset), False)
    readers = [machine.reader(each, TYPES["s32"]) for each in operand.coordinates]

    def box(mask: Mask, lane: int) -> Box:
        first, who = int(base(mask)[lane]), np.full(BYTES // WORD, lane)
        words = np.arange(first, first + BYTES, WORD, dtype=np.uint64)
        data = machine.memory.load(words, who, WORD, 1, machine.clock, machine.note)
        tensor_map = TensorMap.unpack(data[0].tobytes())
        if len(tensor_map.sizes) != rank:
            raise Fault(f"a box of {rank} axes of a tensor of {len(tensor_map.sizes)}")
        return tensor_map, tuple(int(machine.full(read(mask))[lane]) for read in readers)

    return box


def _positions(form: Form, lane: int, tensor_map: TensorMap, start: int) -> Array:
    """Offsets of a box's elements in shared memory."""
    if start % (8 * tensor_map.swizzle or 128):
        raise Fault(f"a box at byte {start - SHARED_BASE} of shared memory, in a swizzle of {tensor_map.swizzle}")
    positions = tensor_map.positions(start).astype(np.uint64)
    return form.machine.shared.offsets(positions, np.full(len(positions), lane), tensor_map.width)


def _start_load(form: Form, lane: int, tensor_map: TensorMap, first: tuple[int, ...], to: int, counter: int) -> None:
    """Bytes are read at issue, poisoned in shared memory, and arrive at a wait."""
    machine = form.machine
    barriers, shared, width = barriers_of(form), machine.shared, tensor_map.width
    addresses, inside = tensor_map.elements(first)
    data = np.zeros(len(addresses), f"u{width}")
    if count := int(np.count_nonzero(inside)):
        chosen, who = addresses[inside].astype(np.uint64), np.full(count, lane)
        data[inside] = machine.memory.load(chosen, who, width, 1, machine.clock, machine.note)[0]
    at, words = _positions(form, lane, tensor_map, to), shared.views[width]

    def land() -> None:
        shared.arriving[places] -= 1
        words[at // width] = data

    code = barriers.copy(barriers.at(np.array([lane]), counter), tensor_map.box_bytes, land)
    places = shared.start_tensor_copy(np.unique(at // 16) * 16, lane, code, machine.note)
    words[at // width] = int.from_bytes(bytes([POISON]) * width, "little")


@dataclass
class Store:
    """Bytes of shared memory that the copy engine reads, for a lane."""

    lane: int
    pieces: Array


class Stores:
    """Copies from shared memory under way, by lane: not committed, and in groups."""

    def __init__(self, form: Form) -> None:
        self.form, self.machine = form, form.machine
        self.open: dict[int, list[Store]] = {}
        self.groups: dict[int, list[list[Store]]] = {}
        self.machine.at_end.append(self.check_end)

    def check_end(self) -> None:
        if any(self.open.values()) or any(any(groups) for groups in self.groups.values()):
            self.machine.note("tensor copy", "a copy from shared memory that is never waited for")

    def start(self, lane: int, tensor_map: TensorMap, first: tuple[int, ...], start: int) -> None:
        machine, shared, width = self.machine, self.machine.shared, tensor_map.width
        at = _positions(self.form, lane, tensor_map, start)
        store = Store(lane, np.unique(at // 16) * 16)
        shared.start_store(store.pieces, lane, machine.note)
        addresses, inside = tensor_map.elements(first)
        values = shared.views[width][at // width][inside]
        who = np.full(len(values), lane)
        machine.memory.store(addresses[inside].astype(np.uint64), who, [values], width, machine.clock, machine.note)
        self.open.setdefault(lane, []).append(store)

    def commit(self, lanes: Array) -> None:
        for lane in lanes.tolist():
            self.groups.setdefault(lane, []).append(self.open.pop(lane, []))

    def wait(self, lanes: Array, groups: int) -> None:
        for lane in lanes.tolist():
            mine = self.groups.get(lane, [])
            while len(mine) > groups:
                for store in mine.pop(0):
                    self.machine.shared.finish_store(store.pieces, lane, self.machine.note)
