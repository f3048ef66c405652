"""The loops of a kernel's machine code, and the share of the tensor or memory rate that they cannot exceed.

A quarter of a multiprocessor issues one instruction a clock and computes special functions (exp2, reciprocals) for four
lanes a clock. What a loop needs of these is set against what its matrix products, or its bytes, take at the peak rate
of the device, as if all else overlapped perfectly and each instruction were issued once: a bound, never a speed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from transformer_kernels.backends.triton import Capability, ceil_div

CLASSES = {
    "matrix": r"HGMMA|HMMA",
    "special": r"MUFU",
    "float": r"FADD|FMUL|FFMA",
    "convert": r"F2F|I2F|F2I|PRMT",
    "shuffle": r"SHFL|REDUX",
    "shared": r"LDS|STS|LDSM|STSM",
    "wait": r"LDGDEPBAR|BAR|SYNCS|WARPGROUP|WARPSYNC|DEPBAR|FENCE|MEMBAR",
    "global": r"LDG|STG|UTMALDG|UTMASTG",
    "spill": r"LDL|STL",
    "branch": r"BRA|EXIT|CALL|RET|BSSY|BSYNC",
}
"""Instructions by how their names begin, the first that fits; what is left (integers, selections, moves) is "other"."""

INSTRUCTION = re.compile(r"(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.[\w.]+)?)\b(.*)")
LABEL = re.compile(r"(\.L_\w+):")


@dataclass(frozen=True)
class Device:
    """What the data sheet says of one multiprocessor, and bytes of memory for each of its quarters a clock."""

    matrix_flops: int  # of 16-bit operands, a clock
    bytes: float
    shared: int  # that all of its programs may use together


DEVICES = {
    (8, 0): Device(2048, 2.039e12 / (4 * 108 * 1.41e9), 164 * 1024),  # A100 80 GB SXM
    (9, 0): Device(4096, 3.35e12 / (4 * 132 * 1.83e9), 228 * 1024),  # H100 SXM
}


@dataclass(frozen=True)
class Loop:
    """One innermost loop, or the whole of a kernel without one: instructions of a warp, by class, and the bound."""

    instructions: int
    classes: Mapping[str, int]
    bound: float


def programs_of(registers: int, shared: int, num_warps: int, capability: Capability) -> int:
    """How many programs of a launch fit on a multiprocessor: by registers, shared memory and warps."""
    by_registers = 65536 // (8 * ceil_div(registers, 8) * 32 * num_warps)
    by_shared = DEVICES[capability].shared // (shared + 1024)
    return min(by_registers, by_shared, 64 // num_warps, 32)


def loops_of(sass: str, num_warps: int, capability: Capability) -> list[Loop]:
    """The innermost loops with matrix products; without any, those that read memory; without those, the whole."""
    items = _parse(sass)
    bodies = _innermost(items)
    for worked in (r"HGMMA|HMMA", r"LDG|UTMALDG"):
        chosen = [body for body in bodies if any(re.match(worked, name) for name in body)]
        if chosen:
            return [_judged(body, num_warps, capability) for body in chosen]
    return [_judged([item for item in items if not item.startswith(".")], num_warps, capability)]


def _parse(sass: str) -> list[str]:
    """Labels, which begin with a point, and instructions in order; of a branch also where it goes to."""
    found = []
    for line in sass.splitlines():
        text = line.strip()
        if label := LABEL.match(text):
            found.append(label[1])
        elif text.startswith("/*") and (instruction := INSTRUCTION.match(text)):
            target = re.search(r"`\((\.L_\w+)\)", instruction[2])
            found.append(f"{instruction[1]} {target[1]}" if target else instruction[1])
    return found


def _innermost(items: list[str]) -> list[list[str]]:
    """The instructions of each loop that holds no other one, labels left out."""
    places = {item: index for index, item in enumerate(items) if item.startswith(".")}
    spans = []
    for index, item in enumerate(items):
        name, _, target = item.partition(" ")
        if name.startswith("BRA") and places.get(target, index) < index:
            spans.append((places[target], index))
    inner = [
        (start, end)
        for start, end in spans
        if not any(other != (start, end) and start <= other[0] and other[1] <= end for other in spans)
    ]
    return [[item for item in items[start : end + 1] if not item.startswith(".")] for start, end in inner]


def _judged(body: list[str], num_warps: int, capability: Capability) -> Loop:
    names = [item.partition(" ")[0] for item in body]
    classes = Counter(
        next((label for label, start in CLASSES.items() if re.match(start, name)), "other") for name in names
    )
    device = DEVICES[capability]
    warps = num_warps / 4  # of each quarter
    float_clocks = classes["float"] * (2 if capability == (8, 0) else 1)
    clocks = warps * max(len(names), 8 * classes["special"], float_clocks)
    flops = sum(_flops(name) * (num_warps / 4 if name.startswith("HGMMA") else num_warps) for name in names)
    moved = 32 * warps * sum(_bytes(name) for name in names)
    wanted = flops / device.matrix_flops if flops else moved / device.bytes
    return Loop(len(names), dict(sorted(classes.items())), round(wanted / max(wanted, clocks), 3))


def _flops(name: str) -> int:
    """Those of one matrix instruction, TF32 twice, as it takes twice the time."""
    if wide := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        m, n, k = map(int, wide.groups())
    elif small := re.match(r"HMMA\.168(16|8|4)\.", name):
        m, n, k = 16, 8, int(small[1])
    else:
        return 0
    return 2 * m * n * k * (2 if "TF32" in name else 1)


def _bytes(name: str) -> int:
    """What one lane of a load from or a store to global memory moves."""
    if not re.match(r"LDG|STG", name):
        return 0
    width = re.search(r"\.(8|16|64|128)\b|\.[US](8|16)\b", name)
    return int(next(filter(None, width.groups()))) // 8 if width else 4
