"""The decoded form of an instruction: its modifiers, all of which a handler must consume, and typed operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.ptx.syntax import Instruction, Number, Operand, Pair, Sink, Vector
from tests.support.ptx.types import TYPES, Mask, Refused, Type

if TYPE_CHECKING:
    from tests.support.ptx.machine import Machine

Read = Callable[[Mask], Any]
"""An operand's values for the threads of a mask: an array of all threads, or one number for all."""
Write = Callable[[Any, Mask], None]
Step = Callable[[Mask], None]
Unit = TypeVar("Unit")
Handler = Callable[["Form"], Step]


class Form:
    """One decoded instruction; `finish` rejects modifiers that no handler consumed."""

    def __init__(self, machine: Machine, instruction: Instruction) -> None:
        self.machine, self.instruction = machine, instruction
        self.modifiers = list(instruction.modifiers)
        self.operands = instruction.operands

    def take(self, *names: str) -> str:
        """The modifier among `names`, or ""."""
        for name in names:
            if name in self.modifiers:
                self.modifiers.remove(name)
                return name
        return ""

    def need(self, *names: str) -> str:
        """The required modifier among `names`."""
        if not (found := self.take(*names)):
            raise Refused(f"expected one of .{', .'.join(names)}")
        return found

    def type(self, *names: str) -> Type:
        """The last modifier, which must be one of these types."""
        if not self.modifiers or self.modifiers[-1] not in names:
            raise Refused(f"the type must be one of {', '.join(names)}")
        return TYPES[self.modifiers.pop()]

    def count(self, *counts: int) -> int:
        """The number of operands, one of `counts`."""
        if len(self.operands) not in counts:
            raise Refused(f"{len(self.operands)} operands")
        return len(self.operands)

    def finish(self) -> None:
        if self.modifiers:
            raise Refused(f"modifiers .{'.'.join(self.modifiers)}")

    def reader(self, index: int, type: Type, low: bool = False) -> Read:
        return self.machine.reader(self.operands[index], type, low)

    def readers(self, first: int, type: Type) -> list[Read]:
        return [self.machine.reader(operand, type) for operand in self.operands[first:]]

    def writer(self, index: int, type: Type, wide: bool = False) -> Write:
        return self.machine.writer(self.operands[index], type, wide)

    def unit(self, kind: Callable[[Form], Unit]) -> Unit:
        """The state of an asynchronous unit of the machine, made at its first instruction."""
        if kind not in self.machine.units:
            self.machine.units[kind] = kind(self)
        found: Unit = self.machine.units[kind]
        return found

    def items(self, index: int) -> tuple[Operand, ...]:
        """The elements of a vector, or the single operand."""
        operand = self.operands[index]
        return operand.items if isinstance(operand, Vector) else (operand,)

    def groups(self) -> int:
        """The only operand, a constant number of groups."""
        self.count(1)
        (number,) = self.operands
        if not isinstance(number, Number):
            raise Refused("a number of groups that is no constant")
        return number.value

    def pair(self, index: int) -> tuple[Operand, Operand]:
        operand = self.operands[index]
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


class Table(dict[str, Handler]):
    """Handlers by opcode."""

    def add(self, *opcodes: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.update(dict.fromkeys(opcodes, handler))
            return handler

        return register
