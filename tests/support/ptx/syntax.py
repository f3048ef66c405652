"""Parses one entry of a PTX module into a list of instructions; unknown syntax is rejected."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from tests.support.ptx.types import TYPES, Array, Refused

SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|cluster_ctarank|dynamic_smem_size)$")
SHARED_BASE = 1024
"""The first address of shared memory: not 0, and aligned to the largest swizzle of wgmma."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or a variable."""

    name: str


@dataclass(frozen=True)
class Number:
    value: int


@dataclass(frozen=True)
class Float:
    """A constant by its bits, 32 or 64 of them."""

    bits: int
    size: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int
    coordinates: tuple[Operand, ...] = ()
    """Of a box, where the base is the address of a tensor map."""


@dataclass(frozen=True)
class Pair:
    """Two destinations: `%p1|%p2`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    register: Operand


@dataclass(frozen=True)
class Sink:
    """`_`: an unused result, a constant 0, or an omitted argument."""


Operand = Register | Special | Symbol | Number | Float | Vector | Address | Pair | Negated | Sink


@dataclass
class Instruction:
    """`@!predicate opcode.modifiers operands`."""

    text: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Operand | None = None
    negated: bool = False
    target: int = -1


@dataclass
class Kernel:
    """One entry of a module."""

    name: str
    target: str
    parameters: list[tuple[str, int]] = field(default_factory=list)
    threads: int | None = None
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    constants: dict[str, Array] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> set[int]:
        """Instructions that a branch leads to."""
        return {each.target for each in self.code if each.opcode == "bra"}


def parse(text: str, entry: str = "") -> Kernel:
    """The entry of a module whose name contains `entry`.

    Raises:
        Refused: a directive, an operand or a register that is not known. ValueError: not one such entry.
    """
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    pattern = r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{"
    heads = [match for match in re.finditer(pattern, text) if entry in match[1]]
    if len(heads) != 1:
        raise ValueError(f"ptx: expected one entry with {entry!r} in its name; found {[head[1] for head in heads]}")
    head = heads[0]
    target = re.search(r"\.target\s+(sm_\w+)", text)
    if target is None or ".address_size 64" not in text:
        raise Refused("ptx: no .target, or not .address_size 64")
    kernel = Kernel(head[1], target[1], parameters=[_parameter(each) for each in head[2].split(",") if each.strip()])
    for directive in re.findall(r"\.\w+[^.\n]*", head[3]):
        name, *values = re.split(r"[\s,]+", directive.strip())
        if name in (".reqntid", ".maxntid"):
            if [int(value) for value in values[1:]] not in ([], [1], [1, 1]):
                raise Refused(f"ptx: {directive}")
            kernel.threads = int(values[0]) if name == ".reqntid" else None
        elif name not in (".minnctapersm", ".maxnreg"):
            raise Refused(f"ptx: {directive}")
    _variables(text, kernel)
    _Body(text, head.end(), kernel).read()
    for each in kernel.code:
        if each.opcode == "bra":
            (label,) = each.operands
            assert isinstance(label, Symbol)
            each.target = kernel.labels[label.name]
    return kernel


def _parameter(text: str) -> tuple[str, int]:
    """Name and bytes."""
    if array := re.search(r"\.b8\s+([\w$]+)\[(\d+)\]", text):
        return array[1], int(array[2])
    kind = re.search(r"\.([busf]\d+)\b", text)
    if kind is None:
        raise Refused(f"ptx: parameter {text.strip()}")
    return text.split()[-1], TYPES[kind[1]].dtype.itemsize


def _variables(text: str, kernel: Kernel) -> None:
    declared = re.finditer(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]", text)
    for found in sorted(declared, key=lambda found: not found[3]):  # without a size, after the others
        alignment = int(found[1])
        kernel.static_shared = -(-kernel.static_shared // alignment) * alignment
        kernel.shared[found[2]] = SHARED_BASE + kernel.static_shared
        kernel.static_shared += int(found[3] or 0)
    for found in re.finditer(r"\.(?:global|const)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}", text):
        kernel.constants[found[1]] = np.array([int(value) for value in found[2].split(",")], np.uint8)


class _Body:
    """Reads statements; names declared in braces hide those outside."""

    def __init__(self, text: str, start: int, kernel: Kernel) -> None:
        self.text, self.at, self.kernel = text, start, kernel
        self.scopes: list[dict[str, str]] = [{}]
        self.opened = 0

    def read(self) -> None:
        space, label = re.compile(r"\s*"), re.compile(r"([\w$]+):(?!:)")
        location = re.compile(r"\.(loc|file)\s[^\n]*\n|\.pragma\s[^;]*;")
        while self.scopes:
            match = space.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.text[self.at] == "{":
                self.at, self.opened = self.at + 1, self.opened + 1
                self.scopes.append({name: f"{name}~{self.opened}" for name in self._labels_of_scope()})
            elif self.text[self.at] == "}":
                self.at += 1
                self.scopes.pop()
            elif match := label.match(self.text, self.at):
                self.kernel.labels[self._name(match[1])] = len(self.kernel.code)
                self.at = match.end()
            elif match := location.match(self.text, self.at):
                self.at = match.end()
            else:
                end = self.text.index(";", self.at)
                statement = " ".join(self.text[self.at : end].split())
                self.at = end + 1
                self._statement(statement)

    def _statement(self, statement: str) -> None:
        if statement.startswith(".reg"):
            self._declare(statement)
        elif statement.startswith(".shared"):
            pass  # read by _variables
        elif statement.startswith("."):
            raise Refused(f"ptx: {statement}")
        elif statement:
            self.kernel.code.append(self._instruction(statement))

    def _declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        if kind[1:] not in TYPES:
            raise Refused(f"ptx: {statement}")
        for name in (each.strip() for each in names.split(",")):
            if match := re.fullmatch(r"([\w%$]+)<(\d+)>", name):
                declared = [f"{match[1]}{i}" for i in range(int(match[2]))]
            else:
                declared = [name]
            for each in declared:
                inner = each if len(self.scopes) == 1 else f"{each}~{self.opened}"
                self.scopes[-1][each] = inner
                self.kernel.registers[inner] = kind[1:]

    def _instruction(self, text: str) -> Instruction:
        predicate, negated, rest = None, False, text
        if match := re.match(r"@(!?)([%\w$.]+)\s+(.*)", text, re.S):
            negated, predicate, rest = match[1] == "!", self._operand(match[2]), match[3]
        name, _, operands = rest.partition(" ")
        opcode, *modifiers = re.split(r"(?<!:)\.(?!:)", name)
        parsed = tuple(self._operand(each) for each in _split(operands))
        return Instruction(text, opcode, tuple(modifiers), parsed, predicate, negated)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(each) for each in _split(text[1:-1])))
        if text.startswith("["):
            match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?(?:,\s*\{([^}]*)\}\s*)?\]", text)
            if match is None:
                raise Refused(f"ptx: address {text}")
            coordinates = tuple(self._operand(each) for each in _split(match[3] or ""))
            return Address(self._operand(match[1]), int(match[2] or "0", 0), coordinates)
        if text.startswith("!"):
            return Negated(self._operand(text[1:].strip()))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Float(int(match[1] or match[2], 16), 32 if match[1] else 64)
        if re.fullmatch(r"\d+\.\d+", text):
            return Float(int(np.float64(text).view(np.uint64)), 64)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Number(int(text.rstrip("U"), 0))
        if text == "_":
            return Sink()
        name = self._name(text)
        if name in self.kernel.registers:
            return Register(name)
        if SPECIAL.match(name):
            return Special(name)
        if re.fullmatch(r"[A-Za-z_$][\w$~]*", name):
            return Symbol(name)
        raise Refused(f"ptx: operand {text}")

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _labels_of_scope(self) -> set[str]:
        """The labels of the scope that begins here, which may be used before their position."""
        depth, end = 1, self.at
        while depth:
            depth += (self.text[end] == "{") - (self.text[end] == "}")
            end += 1
        return set(re.findall(r"(?:^|[;{}\s])([A-Za-z_$][\w$]*):(?!:)", self.text[self.at : end]))


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    if not any(bracket in text for bracket in "{[("):
        return [each.strip() for each in text.split(",")] if text.strip() else []
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found
