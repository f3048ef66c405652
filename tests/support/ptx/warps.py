"""Warp-level instructions: shuffles, votes, reductions, and matrices of 8 x 8 in shared memory."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.form import Form, Read, Step, Table
from tests.support.ptx.syntax import Number, Operand
from tests.support.ptx.types import B32, PRED, U32, Array, Fault, Mask, Refused

TABLE = Table()
REGISTERS, WARP_GROUP = 65536, 128
"""Registers of a multiprocessor."""
BITS = np.arange(32, dtype=np.int64)
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


def _check_members(form: Form, members: Read, mask: Mask) -> None:
    """A fault unless every lane of the member mask is here, and only they."""
    machine = form.machine
    wanted = machine.full(members(mask)).astype(np.int64)
    here = np.ones(machine.N, bool) if mask is None else mask
    present = np.repeat((here.reshape(-1, 32) << BITS).sum(1), 32)
    if (wanted[here] != present[here]).any():
        raise Fault("lanes of the member mask are missing, or others are here")


@TABLE.add("shfl")
def _shuffle(form: Form) -> Step:
    form.need("sync")
    mode = form.need("bfly", "idx", "up", "down")
    form.type("b32")
    form.count(5)
    destination, predicate = form.pair(0)
    machine = form.machine
    write, write_inside = machine.writer(destination, B32), machine.writer(predicate, PRED)
    value, by, clamp, members = form.reader(1, B32), form.reader(2, U32), form.reader(3, U32), form.reader(4, U32)
    lane = machine.lanes % 32
    first = machine.lanes - lane

    def step(mask: Mask) -> None:
        _check_members(form, members, mask)
        distance = np.asarray(by(mask)).astype(np.int64) & 31
        limits = np.asarray(clamp(mask)).astype(np.int64)
        segment, limit = limits >> 8 & 31, limits & 31
        least, most = lane & segment, (lane & segment) | (limit & ~segment & 31)
        if mode == "bfly":
            source = lane ^ distance
        elif mode == "idx":
            source = least | (distance & ~segment & 31)
        else:
            source = lane - distance if mode == "up" else lane + distance
        inside = source >= most if mode == "up" else source <= most
        write(machine.full(value(mask))[first + np.where(inside, source, lane)], mask)
        write_inside(inside, mask)

    return step


@TABLE.add("vote", "activemask")
def _vote(form: Form) -> Step:
    machine = form.machine
    if form.instruction.opcode == "activemask":
        form.type("b32")
        write = form.writer(0, B32)
        return lambda mask: write(_ballot(np.ones(machine.N, bool) if mask is None else mask), mask)
    form.need("sync")
    kind = form.need("ballot", "any", "all")
    type = form.type("b32" if kind == "ballot" else "pred")
    form.count(3)
    write, predicate, members = form.writer(0, type), form.reader(1, PRED), form.reader(2, U32)

    def step(mask: Mask) -> None:
        _check_members(form, members, mask)
        given = machine.full(predicate(mask))
        here = np.ones(machine.N, bool) if mask is None else mask
        if kind == "ballot":
            write(_ballot(given & here), mask)
        else:
            warps = (given & here if kind == "any" else given | ~here).reshape(-1, 32)
            write(np.repeat(warps.any(1) if kind == "any" else warps.all(1), 32), mask)

    return step


def _ballot(given: Array) -> Array:
    return np.repeat((given.reshape(-1, 32) << BITS).sum(1).astype(np.uint32), 32)


@TABLE.add("redux")
def _reduce(form: Form) -> Step:
    form.need("sync")
    function = REDUCTIONS[form.need(*REDUCTIONS)]
    type = form.type("u32", "s32", "b32")
    form.count(3)
    machine = form.machine
    write, value, members = form.writer(0, type), form.reader(1, type), form.reader(2, U32)

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        _check_members(form, members, mask)
        warps = machine.full(value(mask)).reshape(-1, 32)
        write(np.repeat(function.reduce(warps, 1, dtype=type.dtype), 32), mask)

    return step


@TABLE.add("bar")
def _warp_barrier(form: Form) -> Step:
    form.need("warp")
    form.need("sync")
    form.count(1)
    members, machine = form.reader(0, U32), form.machine

    def step(mask: Mask) -> None:
        _check_members(form, members, mask)
        machine.clock.warp_barrier(slice(None) if mask is None else mask)

    return step


@TABLE.add("setmaxnreg")
def _set_registers(form: Form) -> Step:
    """Registers move between warp groups; only ptxas checks that each has enough."""
    form.need("inc", "dec")
    form.need("sync")
    form.need("aligned")
    form.type("u32")
    form.count(1)
    (number,) = form.operands
    machine = form.machine
    if not isinstance(number, Number) or machine.threads % WARP_GROUP:
        raise Refused("a number of registers that is no constant, or no warp groups")
    count = number.value
    if count % 8 or not 24 <= count <= 256:
        raise Refused(f"{count} registers: not a multiple of 8 from 24 to 256")

    def step(mask: Mask) -> None:
        machine.whole_warps(mask, WARP_GROUP)
        machine.registers[machine.groups_of(mask)] = count
        given = REGISTERS // machine.threads // 8 * 8
        if (
            machine.registers.reshape(-1, machine.threads // WARP_GROUP).sum(1).max() * WARP_GROUP
            > given * machine.threads
        ):
            raise Fault(f"setmaxnreg: the warp groups ask for more than the {given} registers of each thread")

    return step


@TABLE.add("elect")
def _elect(form: Form) -> Step:
    form.need("sync")
    form.count(2)
    destination, predicate = form.pair(0)
    machine, members = form.machine, form.reader(1, U32)
    write, write_elected = machine.writer(destination, B32), machine.writer(predicate, PRED)

    def step(mask: Mask) -> None:
        _check_members(form, members, mask)
        machine.whole_warps(mask)
        write(np.uint32(0), mask)
        write_elected(machine.lanes % 32 == 0, mask)

    return step


def _matrices(form: Form, operand: int) -> tuple[tuple[Operand, ...], bool]:
    """A register of the operand for each matrix, and whether matrices are transposed."""
    for name in ("sync", "aligned", "m8n8"):
        form.need(name)
    count = int(form.need("x1", "x2", "x4")[1])
    transposed = bool(form.take("trans"))
    form.need("shared", "shared::cta")
    form.type("b16")
    form.count(2)
    if len(items := form.items(operand)) != count:
        raise Refused(f"{len(items)} registers")
    return items, transposed


def _rows(form: Form, addresses: Array, mask: Mask, count: int) -> tuple[Array, Array, Array]:
    """Of the warps that are here: their numbers, the lanes that give an address each, and its offset."""
    machine = form.machine
    machine.whole_warps(mask)
    warps = np.arange(machine.W) if mask is None else np.nonzero(mask[::32])[0]
    lanes = (warps[:, None] * 32 + np.arange(8 * count)).reshape(-1)
    return warps, lanes, machine.shared.offsets(addresses[lanes], lanes, 16)


@TABLE.add("ldmatrix")
def _load_matrices(form: Form) -> Step:
    machine, (items, transposed) = form.machine, _matrices(form, 0)
    count = len(items)
    writers = [machine.writer(each, B32) for each in items]
    address = machine.address(form.operands[1], True)

    def step(mask: Mask) -> None:
        warps, lanes, at = _rows(form, address(mask), mask, count)
        machine.shared.note("read", at, lanes, 16, machine.note)
        tiles = machine.shared.views[2][at[:, None] // 2 + np.arange(8)].reshape(len(warps), count, 8, 8)
        if transposed:
            tiles = tiles.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(tiles).view(np.uint32)  # [warps, count, 8, 4]: lane 4 row + column
        for i, write in enumerate(writers):
            values = np.zeros((machine.W, 32), np.uint32)
            values[warps] = words[:, i].reshape(-1, 32)
            write(values.reshape(-1), mask)

    return step


@TABLE.add("stmatrix")
def _store_matrices(form: Form) -> Step:
    machine, (items, transposed) = form.machine, _matrices(form, 1)
    count = len(items)
    readers = [machine.reader(each, B32) for each in items]
    address = machine.address(form.operands[0], True)

    def step(mask: Mask) -> None:
        addresses = address(mask)
        warps, lanes, _ = _rows(form, addresses, mask, count)
        words = np.stack([machine.full(read(mask)).reshape(-1, 8, 4) for read in readers], 1)[warps]
        tiles = np.ascontiguousarray(words).view(np.uint16)  # [warps, count, 8, 8]
        if transposed:
            tiles = tiles.transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(tiles).reshape(-1, 8).view(np.uint64)  # 16 bytes each
        machine.shared.store(addresses[lanes], lanes, [rows[:, 0], rows[:, 1]], 8, machine.note)

    return step
