"""The loops of a kernel's machine code, and an upper bound on their fraction of the tensor or memory peak rate.

A quarter of a multiprocessor issues one instruction per clock; per warp, integers, comparisons and selections take one
or two clocks, special functions (exp2, reciprocals) eight. The bound is the time of a loop's matrix products, or bytes,
at the device's peak rate, divided by its issue time, assuming perfect overlap and one issue per instruction.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import networkx

from transformer_kernels.backends.triton import Capability, ceil_div

Code = Sequence[tuple[int, str]]
"""The instructions of a kernel with their addresses."""

CLASSES = {
    "matrix": r"HGMMA|HMMA|UTC.MMA",
    "special": r"MUFU",
    "float": r"FADD|FMUL|FFMA",
    "integer": r"(IADD3?|LOP3|LEA|SHF|PRMT|F?SEL|[IF]SETP|[IF]MNMX3?|VIADD\w*|VIMNMX\w*)\b",
    "convert": r"F2F|I2F|F2I",
    "shuffle": r"SHFL|C?REDUX",
    "shared": r"LDS|STS|LDSM|STSM",
    "tensor memory": r"LDTM|STTM|UTCCP",
    "wait": r"LDGDEPBAR|BAR|SYNCS|WARPGROUP|WARPSYNC|DEPBAR|FENCE|MEMBAR|UTCBAR",
    "global": r"LDG|STG|UTMALDG|UTMASTG",
    "spill": r"LDL|STL",
    "branch": r"BRA|EXIT|CALL|RET|BSSY|BSYNC",
}
"""Instruction classes by name prefix, first match; "other" are IMAD, moves, and uniform registers."""

_INSTRUCTION = re.compile(r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?);")
_BRANCH = re.compile(r"\b(?:BRA(?!\.DIV)|CALL)\S*\s+(?:[!~]?U?[PR]\w+,?\s*)*(0x[0-9a-f]+)")
"""BRA.DIV is taken by diverged warps only, which are rare in these kernels."""
_LEAVES = re.compile(r"BRA\S*\s+0x|EXIT|RET|BRX")
"""Instructions without fall-through, unless predicated."""


@dataclass(frozen=True)
class Device:
    """Figures of a GPU's data sheet, and of a multiprocessor in the programming guide."""

    name: str
    multiprocessors: int
    clock: float  # GHz
    memory: float  # GB/s
    matrix_flops: int  # per multiprocessor and clock on 16-bit operands
    shared: int  # KiB per multiprocessor
    warps: int = 64  # per multiprocessor
    programs: int = 32
    integer_clocks: int = 2  # per warp
    float_clocks: int = 1

    @property
    def bytes_of_a_multiprocessor(self) -> float:
        """Bytes of memory per multiprocessor and nanosecond."""
        return self.memory / self.multiprocessors

    @property
    def bytes(self) -> float:
        """Bytes of memory per quarter of a multiprocessor and clock."""
        return self.bytes_of_a_multiprocessor / (4 * self.clock)


DEVICES = {
    (8, 0): Device("A100", 108, 1.41, 2039, 2048, 164, float_clocks=2),  # 80 GB SXM
    (8, 6): Device("A10", 72, 1.695, 600, 1024, 100, warps=48, programs=16),
    (9, 0): Device("H100", 132, 1.83, 3350, 4096, 228),  # SXM
    (10, 0): Device("B200", 148, 1.856, 8000, 8192, 228),
    (12, 0): Device("RTX PRO 6000", 188, 2.617, 1792, 1024, 100, warps=48, programs=24, integer_clocks=1),
}
"""One GPU per capability. GeForce cards of 8.6 and 12.0 have half of that tensor rate with fp32 accumulation."""


@dataclass(frozen=True)
class Loop:
    """One loop, or a whole kernel without loops: instructions per warp and iteration, by class, and the bound."""

    instructions: int
    classes: Mapping[str, int]
    bound: float


def disassembler() -> str | None:
    """cuobjdump of a CUDA toolkit, else the one bundled with Triton."""
    spec = importlib.util.find_spec("triton")
    bundled = Path((spec and spec.origin) or ".").parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.is_file() else None)


def disassembled(cubin: Path) -> dict[str, Code]:
    """The machine code of each kernel in a cubin by mangled name; empty without cuobjdump."""
    tool = disassembler()
    if tool is None:
        return {}
    command = [tool, "-sass", str(cubin)]
    text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    parts = (part.split("\n", 1) for part in text.split("Function : ")[1:])
    return {
        name.strip(): shaped(
            [(int(found["address"], 16), found["text"].strip()) for found in _INSTRUCTION.finditer(body)]
        )
        for name, body in parts
    }


def shaped(code: Code) -> Code:
    """The code with the shape of each tcgen05 product, read from its descriptor, in its name, as for HGMMA."""
    found, uniform = [], dict[str, int]()
    for address, text in code:
        if moved := re.match(r"UMOV (UR\d+), (0x\w+)", operation(text)):
            uniform[moved[1]] = int(moved[2], 16)
        elif by := re.search(r"UTC(.)MMA.* idesc\[(UR\d+)\]", text):
            shape = uniform[by[2]]
            m, n, tf32 = 16 * (shape >> 24 & 31), 8 * (shape >> 17 & 63), (shape >> 7 & 7) == 2
            name = f"UTC{by[1]}MMA"
            text = text.replace(name, f"{name}.{m}x{n}x{8 if tf32 else 16}{'.TF32' if tf32 else ''}")
        found.append((address, text))
    return found


def operation(instruction: str) -> str:
    """An instruction without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction)


def branches(code: Code) -> list[tuple[int, int]]:
    """(from, to) addresses of each branch, including calls, which ptxas also uses as branches within a kernel."""
    found = ((address, _BRANCH.search(text)) for address, text in code)
    return [(address, int(match[1], 16)) for address, match in found if match]


def programs_of(registers: int, shared: int, num_warps: int, capability: Capability) -> int:
    """Programs per multiprocessor, limited by registers, shared memory and warps."""
    warps_of_a_quarter = 16384 // (8 * ceil_div(registers, 8) * 32)
    by_registers = 4 * warps_of_a_quarter // num_warps
    device = DEVICES[capability]
    by_shared = 1024 * device.shared // (128 * ceil_div(shared, 128) + 1024)
    return min(by_registers, by_shared, device.warps // num_warps, device.programs)


@dataclass(frozen=True)
class NaturalLoop:
    """A natural loop: its header, the blocks with a back edge, and all of its blocks."""

    latches: frozenset[int]
    blocks: frozenset[int]


class Flow:
    """The control flow graph: reachable basic blocks by the index of their first instruction."""

    def __init__(self, code: Code) -> None:
        index = {address: number for number, (address, _) in enumerate(code)}
        targets = {index[at]: index[to] for at, to in branches(code) if to in index}
        ends = {number + 1 for number, (_, text) in enumerate(code) if number in targets or _LEAVES.match(text)}
        starts = sorted({0, *targets.values(), *ends} - {len(code)})
        graph = networkx.DiGraph()
        for start, end in pairwise([*starts, len(code)]):
            graph.add_node(start, texts=[operation(text) for _, text in code[start:end]])
            if end - 1 in targets:
                graph.add_edge(start, targets[end - 1])
            if end < len(code) and not _LEAVES.match(code[end - 1][1]):
                graph.add_edge(start, end)
        self.graph = graph.subgraph({0} | networkx.descendants(graph, 0)).copy()
        above = networkx.immediate_dominators(self.graph, 0)
        tree = networkx.DiGraph((over, block) for block, over in above.items() if over not in (None, block))
        self.back = [
            (latch, head)
            for latch, head in self.graph.edges
            if latch == head or (latch in tree and head in networkx.ancestors(tree, latch))
        ]
        names = self.names(self.graph)
        copies = [name for name in names if re.match(r"LDGSTS|UTMALDG", name)]
        accesses = copies or [name for name in names if _class(name) == "global"]
        widest = max(map(bytes_of, accesses), default=0)
        self.work = {name for name in accesses if bytes_of(name) == widest}
        self.products = {name for name in names if _class(name) == "matrix"}

    def texts(self, blocks: Iterable[int]) -> list[str]:
        """The instructions of some blocks, without predicates."""
        return [text for block in blocks for text in self.graph.nodes[block]["texts"]]

    def names(self, blocks: Iterable[int]) -> list[str]:
        return [name_of(text) for text in self.texts(blocks)]

    def loops(self) -> list[NaturalLoop]:
        """Natural loops; loops with a common header are merged."""
        found = []
        for head in sorted({head for _, head in self.back}):
            latches = frozenset(latch for latch, to in self.back if to == head)
            blocks, ahead = {head}, list(latches)
            while ahead:
                if (block := ahead.pop()) not in blocks:
                    blocks.add(block)
                    ahead += self.graph.predecessors(block)
            found.append(NaturalLoop(latches, frozenset(blocks)))
        return found

    def whole(self) -> list[str]:
        """The instructions of one path through the kernel with all of its work, each loop traversed once."""
        ends = [block for block, texts in self.graph.nodes(data="texts") if texts[-1].startswith("EXIT")]
        return self.way(ends, self.graph)

    def way(self, ends: Collection[int], blocks: Collection[int]) -> list[str]:
        """The shortest path among those with most matrix products, then memory work, then special functions."""
        forward = self.graph.subgraph(blocks).copy()
        forward.remove_edges_from(self.back)
        best: dict[int, tuple[list[int], list[int]]] = {}
        for block in networkx.topological_sort(forward):
            reached = [best[before] for before in forward.predecessors(block) if before in best]
            value, way = max(reached, default=([0, 0, 0, 0], []))
            best[block] = ([a + b for a, b in zip(value, self._value(block), strict=True)], [*way, block])
        _, way = max(best[end] for end in ends if end in best)
        return self.texts(way)

    def _value(self, block: int) -> list[int]:
        """The weight of a block in the choice of a path. Memory work: the widest accesses, or asynchronous copies.

        Other loads, and special functions next to matrix products, may belong to options.
        """
        names = self.names([block])
        classes = Counter(map(_class, names))
        special = 0 if self.products else classes["special"]
        return [classes["matrix"], sum(name in self.work for name in names), special, -len(names)]


def loops_of(flow: Flow, capability: Capability, num_warps: int) -> list[Loop]:
    """The innermost loops with matrix products; else those with memory work; else the whole kernel.

    Instructions that an iteration may skip are excluded: the bound is that of the shortest path with all of the work. A
    loop with narrow accesses only, over the tail of a row, is ignored.
    """
    loops = flow.loops()
    for worked in (flow.products, flow.work):
        working = [loop for loop in loops if not worked.isdisjoint(flow.names(loop.blocks))]
        inner = [loop for loop in working if not any(other.blocks < loop.blocks for other in working)]
        if inner:
            return [_judged(flow.way(loop.latches, loop.blocks), capability, num_warps) for loop in inner]
    return [_judged(flow.whole(), capability, num_warps)]


def bytes_in_flight(flow: Flow) -> int:
    """The maximum number of bytes that a lane requests from global memory before it waits for any of them.

    From one path through the kernel with all of its work, each loop traversed once. Copies by subroutines and TMA are
    not included.
    """
    most, registers, pending, groups = 0, set[int](), 0, [0]
    for text in flow.whole():
        name, _, operands = text.partition(" ")
        if name.startswith("LDGSTS"):
            groups[-1] += bytes_of(name)
        elif name.startswith("LDGDEPBAR"):
            groups.append(0)
        elif waited := re.match(r"DEPBAR\.LE SB\d, 0x(\w+)", text):
            groups = groups[-1 - int(waited[1], 16) :]
        elif name.startswith("LDG") and (into := re.match(r"R(\d+)", operands)):
            pending += bytes_of(name)
            registers |= set(range(int(into[1]), int(into[1]) + max(1, bytes_of(name) // 4)))
        elif not name.startswith(("BRA", "BSSY", "BSYNC", "EXIT")):
            sources = operands if name.startswith("ST") else operands.partition(",")[2]
            if registers & {int(number) for number in re.findall(r"\bR(\d+)", sources)}:
                pending, registers = 0, set()
        most = max(most, pending + sum(groups))
    return most


def in_flight(flow: Flow, shared: int, num_warps: int, programs: int) -> int:
    """An upper bound on the bytes in flight per multiprocessor; with TMA the shared memory of its programs."""
    by_tma = any(name.startswith("UTMALDG") for name in flow.names(flow.graph))
    return programs * (shared if by_tma else 32 * num_warps * bytes_in_flight(flow))


def name_of(instruction: str) -> str:
    """The opcode with modifiers, such as LDG.E.128."""
    return operation(instruction).partition(" ")[0]


def bytes_of(name: str) -> int:
    """Bytes per lane of a load from or a store to global memory."""
    if not re.match(r"LDG\b|LDGSTS|STG", name):
        return 0
    width = re.search(r"\.(8|16|64|128)\b|\.[US](8|16)\b", name)
    return int(next(filter(None, width.groups()))) // 8 if width else 4


def _class(name: str) -> str:
    return next((label for label, start in CLASSES.items() if re.match(start, name)), "other")


def _judged(texts: list[str], capability: Capability, num_warps: int) -> Loop:
    """A loop with its bound: the time of its products or bytes over its issue time."""
    names = list(map(name_of, texts))
    classes = Counter(map(_class, names))
    device = DEVICES[capability]
    lanes = device.integer_clocks * classes["integer"], device.float_clocks * classes["float"]
    clocks = max(len(names), 8 * classes["special"], *lanes)
    flops = sum(_flops(name, num_warps) for name in names)
    moved = 32 * sum(map(bytes_of, names))
    wanted = 4 * flops / device.matrix_flops if flops else moved / device.bytes
    return Loop(len(names), dict(sorted(classes.items())), round(wanted / max(wanted, clocks), 3))


def _flops(name: str, num_warps: int) -> float:
    """FLOPs per warp of one matrix instruction; doubled for TF32, which has half the rate."""
    m: float
    if wide := re.match(r"(HG|UTC.)MMA\.(\d+)x(\d+)x(\d+)", name):
        m, n, k = map(int, wide.groups()[1:])
        m /= 4 if wide[1] == "HG" else num_warps  # of a warp group; one warp issues tcgen05 for the whole program
    elif small := re.match(r"HMMA\.168(16|8|4)\.", name):
        m, n, k = 16, 8, int(small[1])
    else:
        return 0
    return 2 * m * n * k * (2 if "TF32" in name else 1)
