"""Checks of the gates on the machine code of one CUDA kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

import networkx

from benchmarks.compilers.machine_code import Flow, branches, operation


class OverlappedLoop(NamedTuple):
    """The loop of the sm_90 forward kernel over tiles of keys."""

    instructions: int  # of a tile without a mask
    uniform: int  # of these, in the uniform datapath
    mask: int  # additional instructions of a masked tile
    exponentials: int
    overlapped: int  # of these, concurrent with the product with the values


def overlapped_loop(code):
    """Counts the innermost loop that waits for the scores while the product with the values is in progress."""
    wait = next(address for address, text in code if "DEPBAR.LE gsb0, 0x1" in text)
    end = next(address for address, text in code if "DEPBAR.LE gsb0, 0x0" in text and address > wait)
    jumps = branches(code)
    first, last = min(((to, at) for at, to in jumps if to <= wait <= at), key=lambda loop: loop[1] - loop[0])
    loop = [(address, text) for address, text in code if first <= address <= last]
    skipped = []  # code that branches skip in tiles without masks and non-finite values
    for at, to in jumps:
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
        sum(wait < address < end for address in exponentials),
    )


def dropout_instructions(code):
    """Instructions per element that a tile skips without dropout: the longest code that a branch skips."""
    found = [[text for address, text in code if at < address < to] for at, to in branches(code)]
    return max(
        len(inside) / sum(text.startswith("FSEL") for text in inside)
        for inside in found
        if any("-0x326172a9" in text for text in inside) and not any("GMMA" in text for text in inside)
    )


def registers_by_role(code):
    """The registers per thread used by the code after each `setmaxnreg`, by the number that it requests.

    Branches and calls are followed: ptxas emits parts of one role's code after that of another.
    """
    flow, found = Flow(code), dict[int, int]()
    for block, texts in flow.graph.nodes(data="texts"):
        for i, text in enumerate(texts):
            if "USETMAXREG" in text:
                after = [*texts[i + 1 :], *flow.texts(networkx.descendants(flow.graph, block) - {block})]
                requested = int(text.rpartition("0x")[2], 16)
                found[requested] = max([found.get(requested, 0), *map(_registers, after)])
    return found


def _registers(text):
    """One more than the highest register of an instruction, which names the first of a vector or accumulator."""
    name, _, operands = text.partition(" ")
    product, vector = re.match(r"HGMMA\.\d+x(\d+)", name), re.search(r"\.(64|128)\b", name)
    width = int(product[1]) // 2 if product else int(vector[1]) // 32 if vector else 1
    named = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
    wide = re.search(r"\bR(\d+)", re.sub(r"\[.*?\]", "", operands))
    return max([*named, int(wide[1]) + width - 1 if wide else -1], default=-1) + 1
