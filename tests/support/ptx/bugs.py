"""Bugs planted in PTX, one at a time, and the calls that must detect them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tests.support.arguments import normal
from tests.support.operations import CPU
from tests.support.ptx.cases import KNOWN, Outcome, forward
from tests.support.ptx.launch import Edit
from tests.support.ptx.types import Fault

CALLS: dict[str, Callable[[Edit | None], Outcome]] = {
    "layer_norm sm_80": lambda edit: _layer_norm("sm_80", edit),
    "attention sm_80": lambda edit: _attention("sm_80", edit),
    "attention sm_90": lambda edit: _attention("sm_90", edit),
}
BARRIER = r"\bbar\.sync\s+0;"
WAIT = r"\bcp\.async\.wait_group\s+(\d+);"
WGMMA_WAIT = r"\bwgmma\.wait_group\.sync\.aligned\s+(\d+);"
FRAGMENTS = r"(mma\.sync\S+\s+\{[^}]*\},\s+\{)([^}]*)(\},\s+\{)([^}]*)(\})"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+ \+ )0( \], \[ %rd\d+ \+ )0"
STORE = r"@%p\d+ (st\.global\S+ \[ %rd\d+ \+ )0"


def _layer_norm(target: str, edit: Edit | None) -> Outcome:
    shapes = {"x": (9, 300), "weight": (300,), "bias": (300,)}
    tensors = {
        name: normal(*shape, dtype=torch.float16, device=CPU, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    return forward("layer_norm", target, tensors, {}, edit)


def _attention(target: str, edit: Edit | None) -> Outcome:
    tensors = {name: normal(1, 1, 300, 64, dtype=torch.bfloat16, device=CPU, seed=i) for i, name in enumerate("qkv")}
    return forward("attention", target, tensors, {"causal": True}, edit)


@dataclass(frozen=True)
class Kind:
    """An edit of the matches of a pattern; `most` of them are tried, spread over the kernel."""

    name: str
    pattern: str
    replace: Callable[[re.Match[str]], str]
    calls: tuple[str, ...]
    most: int = 100


def _swapped(group: int, i: int, j: int) -> Callable[[re.Match[str]], str]:
    """Registers i and j of the fragment in a group."""

    def replace(match: re.Match[str]) -> str:
        registers = [each.strip() for each in match[group].split(",")]
        registers[i], registers[j] = registers[j], registers[i]
        return "".join(" ".join(("", ", ".join(registers))) if n == group else match[n] for n in range(1, 6))

    return replace


def _without(match: re.Match[str]) -> str:
    return ""


ALL, ATTENTION, HOPPER = tuple(CALLS), ("attention sm_80", "attention sm_90"), ("attention sm_90",)
AMPERE = ("attention sm_80",)
KINDS = (
    Kind("without bar.sync", BARRIER, _without, ALL),
    Kind("without wait_group", WAIT, _without, ATTENTION),
    Kind("wait_group of one group less", WAIT, lambda m: f"cp.async.wait_group {int(m[1]) + 1};", ATTENTION),
    Kind("without commit_group", r"\bcp\.async\.commit_group;", _without, ATTENTION),
    Kind("copy 16 bytes further in shared memory", COPY, lambda m: f"{m[1]}16{m[2]}0", ATTENTION, 3),
    Kind("copy from 16 bytes further", COPY, lambda m: f"{m[1]}0{m[2]}16", ATTENTION, 3),
    Kind("tail of a copy not masked", r"(selp\.b32\s+%r\d+, 16), 0,", lambda m: f"{m[1]}, 16,", ATTENTION, 3),
    Kind("store 16 bytes further", STORE, lambda m: m[0][:-1] + "16", ALL, 2),
    Kind("tail of a store not masked", STORE, lambda m: m[1] + "0", ("layer_norm sm_80",), 2),
    Kind("store under the other predicate", r"@(%p\d+ st\.global)", lambda m: f"@!{m[1]}", ALL, 2),
    Kind("shuffle of another distance", r"(shfl\.sync\.bfly\.b32 [^,]+, [^,]+, )2", lambda m: m[1] + "4", ALL, 2),
    Kind("product that is a sum", r"\bmul\.f32", lambda m: "add.f32", ALL, 2),
    Kind("comparison reversed", r"\bsetp\.lt\.s32", lambda m: "setp.ge.s32", ALL, 2),
    Kind("registers of A swapped", FRAGMENTS, _swapped(2, 1, 2), AMPERE, 3),
    Kind("registers of B swapped", FRAGMENTS, _swapped(4, 0, 1), AMPERE, 3),
    Kind(
        "operands of a product swapped",
        r"(ldmatrix\S+ \{)([^,]*), ([^,]*)",
        lambda m: f"{m[1]}{m[3]}, {m[2]}",
        AMPERE,
        3,
    ),
    Kind("ldmatrix not transposed", r"\.trans\.shared", lambda m: ".shared", AMPERE, 2),
    Kind("ldmatrix transposed", r"(ldmatrix\S+x4)\.shared", lambda m: f"{m[1]}.trans.shared", AMPERE, 2),
    Kind("without fence.proxy.async", r"\bfence\.proxy\.async\S*;", _without, HOPPER),
    Kind("without wgmma.fence", r"\bwgmma\.fence\.sync\.aligned;", _without, HOPPER),
    Kind("without wgmma wait", WGMMA_WAIT, _without, HOPPER),
    Kind("wgmma transposed", r"(wgmma\.mma_async[^;]*), 0;", lambda m: f"{m[1]}, 1;", HOPPER, 2),
    Kind("wgmma not transposed", r"(wgmma\.mma_async[^;]*), 1;", lambda m: f"{m[1]}, 0;", HOPPER, 2),
    Kind("wgmma without commit", r"\bwgmma\.commit_group\.sync\.aligned;", _without, HOPPER),
)


def planted(call: str) -> dict[str, tuple[Kind, int]]:
    """The bugs of one call by name: their kind, and which match is edited."""
    found: dict[str, str] = {}

    def keep(name: str, ptx: str) -> str:
        found[name] = ptx
        return ptx

    CALLS[call](keep)
    (ptx,) = found.values()
    return dict(_planted(call, ptx))


def _planted(call: str, ptx: str) -> Iterator[tuple[str, tuple[Kind, int]]]:
    for kind in KINDS:
        if call in kind.calls:
            matches = len(re.findall(kind.pattern, ptx))
            chosen = sorted({i * matches // min(kind.most, matches) for i in range(min(kind.most, matches))})
            for i in chosen:
                yield f"{call}: {kind.name}, {i + 1} of {matches}", (kind, i)


def verdict(call: str, kind: Kind, index: int) -> str:
    """How a bug is detected: a report, a fault, a wrong result; or "nothing"."""

    def edit(name: str, ptx: str) -> str:
        match = list(re.finditer(kind.pattern, ptx))[index]
        return ptx[: match.start()] + kind.replace(match) + ptx[match.end() :]

    try:
        outcome = CALLS[call](edit)
    except Fault as fault:
        return f"fault: {fault}"
    except AssertionError as error:
        return f"result: {error}"
    reported = outcome.findings.keys() - KNOWN
    return f"report: {min(reported)}" if reported else ""


def survey(call: str) -> dict[str, str]:
    """The verdict on every bug of a call."""
    return {name: verdict(call, kind, index) for name, (kind, index) in planted(call).items()}
