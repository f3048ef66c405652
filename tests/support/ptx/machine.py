"""Executes a kernel: the threads of some CTAs in step, their registers as arrays.

Diverged threads have separate program counters. The lowest runs first, so that threads reconverge at the compiler's
joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx.barriers import Barriers, meets_in_parts
from tests.support.ptx.form import Form, Read, Step, Write
from tests.support.ptx.instructions import CONTROL, HANDLERS
from tests.support.ptx.memory import GENERIC_SHARED, POISON, Global, Shared, address_of
from tests.support.ptx.races import Clock
from tests.support.ptx.syntax import (
    Address,
    Float,
    Instruction,
    Kernel,
    Negated,
    Number,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from tests.support.ptx.types import PRED, TYPES, U64, Array, Fault, Mask, Refused, Type
from tests.support.ptx.vector_clocks import VectorClock

Finding = tuple[str, str, str]
"""Kind, message and instruction."""

WARP_GROUP = 128
MAX_INSTRUCTIONS = 50_000_000


class Machine:
    """Some CTAs of a launch."""

    def __init__(
        self,
        kernel: Kernel,
        memory: Global,
        parameters: dict[str, bytes],
        grid: tuple[int, int, int],
        ctas: list[int],
        threads: int,
        shared: int,
        races: bool,
    ) -> None:
        if threads % 32 or (kernel.threads is not None and kernel.threads != threads):
            raise ValueError(f"ptx: {threads} threads for {kernel.name}, which needs {kernel.threads}")
        self.kernel, self.memory, self.parameters, self.threads = kernel, memory, parameters, threads
        self.N, self.W = len(ctas) * threads, len(ctas) * threads // 32
        self.lanes = np.arange(self.N)
        self.architecture = int("".join(c for c in kernel.target if c.isdigit()))
        self.at_end: list[Callable[[], None]] = []
        self.units: dict[Any, Any] = {}
        self.barriers: Barriers | None = None
        self.clock = Clock(np.asarray(ctas), threads)
        if len(ctas) == 1 and any(meets_in_parts(each, threads) for each in kernel.code):
            self.clock = VectorClock(ctas[0], threads)
            self.barriers = Barriers(self, self.clock)
        self.shared = Shared(len(ctas), shared, threads, self.clock, min(4, _narrowest(kernel, shared=True)), races)
        self.special = self._special(grid, np.asarray(ctas), shared)
        self.number = {name: i for i, name in enumerate(kernel.registers)}
        self.values: list[Any] = [None] * len(self.number)
        self.written = [False] * len(self.number)
        """By any thread; in the others a register is poisoned."""
        self.changed: list[Any] = [0] * len(self.number)
        """The instruction, counted as executed, that last wrote each register; of each warp group where they differ."""
        self.by_group = any(each.opcode == "wgmma" for each in kernel.code)
        self.executed = 0
        self.findings: Counter[Finding] = Counter()
        self.current = ""
        self.pc = np.zeros(self.N, np.int64)
        self.exited, self.waiting, self.held = (np.zeros(self.N, bool) for _ in range(3))
        """Threads at the end, at the barrier of the CTA, and at one of some threads."""
        self.registers = np.zeros(-(-self.N // WARP_GROUP), np.int64)
        """Of a thread of each warp group, by setmaxnreg."""
        self.holds: list[Step | None] = []
        self.steps = [self._decode(each) for each in kernel.code]

    def note(self, kind: str, message: str) -> None:
        """Record an error at the current instruction."""
        self.findings[kind, message, self.current] += 1

    def full(self, value: Any) -> Array:
        """One element per thread."""
        return value if isinstance(value, np.ndarray) and value.shape else np.broadcast_to(value, (self.N,))

    def lanes_of(self, mask: Mask) -> Array:
        return self.lanes if mask is None else np.nonzero(mask)[0]

    def groups_of(self, mask: Mask) -> Array:
        """Which warp groups have threads in a mask."""
        return np.asarray(np.ones(self.N, bool) if mask is None else mask).reshape(-1, WARP_GROUP).any(1)

    def whole_warps(self, mask: Mask, size: int = 32) -> None:
        """Fault if some threads of a warp (or of a group of `size`) have diverged."""
        if mask is not None:
            groups = mask.reshape(-1, size)
            if (groups.any(1) != groups.all(1)).any():
                raise Fault(f"a part of {'a warp' if size == 32 else f'{size} threads'} is missing")

    # Operands

    def reader(self, operand: Operand, type: Type, low: bool = False) -> Read:
        """Values of a type; with `low` the register may be wider, and its low bits are read."""
        if isinstance(operand, Register):
            return self._register_reader(operand.name, type, low)
        if isinstance(operand, Negated) and type is PRED:
            inner = self.reader(operand.register, PRED)
            return lambda mask: ~inner(mask)
        constant = self._constant(operand, type)
        return lambda mask: constant

    def _constant(self, operand: Operand, type: Type) -> Any:
        if isinstance(operand, Number):
            if type is PRED:
                return np.bool_(operand.value)
            return np.array([operand.value & (2**type.bits - 1)], type.unsigned).view(type.dtype)[0]
        if isinstance(operand, Float) and operand.size == type.bits:
            return np.array([operand.bits], type.unsigned).view(type.dtype)[0]
        if isinstance(operand, Special) and type.bits in (16, 32, 64):
            value = self.special[operand.name]
            return value.view(type.dtype) if type.bits == 32 else value.astype(type.dtype)
        if isinstance(operand, Symbol) and operand.name in self.kernel.shared:
            offset = GENERIC_SHARED if type.bits == 64 else 0
            return type.dtype.type(self.kernel.shared[operand.name] + offset)
        if isinstance(operand, Symbol) and operand.name in self.kernel.constants and type.bits == 64:
            return type.dtype.type(self.kernel.constants[operand.name].ctypes.data)
        if isinstance(operand, Symbol) and operand.name in self.parameters and type.bits == 64:
            return type.dtype.type(address_of(self.parameters[operand.name]))
        raise Refused(f"operand {operand} as {type.name}")

    def _register_reader(self, name: str, type: Type, low: bool) -> Read:
        i, declared, dtype = self.number[name], TYPES[self.kernel.registers[name]], type.dtype
        if (declared.bits != type.bits and not (low and declared.bits > type.bits > 1)) or (
            (declared is PRED) != (type is PRED)
        ):
            raise Refused(f"{name}, a register of {declared.name}, as {type.name}")
        values, written = self.values, self.written

        def read(mask: Mask) -> Any:
            if not written[i]:
                self._check_written(i, name, declared)
            value = values[i]
            return value if value.dtype is dtype else value.view(dtype)

        def read_low(mask: Mask) -> Any:
            if not written[i]:
                self._check_written(i, name, declared)
            return values[i].view(declared.unsigned).astype(type.unsigned).view(dtype)

        return read_low if declared.bits != type.bits else read

    def _check_written(self, i: int, name: str, declared: Type) -> None:
        """Compilers let lanes read what only others wrote (a reduction's last steps): those read poison."""
        if not self.written[i]:
            self.note("uninitialised", f"{name} is read before it is written")
        if self.values[i] is None:
            self.values[i] = np.full(self.N * declared.dtype.itemsize, POISON, np.uint8).view(declared.unsigned)

    def writer(self, operand: Operand, type: Type, wide: bool = False) -> Write:
        """Stores values of a type; with `wide` the register may be wider, and values are extended by their type."""
        if isinstance(operand, Sink):
            return lambda value, mask: None
        if not isinstance(operand, Register):
            raise Refused(f"destination {operand}")
        name = operand.name
        i, declared = self.number[name], TYPES[self.kernel.registers[name]]
        extends = wide and declared.bits > type.bits > 1
        if (declared.bits != type.bits and not extends) or ((declared is PRED) != (type is PRED)):
            raise Refused(f"{name}, a register of {declared.name}, for {type.name}")
        values, written, changed = self.values, self.written, self.changed
        signed = np.dtype(f"i{declared.dtype.itemsize}")

        def write(value: Any, mask: Mask) -> None:
            if extends:
                value = value.view(type.dtype).astype(signed if type.kind == "signed" else declared.unsigned)
            if mask is None:
                values[i], written[i], changed[i] = value, True, self.executed
                return
            if self.by_group:
                changed[i] = np.where(self.groups_of(mask), self.executed, changed[i])
            old = values[i]
            if old is None:
                old = np.full(self.N * declared.dtype.itemsize, POISON, np.uint8).view(declared.unsigned)
            if declared is PRED:
                values[i] = np.where(mask, value, old.astype(np.bool_))
            else:
                values[i] = np.where(mask, value.view(declared.unsigned), old.view(declared.unsigned))
            written[i] = True

        return write

    def address(self, operand: Operand, shared: bool) -> Read:
        """Addresses [N] in 64 bits."""
        if not isinstance(operand, Address) or operand.coordinates:
            raise Refused(f"{operand} as an address")
        offset = np.uint64(operand.offset & (2**64 - 1))
        base = operand.base
        if shared and isinstance(base, Symbol):
            constant = np.uint64(self.kernel.shared[base.name]) + offset
            return lambda mask: np.full(self.N, constant)
        bits = TYPES[self.kernel.registers[base.name]].bits if isinstance(base, Register) else 64
        if bits == 64:
            read = self.reader(base, U64)
            return lambda mask: self.full(read(mask)) + offset
        if not shared:
            raise Refused(f"{operand}: a global address of {bits} bits")
        short = self.reader(base, TYPES["u32"])
        return lambda mask: self.full(short(mask)).astype(np.uint64) + offset

    def _special(self, grid: tuple[int, int, int], ctas: Array, shared: int) -> dict[str, Array]:
        lanes, cta = self.lanes, np.repeat(ctas, self.threads)
        x, y = grid[0], grid[1]
        values: dict[str, Any] = {
            "%tid.x": lanes % self.threads, "%tid.y": 0, "%tid.z": 0,
            "%ntid.x": self.threads, "%ntid.y": 1, "%ntid.z": 1,
            "%ctaid.x": cta % x, "%ctaid.y": cta // x % y, "%ctaid.z": cta // (x * y),
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": grid[2],
            "%laneid": lanes % 32, "%warpid": lanes % self.threads // 32,
            "%cluster_ctarank": 0, "%dynamic_smem_size": shared - self.kernel.static_shared,
        }  # fmt: skip
        return {name: np.broadcast_to(np.asarray(value), (self.N,)).astype(np.uint32) for name, value in values.items()}

    # Execution

    def _decode(self, instruction: Instruction) -> Step | None:
        form = Form(self, instruction)
        holds = meets_in_parts(instruction, self.threads)
        is_control = instruction.opcode in CONTROL and "warp" not in instruction.modifiers
        table = CONTROL if is_control else HANDLERS
        if instruction.opcode not in table:
            raise Refused(f"ptx: {instruction.text}: no such instruction")
        try:
            step = table[instruction.opcode](form)
            form.finish()
        except Refused as reason:
            raise Refused(f"ptx: {instruction.text}: {reason}") from None
        self.holds.append(step if holds else None)
        return None if is_control or holds else step

    def run(self) -> None:
        """Run all CTAs to completion.

        Raises:
            Fault: as on a device, with the instruction.
        """
        try:
            with np.errstate(all="ignore"):
                self._walk()
        except Fault as fault:
            raise Fault(f"{self.kernel.name}: {fault}; at {self.current}") from None
        self.current = "the end"
        for check in self.at_end:
            check()

    def _walk(self) -> None:
        code, targets = self.kernel.code, self.kernel.targets
        predicates = [None if x.predicate is None else self.reader(x.predicate, PRED) for x in code]
        at, mask = 0, None  # the current instruction and its threads; None: all threads
        while True:
            if at < 0:  # choose
                if self.exited.all():
                    return
                at, mask = self._choose()
            instruction, step = code[at], self.steps[at]
            self.current = instruction.text
            self.executed += 1
            if self.executed > MAX_INSTRUCTIONS:
                raise Fault(f"more than {MAX_INSTRUCTIONS} instructions")
            active: Mask = mask
            if (predicate := predicates[at]) is not None:
                given = self.full(predicate(mask))
                active = ~given if instruction.negated else given
                if mask is not None:
                    active = mask & active
                elif active.all():
                    active = None
            if step is not None:
                if active is None or active is mask or active.any():
                    step(active)
                at += 1
                if mask is not None and at in targets:
                    self.pc[mask], at = at, -1
            elif mask is None and active is None and self.holds[at] is None:  # together
                if instruction.opcode == "bra":
                    at = instruction.target
                elif instruction.opcode in ("bar", "barrier"):
                    self.clock.barrier()
                    at += 1
                else:
                    self.exited[:] = True
                    at = -1
            else:
                self._part(at, mask, active)
                at = -1

    def _choose(self) -> tuple[int, Mask]:
        """The next instruction and its threads."""
        while True:
            ready = ~(self.exited | self.waiting | self.held)
            while ready.any():
                at = int(self.pc[ready].min())
                chosen = ready & (self.pc == at)
                if (late := self._late(at, chosen)) is None:
                    return at, None if chosen.all() else chosen
                ready &= ~late
            if not self._pass_barrier():
                waiting = self.barriers.describe() if self.barriers else ""
                raise Fault(f"no thread can go on: {waiting or 'threads of a CTA miss its barrier'}")

    def _late(self, at: int, chosen: Array) -> Mask:
        """Of an instruction that a warp (or a warp group) executes together: the threads that others are missing of,
        because a barrier of some threads holds them.
        """
        instruction = self.kernel.code[at]
        if self.barriers is None or "sync" not in instruction.modifiers:
            return None
        size = WARP_GROUP if instruction.opcode in ("wgmma", "setmaxnreg") else 32
        late = chosen.reshape(-1, size).any(1) & self.held.reshape(-1, size).any(1)
        return np.repeat(late, size) if late.any() else None

    def _part(self, at: int, mask: Mask, active: Mask) -> None:
        """Execute an instruction after which threads of the mask may diverge."""
        instruction = self.kernel.code[at]
        here = np.ones(self.N, bool) if mask is None else mask
        taken = here if active is None else active
        self.pc[here] = at + 1
        if (hold := self.holds[at]) is not None:
            if taken.any():
                hold(taken)
        elif instruction.opcode == "bra":
            self.pc[taken] = instruction.target
        elif instruction.opcode in ("bar", "barrier"):
            self.waiting |= taken
        else:
            self.exited |= taken

    def _pass_barrier(self) -> bool:
        """Release the CTAs whose threads all wait at the barrier; returns whether there are any."""
        shape = (-1, self.threads)
        waiting, exited = self.waiting, self.exited
        passing = (waiting | exited).reshape(shape).all(1) & waiting.reshape(shape).any(1)
        stops = np.where(waiting, self.pc, -1).reshape(shape)
        if (((stops != stops.max(1, keepdims=True)) & (stops >= 0)).any(1) & passing).any():
            self.note("barrier", "threads of one CTA wait at different barriers")
        if (exited & np.repeat(passing, self.threads)).any():
            self.note("barrier", "some threads of a CTA have left when others wait at a barrier")
        lanes = np.nonzero(np.repeat(passing, self.threads))[0]
        if not len(lanes):
            return False
        waiting[lanes] = False
        self.clock.barrier(lanes)
        return True


def _narrowest(kernel: Kernel, shared: bool) -> int:
    """Bytes of the smallest access to shared (or global) memory."""
    sizes = [16]
    for each in kernel.code:
        is_shared = any(modifier.startswith("shared") for modifier in each.modifiers)
        if each.opcode in ("ld", "st", "atom", "red") and is_shared == shared and "param" not in each.modifiers:
            sizes.append(TYPES[each.modifiers[-1]].bits // 8)
        elif each.opcode in ("ldmatrix", "stmatrix", "cp", "wgmma"):
            sizes.append(4)
    return min(sizes)


def narrowest_global(kernel: Kernel) -> int:
    """Bytes that global memory is divided into to look for races."""
    return min(_narrowest(kernel, shared=False), 4)
