"""The Hopper forward kernel by the PTX that nvcc makes for sm_90a: its calls, and bugs planted in their PTX."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from python_ref.ops import rotary_table
from tests.support.arguments import normal
from tests.support.operations import CPU
from tests.support.parity import check_parity
from tests.support.ptx.cases import Outcome, outcome, poisoned, problems
from tests.support.ptx.cuda import by_ptx
from tests.support.ptx.launch import Edit
from tests.support.ptx.types import Fault
from transformer_kernels.ops.attention import _compiled

Tensors = dict[str, Tensor | None]


def tensors(dtype: torch.dtype, queries: int, keys: int, width: int, heads: int = 1) -> Tensors:
    shapes = {"q": (1, heads, queries, width), "k": (1, 1, keys, width), "v": (1, 1, keys, width)}
    return {
        name: normal(*shape, dtype=dtype, device=CPU, seed=i).detach() for i, (name, shape) in enumerate(shapes.items())
    }


def padding(keys: int) -> Tensor:
    """Real keys, with padding between them and a tile of padding alone."""
    mask = torch.ones(1, keys, dtype=torch.bool)
    mask[0, 5:9] = mask[0, keys // 2 : keys // 2 + 140] = False
    return mask


def bias(queries: int, keys: int) -> Tensor:
    return normal(1, 1, queries, keys, dtype=torch.float32, device=CPU, seed=5).detach()


VARIANTS: dict[str, tuple[int, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "64 columns": (64, {"causal": True}, dict),
    "64 columns, options": (64, {"softcap": 1.5, "dropout_p": 0.2}, dict),
    "64 columns, padding": (64, {}, lambda: {"key_padding_mask": padding(300)}),
    "64 columns, bias": (64, {"window": 70}, lambda: {"attn_bias": bias(140, 300)}),
    "128 columns": (128, {"causal": True}, dict),
    "128 columns, options": (128, {"dropout_p": 0.2}, lambda: {"key_padding_mask": padding(300)}),
    "128 columns, bias": (96, {"causal": True}, lambda: {"attn_bias": bias(140, 300)}),
    "256 columns": (192, {"causal": True}, dict),
    "256 columns, bias": (256, {}, lambda: {"attn_bias": bias(140, 300)}),
}
"""Columns, options and further tensors that cover every kernel."""


def forward(
    given: Tensors, options: dict[str, Any], edit: Edit | None = None, op: str = "attention", path: str = "sm90"
) -> Outcome:
    """One call without gradients within the budget of tests/support/parity.py; the emulation must be one of sm_90."""
    with mock.patch.object(_compiled, "path", path), by_ptx("attention_sm90", edit=edit) as executions, poisoned():
        share = check_parity(op, "cuda", given, options, seed=7)
    return outcome(share, executions)


def with_options(length: int, edit: Edit | None = None) -> Outcome:
    """Attention whose kernel rotates queries and keys, and zeroes the values of padding."""
    cos, sin = rotary_table(torch.arange(length), 64)
    qkv = normal(1, length, 3, 64, dtype=torch.bfloat16, device=CPU).detach()
    given = {"qkv": qkv, "cos": cos, "sin": sin, "key_padding_mask": padding(length)}
    return forward(given, {"heads": 1}, edit, op="packed_attention")


def variant(name: str, dtype: torch.dtype) -> Outcome:
    width, options, more = VARIANTS[name]
    return forward({**tensors(dtype, 140, 300, width), **more()}, {"return_lse": True, **options})


def persistent(name: str, dtype: torch.dtype, edit: Edit | None = None) -> Outcome:
    """Ten tiles of queries in four blocks, so that two fill a stage of queries twice."""
    width, options, more = VARIANTS[name]
    given = {**tensors(dtype, 140, 300, width, heads=5), **more()}
    return forward(given, {"return_lse": True, **options}, edit, path="sm90_persistent")


CALLS: dict[str, Callable[[Edit | None], Outcome]] = {
    "plain": lambda edit: forward(tensors(torch.bfloat16, 100, 700, 64), {}, edit),
    "options": lambda edit: with_options(500, edit),
}
"""In the first each stage of keys and values is filled three times."""

Replace = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Bug:
    """An edit of each match of a pattern, one at a time."""

    pattern: str
    replace: Replace
    calls: tuple[str, ...] = ("plain",)


def _nothing(match: re.Match[str]) -> str:
    return ""


def _changed(operation: str) -> Replace:
    """Apply a binary operation to the last operand."""
    return lambda m: f"{{ .reg .b32 other; {operation.format(m[2])} {m[1]}, other; }}"


ARRIVE, EXPECT = r"mbarrier\.arrive\.shared::cta\.b64[^;]*;", r"(mbarrier\.arrive\.expect_tx\S+ _, \[[^;]*\]), ([^;]*);"
TRY_WAIT = r"(mbarrier\.try_wait\.parity\S+ done, [^;]*), ([^;]*);"
COPY = r"(cp\.async\.bulk\.tensor\S+ \[[^,]*\], \[[^,]*, \{)([^,]*), ([^,]*)(, [^;]*;)"
BUGS = {
    "without arrival": Bug(ARRIVE, _nothing, ("plain", "options")),
    "without expected bytes": Bug(EXPECT, lambda m: f"{m[1].replace('.expect_tx', '')};"),
    "half of the expected bytes": Bug(EXPECT, _changed("shr.u32 other, {0}, 1;")),
    "twice the expected bytes": Bug(EXPECT, _changed("shl.b32 other, {0}, 1;")),
    "without wait": Bug(TRY_WAIT + r"\s*@done bra READY;\s*bra AGAIN;", _nothing, ("plain", "options")),
    "wait for the other parity": Bug(TRY_WAIT, _changed("xor.b32 other, {0}, 1;")),
    "row and column of a box swapped": Bug(COPY, lambda m: f"{m[1]}{m[3]}, {m[2]}{m[4]}"),
    "without fence of initialisation": Bug(r"fence\.mbarrier_init[^;]*;", _nothing),
    "without fence.proxy.async": Bug(r"fence\.proxy\.async[^;]*;", _nothing, ("options",)),
    "without bar.sync": Bug(r"bar\.sync[^;]*;", _nothing, ("options",)),
    "without first or last bar.sync": Bug(r"bar\.sync\s+0;|bar\.sync[^;]*;(?!.*bar\.sync)", _nothing),
    "bar.sync of one warp group": Bug(
        r"(bar\.sync\s+%r\d+), (%r\d+);", _changed("shr.u32 other, {0}, 1;"), ("options",)
    ),
    "without bar.warp.sync": Bug(r"bar\.warp\.sync[^;]*;", _nothing),
    "without wgmma.fence": Bug(r"wgmma\.fence[^;]*;", _nothing),
    "without wgmma.commit_group": Bug(r"wgmma\.commit_group[^;]*;", _nothing),
    "without wgmma.wait_group": Bug(r"wgmma\.wait_group[^;]*;", _nothing),
    "wgmma.wait_group of one group less": Bug(
        r"wgmma\.wait_group\.sync\.aligned (\d);", lambda m: f"wgmma.wait_group.sync.aligned {int(m[1]) + 1};"
    ),
}


def planted(call: str) -> dict[str, tuple[Bug, int]]:
    """The bugs of one call by name, and which match is edited."""
    found: list[str] = []

    def keep(name: str, ptx: str) -> str:
        found.append(ptx)
        return ptx

    CALLS[call](keep)
    (ptx,) = found
    return {
        f"{call}: {name}, {i + 1} of {count}": (bug, i)
        for name, bug in BUGS.items()
        if call in bug.calls
        for count in [len(re.findall(bug.pattern, ptx, re.S))]
        for i in range(count)
    }


def verdict(call: str, bug: Bug, index: int) -> str:
    """How a bug is detected: a report, a fault, a wrong result; or "nothing"."""

    def edit(name: str, ptx: str) -> str:
        match = list(re.finditer(bug.pattern, ptx, re.S))[index]
        return ptx[: match.start()] + bug.replace(match) + ptx[match.end() :]

    try:
        lines = problems(CALLS[call](edit))
    except Fault as fault:
        return f"fault: {fault}"
    except AssertionError as error:
        return f"result: {error}"
    return f"report: {lines[0]}" if lines else ""
