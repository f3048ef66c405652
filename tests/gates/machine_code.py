"""Questions to the machine code of CUDA kernels: lists of (address, instruction) as cuobjdump prints them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

Code = Sequence[tuple[int, str]]

_BRANCH = re.compile(r"\bBRA\S*\s+(?:!?U?P\w+,\s*)*(0x[0-9a-f]+)")
_WIDE_LOAD = re.compile(r"LDG\S*\.128\S*\s+R(\d+),")


def operation(instruction: str) -> str:
    """An instruction without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction)


def _branches(code: Code) -> list[tuple[int, int]]:
    """(from, to) of each branch."""
    found = ((address, _BRANCH.search(text)) for address, text in code)
    return [(address, int(match[1], 16)) for address, match in found if match]


class OverlappedLoop(NamedTuple):
    """The loop of the sm_90 forward kernel over tiles of keys."""

    instructions: int  # of a tile that needs no mask
    uniform: int  # of these, in the uniform datapath
    mask: int  # more in a tile that needs one
    exponentials: int
    overlapped: int  # of these, beside the product with the values


def overlapped_loop(code: Code) -> OverlappedLoop:
    """Counts the innermost loop that waits for the scores while the product with the values goes on."""
    place = next(address for address, text in code if "DEPBAR.LE gsb0, 0x1" in text)
    end = next(address for address, text in code if "DEPBAR.LE gsb0, 0x0" in text and address > place)
    branches = _branches(code)
    first, last = min(((to, at) for at, to in branches if to <= place <= at), key=lambda loop: loop[1] - loop[0])
    loop = [(address, text) for address, text in code if first <= address <= last]
    skipped = []  # what branches jump over where there is nothing to mask, to quarantine or to search
    for at, to in branches:
        inside = [text for address, text in loop if at < address < to]
        if first <= at < to <= last and inside and not any(re.search("GMMA|EX2|DEPBAR", text) for text in inside):
            skipped.append((at, to, sum("-INF" in text for text in inside)))
    plain = [text for address, text in loop if not any(at < address < to for at, to, _ in skipped)]
    at, to, _ = max(skipped, key=lambda block: block[2])
    exponentials = [address for address, text in loop if "MUFU.EX2" in text]
    return OverlappedLoop(
        len(plain),
        sum(operation(text).startswith(("U", "R2UR")) for text in plain),
        sum(at < address < to for address, _ in loop),
        len(exponentials),
        sum(place < address < end for address in exponentials),
    )


def wide_loads_in_flight(code: Code) -> int:
    """The most 16-byte loads that stand before an instruction that reads what one of them brings."""
    most, pending, registers = 0, 0, set[int]()
    for _, text in code:
        name, _, operands = operation(text).partition(" ")
        load = _WIDE_LOAD.match(operation(text))
        if load:
            pending += 1
            most = max(most, pending)
            registers |= set(range(int(load[1]), int(load[1]) + 4))
        elif not name.startswith(("BRA", "BSSY", "BSYNC", "EXIT")):
            sources = operands if name.startswith("ST") else operands.partition(",")[2]
            if registers & {int(number) for number in re.findall(r"\bR(\d+)", sources)}:
                pending, registers = 0, set()
    return most
