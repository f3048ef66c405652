"""The forms of instructions that kernels contain: opcode, modifiers, and the types of the operands.

tests/ptx/opcodes.ptx has one instruction of each form in the launches that the gates compile. Add those of other
launches: python -m tests.support.ptx.census [--every N] [--operations softmax gelu]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import Global
from tests.support.ptx.syntax import (
    Address,
    Float,
    Instruction,
    Kernel,
    Negated,
    Number,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    parse,
)

FILE = Path(__file__).parents[2] / "ptx" / "opcodes.ptx"
HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.global .align 8 .b8 table[8] = {0, 0, 0, 0, 0, 0, 0, 0};
.visible .entry forms(.param .align 64 .b8 p[128])
.reqntid 128
{
"""
CLASSES = {"pred": "p", "b16": "rs", "b32": "r", "b64": "rd", "f32": "f", "f64": "fd"}
LITERAL = ("cp", "wgmma", "setmaxnreg", "bar", "barrier", "prmt", "lop3", "shfl")
"""Opcodes whose constants select what they do."""


def forms(kernel: Kernel) -> set[str]:
    """One instruction for each form, in PTX."""
    return {form_of(each, kernel) for each in kernel.code}


def form_of(instruction: Instruction, kernel: Kernel) -> str:
    """The instruction with its registers named by their types, in order."""
    names: dict[str, str] = {}

    def register(name: str) -> str:
        kind = kernel.registers[name]
        if kind not in CLASSES:
            raise ValueError(f"a register of {kind}")
        if name not in names:
            names[name] = f"%{CLASSES[kind]}{sum(kernel.registers[other] == kind for other in names)}"
        return names[name]

    def text(operand: Operand) -> str:
        match operand:
            case Register(name):
                return register(name)
            case Special(name):
                return name
            case Symbol(name) if name in kernel.labels:
                return "$END"
            case Symbol(name):
                return "memory" if name in kernel.shared else "table" if name in kernel.constants else "p"
            case Number(value):
                return str(value) if instruction.opcode in LITERAL else "1"
            case Float(_, size):
                return "0f3F800000" if size == 32 else "0d3FF0000000000000"
            case Vector(items):
                return f"{{{', '.join(map(text, items))}}}"
            case Address(base, _, coordinates):
                box = f", {{{', '.join(map(text, coordinates))}}}" if coordinates else ""
                return f"[{text(base)}{box}]"
            case Pair(first, second):
                return f"{text(first)}|{text(second)}"
            case Negated(inner):
                return f"!{text(inner)}"
            case Sink():
                return "_"
        raise ValueError(operand)

    name = ".".join((instruction.opcode, *instruction.modifiers))
    return f"{name} {', '.join(map(text, instruction.operands))}".strip() + ";"


def module(found: Iterable[str]) -> str:
    """A kernel of these instructions."""
    lines = sorted(set(found))
    count = {name: max((int(i) for line in lines for i in re.findall(rf"%{name}(\d+)", line)), default=0) + 1
             for name in CLASSES.values()}  # fmt: skip
    registers = [f".reg .{kind} %{name}<{count[name]}>;" for kind, name in CLASSES.items()]
    return HEAD + "\n".join([*registers, *lines, "$END:", "}", ""])


def read() -> set[str]:
    """The forms of the file."""
    return forms(parse(FILE.read_text())) if FILE.is_file() else set()


def decode(ptx: str) -> int:
    """Decode each instruction of a module, none of which runs; returns how many.

    Raises:
        Refused: one is not implemented.
    """
    kernel = parse(ptx)
    parameters = {name: bytes(size) for name, size in kernel.parameters}
    Machine(kernel, Global([], 4, False), parameters, (1, 1, 1), [0], kernel.threads or 32, 1 << 16, True)
    return len(kernel.code)


def of_launches(operations: Iterable[str], every: int) -> Iterator[set[str]]:
    """The forms of every n-th launch that the gates compile."""
    from benchmarks.compilers.triton import SERVED, TILED, launches
    from tests.support.ptx.launch import compile_launch

    for operation in operations:
        for capability in (*TILED, *(each for each in SERVED if each == (12, 0))):
            for launch in launches([operation], [capability])[::every]:
                yield forms(parse(compile_launch(launch).asm["ptx"]))


def main() -> None:
    from benchmarks.compilers.triton import OPERATIONS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--operations", nargs="*", default=OPERATIONS)
    given = parser.parse_args()
    found, before, launches = read(), len(read()), 0
    for each in of_launches(given.operations, given.every):
        found |= each
        launches += 1
    FILE.write_text(module(found))
    print(
        f"{launches} launches, {len(found)} forms, {len(found) - before} of them new: {decode(FILE.read_text())} known"
    )


if __name__ == "__main__":
    main()
