"""Barriers of some threads of a CTA: named ones (`bar.sync 1, 256`), and mbarriers, which count arrivals and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx.form import Form, Step, Table
from tests.support.ptx.memory import granules
from tests.support.ptx.syntax import Instruction, Number, Sink
from tests.support.ptx.types import PRED, U32, Array, Fault, Mask, Refused
from tests.support.ptx.vector_clocks import MAX_BARRIERS, WHO, WHO_BITS, VectorClock

if TYPE_CHECKING:
    from tests.support.ptx.machine import Machine

TABLE = Table()
SHARED = ("shared", "shared::cta")
UNORDERED_INIT = "an mbarrier is used although nothing orders its initialisation before"
UNFENCED_INIT = "a tensor copy counts on an mbarrier that was initialised without a fence"


def meets_in_parts(instruction: Instruction, threads: int) -> bool:
    """Whether an instruction synchronises some threads of a CTA and not all."""
    if instruction.opcode not in ("bar", "barrier") or "warp" in instruction.modifiers:
        return instruction.opcode == "mbarrier"
    whole = (Number(0), Number(threads))[: len(instruction.operands)]
    return "sync" not in instruction.modifiers or instruction.operands != whole


@dataclass
class Mbarrier:
    """One in shared memory."""

    name: str
    arrivals: int
    agent: int
    initialised: int
    """By whom and when, as an access."""
    gathered: Array
    """The vector clocks of the arrivals of this phase."""
    missing: int = 0
    bytes: int = 0
    phase: int = 0
    fenced: bool = False
    published: Array = field(init=False)
    """What a thread learns that waits for a phase before this one."""
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    """Under way: bytes, and what puts them there."""
    waiting: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing, self.published = self.arrivals, self.gathered.copy()

    def __str__(self) -> str:
        return (
            f"{self.name} (phase of parity {self.phase & 1}, {self.missing} of {self.arrivals} arrivals and "
            f"{self.bytes} bytes missing)"
        )


class Barriers:
    """The barriers of a CTA: mbarriers by offset, and the lanes at each named barrier."""

    def __init__(self, machine: Machine, clock: VectorClock) -> None:
        self.machine, self.clock = machine, clock
        self.mbarriers: dict[int, Mbarrier] = {}
        self.arrived: dict[int, list[tuple[int, Array]]] = {}
        """The number of threads, and their vector clocks on arrival."""
        self.waiting: dict[int, list[Array]] = {}
        machine.at_end.append(self.check_end)

    def check_end(self) -> None:
        for each in self.mbarriers.values():
            if each.copies:
                self.machine.note("mbarrier", "a tensor copy that is never waited for")
            elif each.bytes:
                self.machine.note("mbarrier", "the kernel ends while an mbarrier expects bytes")
        if any(self.arrived.values()):
            self.machine.note("barrier", "threads that have arrived at a named barrier which is never complete")

    def describe(self) -> str:
        """The blocked lanes, with the barrier of each."""
        lines = [
            f"thread {lanes[0]} waits at {each}" for each in self.mbarriers.values() for lanes in each.waiting[-1:]
        ]
        lines += [f"thread {lanes[0][0]} waits at barrier {id}" for id, lanes in self.waiting.items() if lanes]
        return "; ".join(lines)

    # Named barriers

    def meet(self, lanes: Array, id: int, threads: int, wait: bool) -> None:
        """Arrive at a named barrier of `threads` threads, with or without waiting."""
        machine = self.machine
        if not 0 <= id <= 15 or threads % 32 or not 32 <= threads <= machine.threads:
            raise Fault(f"barrier {id} of {threads} threads")
        self.arrived.setdefault(id, []).append((len(lanes), self.clock.release(lanes)))
        if wait:
            self.waiting.setdefault(id, []).append(lanes)
            machine.held[lanes] = True
        count = sum(each for each, _ in self.arrived[id])
        if count > threads:
            raise Fault(f"{count} threads at barrier {id} of {threads}")
        if count == threads:
            vectors = [vector for _, vector in self.arrived.pop(id)]
            waiting = np.concatenate(self.waiting.pop(id, [lanes[:0]]))
            self.clock.acquire(waiting, np.max(vectors, 0))
            machine.held[waiting] = False

    # Mbarriers

    def initialise(self, lane: int, offset: int, arrivals: int) -> None:
        if not 1 <= arrivals < 1 << 20:
            raise Fault(f"an mbarrier of {arrivals} arrivals")
        if len(self.mbarriers) == MAX_BARRIERS:
            raise Refused(f"more than {MAX_BARRIERS} mbarriers")
        if offset in self.mbarriers:
            raise Fault(f"{self.mbarriers[offset]} is initialised again")
        shared, lanes = self.machine.shared, np.array([lane])
        shared.note("write", np.array([offset]), lanes, 8, self.machine.note)
        shared.opaque[granules(np.array([offset]), 8, shared.granule)] = True
        agent = self.clock.threads + len(self.mbarriers)
        code = int(self.clock.codes(lanes)[0])
        nothing = np.zeros(self.clock.known.shape[1], np.int32)
        self.mbarriers[offset] = Mbarrier(f"mbarrier {len(self.mbarriers)}", arrivals, agent, code, nothing)

    def invalidate(self, lane: int, offset: int) -> None:
        self.at(np.array([lane]), offset)
        shared = self.machine.shared
        shared.opaque[granules(np.array([offset]), 8, shared.granule)] = False
        shared.note("write", np.array([offset]), np.array([lane]), 8, self.machine.note)
        gone = self.mbarriers.pop(offset)
        if gone.copies or gone.bytes:
            self.machine.note("mbarrier", "an mbarrier is given up while copies are under way")

    def at(self, lanes: Array, offset: int) -> Mbarrier:
        """The mbarrier that these lanes use."""
        if offset not in self.mbarriers:
            raise Fault(f"byte {offset} of shared memory is no mbarrier")
        found = self.mbarriers[offset]
        if self.clock.unordered(np.full(len(lanes), found.initialised), lanes).any():
            self.machine.note("race", UNORDERED_INIT)
        return found

    def fence(self, lanes: Array) -> None:
        """The mbarriers that these lanes have initialised are visible to the copy engine."""
        for each in self.mbarriers.values():
            each.fenced |= bool((lanes == (each.initialised & WHO)).any())

    def arrive(self, lane: int, offset: int, count: int, expected: int) -> None:
        """Count arrivals and expected bytes."""
        barrier = self.at(np.array([lane]), offset)
        if count > barrier.missing:
            raise Fault(f"more arrivals than the initialisation announced: {barrier}")
        if count:
            np.maximum(barrier.gathered, self.clock.release(np.array([lane])), out=barrier.gathered)
        barrier.bytes += expected
        barrier.missing -= count
        self._finish_phase(barrier)

    def copy(self, barrier: Mbarrier, size: int, land: Callable[[], None]) -> int:
        """Start a copy whose bytes are counted; returns its write as an access."""
        if not barrier.fenced:
            self.machine.note("proxy", UNFENCED_INIT)
        barrier.copies.append((size, land))
        self._wake(barrier)  # pending copies continue while a thread waits
        return (barrier.phase + 1) << WHO_BITS | barrier.agent

    def wait(self, lanes: Array, offsets: Array, parities: Array) -> Array:
        """The lanes whose phase (by parity) is complete; the others block until it is."""
        passed = np.zeros(len(lanes), bool)
        for offset in np.unique(offsets):
            here = offsets == offset
            barrier = self.at(lanes[here], int(offset))
            parity = np.unique(parities[here])
            while barrier.copies and (barrier.phase & 1) in parity:  # copies complete no earlier than a wait
                size, land = barrier.copies.pop(0)
                land()
                barrier.bytes -= size
                self._finish_phase(barrier)
            there = here & (parities != (barrier.phase & 1))
            self.clock.acquire(lanes[there], barrier.published)
            passed |= there
            if (stay := lanes[here & ~there]).size:
                barrier.waiting.append(stay)
                self.machine.held[stay] = True
        return passed

    def _finish_phase(self, barrier: Mbarrier) -> None:
        if barrier.missing:
            return
        if barrier.bytes < 0:
            raise Fault(f"more bytes are copied than expected: {barrier}")
        if barrier.bytes:
            return
        barrier.phase += 1
        barrier.missing = barrier.arrivals
        np.maximum(barrier.published, barrier.gathered, out=barrier.published)
        barrier.published[barrier.agent] = barrier.phase
        barrier.gathered[:] = 0
        self._wake(barrier)

    def _wake(self, barrier: Mbarrier) -> None:
        for lanes in barrier.waiting:
            self.machine.held[lanes] = False
        barrier.waiting.clear()


def barriers_of(form: Form) -> Barriers:
    if form.machine.barriers is None:
        raise Refused("a barrier of some threads where several CTAs run together")
    return form.machine.barriers


def named(form: Form) -> Step:
    """`bar.sync id, threads` and `bar.arrive id, threads`, by whole warps; a Step that may block its lanes."""
    wait = form.need("sync", "arrive") == "sync"
    form.take("cta")
    form.take("aligned")
    form.count(*((1, 2) if wait else (2,)))
    machine, barriers = form.machine, barriers_of(form)
    id = form.reader(0, U32)
    threads = form.reader(1, U32) if len(form.operands) == 2 else None

    def step(mask: Mask) -> None:
        machine.whole_warps(mask)
        ids = machine.full(id(mask))
        counts = machine.full(np.uint32(machine.threads) if threads is None else threads(mask))
        lanes = machine.lanes_of(mask)
        for each in np.unique(ids[lanes]):
            here = lanes[ids[lanes] == each]
            if len(wanted := np.unique(counts[here])) > 1:
                raise Fault(f"threads of barrier {each} disagree about their number")
            barriers.meet(here, int(each), int(wanted[0]), wait)

    return step


def _order(form: Form, *orders: str) -> None:
    form.take(*orders)
    form.take("cta", "cluster")


def _offsets(form: Form, index: int) -> Callable[[Mask], tuple[Array, Array]]:
    """Lanes, and the offset of an mbarrier for each."""
    machine = form.machine
    address = machine.address(form.operands[index], True)

    def read(mask: Mask) -> tuple[Array, Array]:
        lanes = machine.lanes_of(mask)
        return lanes, machine.shared.offsets(address(mask)[lanes], lanes, 8)

    return read


@TABLE.add("mbarrier")
def _mbarrier(form: Form) -> Step:
    what = form.need("init", "inval", "arrive", "expect_tx", "try_wait")
    expects = what == "expect_tx" or (what == "arrive" and bool(form.take("expect_tx")))
    if what == "try_wait":
        return _try_wait(form)
    _order(form, "release", "relaxed")
    form.need(*SHARED)
    form.type("b64")
    machine, barriers = form.machine, barriers_of(form)
    first = 0
    if what == "arrive":
        if not isinstance(form.operands[0], Sink):
            raise Refused("the state of an mbarrier as a result")
        first = 1
    form.count(*{"init": (2,), "inval": (1,), "expect_tx": (2,)}.get(what, (3,) if expects else (2, 3)))
    offsets = _offsets(form, first)
    number = form.reader(first + 1, U32) if len(form.operands) > first + 1 else None

    def step(mask: Mask) -> None:
        lanes, at = offsets(mask)
        numbers = machine.full(np.uint32(1) if number is None else number(mask))[lanes]
        for lane, offset, count in zip(lanes.tolist(), at.tolist(), numbers.tolist(), strict=True):
            if what == "init":
                barriers.initialise(lane, offset, count)
            elif what == "inval":
                barriers.invalidate(lane, offset)
            elif expects:
                barriers.arrive(lane, offset, int(what == "arrive"), count)
            else:
                barriers.arrive(lane, offset, count, 0)

    return step


def _try_wait(form: Form) -> Step:
    """`try_wait` that blocks until the phase completes, as the ISA permits: its loop iterates at most once more."""
    form.need("parity")
    _order(form, "acquire")
    form.need(*SHARED)
    form.type("b64")
    form.count(3, 4)
    machine, barriers = form.machine, barriers_of(form)
    write, offsets, parity = form.writer(0, PRED), _offsets(form, 1), form.reader(2, U32)
    if len(form.operands) == 4:
        form.reader(3, U32)  # timeout

    def step(mask: Mask) -> None:
        lanes, at = offsets(mask)
        parities = machine.full(parity(mask))[lanes]
        if (parities > 1).any():
            raise Fault("a parity that is neither 0 nor 1")
        passed = barriers.wait(lanes, at, parities)
        everyone: Any = np.zeros(machine.N, bool)
        everyone[lanes[passed]] = True
        write(np.bool_(True), everyone)
        machine.pc[lanes[~passed]] -= 1

    return step
