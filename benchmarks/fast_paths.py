"""Every fast path of GPU attention with the path on and off, in one process: `keep` from 1.1x on, else `delete`.

    python -m benchmarks.fast_paths --out DIR [--begin 3]   all from one on; appends a line per call to fast_paths.jsonl

A path is a kernel, or a table of tiles, without which another one of the same backend runs the same call.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from transformer_kernels import ops
from transformer_kernels.backends import dispatch
from transformer_kernels.backends.dispatch import unavailable
from transformer_kernels.backends.triton import capability
from transformer_kernels.ops.attention import _compiled, _tiles, _triton
from transformer_kernels.ops.attention._tiles import Body, Kernel

MIN_GAIN = 1.1
SECONDS = 0.2
RESULTS = "fast_paths.jsonl"
TOLERANCE = 3e-2
"""Of the largest element, between two kernels in bfloat16."""


@dataclass(frozen=True)
class Case:
    """A call (B, H, L, D) in bfloat16, `keys` long on the other side, with options of `attention`."""

    batch: int
    heads: int
    length: int
    head_dim: int
    keys: int | None = None
    backward: bool = False
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.heads} x {self.length} x {self.head_dim}"
        sizes += f", {self.keys} keys" if self.keys else ""
        return ", ".join([sizes, *self.options, "forward and backward" if self.backward else "forward"])

    def call(self, backend: str, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
        """The call on random inputs: the output, and with `backward` the gradients."""
        torch.manual_seed(0)
        packed = "rotary" in self.options
        keys = self.keys or self.length
        if packed:
            shapes = [(self.batch, self.length, 3 * self.heads, self.head_dim)]
        else:
            shapes = [(self.batch, self.heads, length, self.head_dim) for length in (self.length, keys, keys)]
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        for x in inputs:
            x.requires_grad_(self.backward)
        options: dict[str, Any] = {"backend": backend, "causal": "causal" in self.options}
        if "padding" in self.options:
            lengths = torch.randint(keys // 2, keys + 1, (self.batch, 1), device=device)
            options["key_padding_mask"] = torch.arange(keys, device=device) < lengths
        if "dropout" in self.options:
            options["dropout_p"] = 0.1
        if "sequences" in self.options:
            options["cu_seqlens"] = torch.arange(0, keys + 1, 256, device=device, dtype=torch.int32)
        if packed:
            positions = torch.arange(self.length, device=device)[:, None]
            angles = positions / 10000 ** torch.linspace(0, 1, self.head_dim // 2, device=device)
            options |= {"heads": self.heads, "cos": angles.cos(), "sin": angles.sin()}

        def run() -> tuple[Tensor, ...]:
            torch.manual_seed(1)  # the same dropout with the path on and off
            out = (ops.packed_attention if packed else ops.attention)(*inputs, **options)
            assert isinstance(out, Tensor)
            gradients = torch.autograd.grad(out, inputs, out.detach()) if self.backward else ()
            return (out.detach(), *gradients)

        return run


@dataclass(frozen=True)
class FastPath:
    """A fast path, the context without it, calls that take it, and the context with it if it is off by default."""

    name: str
    backend: str
    off: Callable[[], AbstractContextManager[None]]
    cases: tuple[Case, ...]
    on: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value; plans that were made with the old one are dropped, before and after."""
    old = getattr(module, name)
    try:
        setattr(module, name, value)
        _forget_plans()
        yield
    finally:
        setattr(module, name, old)
        _forget_plans()


def _forget_plans() -> None:
    for cached in (_tiles.find, _tiles.find_short):
        cached.cache_clear()
    for operation in dispatch.OPERATIONS.values():
        operation.forget_plans()


BODIES: dict[Body, tuple[str, ...]] = {
    Body.CAUSAL: ("causal",),
    Body.LONG: ("causal",),
    Body.PADDED: ("causal", "padding"),
    Body.HEAVY: ("dropout",),
    Body.PACKED: ("sequences",),
    Body.ROTATED: ("rotary",),
}
"""The options that select a body."""


def _table_path(kernel: Kernel, body: Body, capability: tuple[int, int]) -> FastPath:
    """A table, with a call for each head dimension at which the tile would be another one without it."""
    tables = {key: rows for key, rows in _tiles.TABLES.items() if key != (kernel, body)}

    def off() -> AbstractContextManager[None]:
        return replaced(_tiles, "TABLES", tables)

    def tile(head_dim: int) -> object:
        rows = _tiles.rows(kernel, body, capability, _tiles.HALF)
        return [tile for width, tile in rows if width == head_dim or (width > head_dim and not short)]

    short = kernel in (Kernel.SHORT_FORWARD, Kernel.SHORT_BACKWARD)
    backward = kernel not in (Kernel.FORWARD, Kernel.SHORT_FORWARD)
    batch, length = (64, 128) if short else (1, 4096) if body in (Body.LONG, Body.PACKED) else (4, 1024)
    cases = []
    for head_dim in (32, 64, 128, 256):
        with off():
            other = tile(head_dim)
        if tile(head_dim)[:1] != other[:1] or (short and tile(head_dim) != other):
            cases.append(Case(batch, 12, length, head_dim, backward=backward, options=BODIES[body]))
    return FastPath(f"table of {kernel.value}, {body.value}", "triton", off, tuple(cases))


LONG = (Case(2, 16, 4096, 64), Case(2, 16, 4096, 128, options=("causal",)), Case(8, 16, 512, 128))
PERSISTENT = FastPath(
    "sm_90a: persistent, groups by turns",
    "cuda",
    nullcontext,
    LONG,
    lambda: replaced(_compiled, "path", "sm90_persistent"),
)
"""Off until a GPU has timed it: `keep` makes it the path of `auto`."""


def paths(capability: tuple[int, int]) -> list[FastPath]:
    """The fast paths of both backends, those that compile nothing first.

    With the tables that count for a compute capability in 16 bits.
    """
    short = (Case(64, 4, 64, 32, backward=True), Case(16, 8, 128, 64, backward=True))
    rotary = (Case(16, 12, 512, 64, backward=True, options=("rotary", "causal")),)
    keys = (key for key in _tiles.TABLES if key[1] is not Body.LIGHT)
    tables = [path for key in keys if (path := _table_path(*key, capability)).cases]
    return [
        FastPath("short sequences", "cuda", lambda: replaced(_compiled, "path", "general"), short),
        FastPath("sm_90a: TMA and wgmma", "cuda", lambda: replaced(_compiled, "path", "general"), LONG),
        PERSISTENT,
        FastPath(
            "short sequences", "triton", lambda: replaced(_triton._Launches, "short_tile", lambda *_: None), short
        ),
        FastPath(
            "decode", "triton", lambda: replaced(_tiles, "DECODE_QUERIES", 0), (Case(4, 12, 1, 64, keys=4096),)
        ),
        FastPath("rotation at the load", "triton", lambda: replaced(_tiles, "ROTATED_HEAD_DIM", 0), rotary),
        FastPath("sections of heads for L2", "triton", lambda: replaced(_tiles, "L2_BYTES", 1 << 60), LONG),
        *tables,
    ]  # fmt: skip


def measure(path: FastPath, case: Case, device: torch.device) -> dict[str, Any]:
    """One call with the path on, off, and on again: the gain in time, the verdict, and the error between the two."""
    row: dict[str, Any] = {"path": path.name, "backend": path.backend, "case": str(case)}
    with timing.work_stream(device):
        run = case.call(path.backend, device)
        try:
            with path.on():
                on, first = run(), timing.time_calls(device, [run], SECONDS).median
            with path.off():
                off, without = run(), timing.time_calls(device, [run], SECONDS).median
            with path.on():
                again = timing.time_calls(device, [run], SECONDS).median
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return row | {"verdict": "failed", "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    error = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(on, off, strict=True))
    gain = without / min(first, again)
    verdict = "wrong" if not error <= TOLERANCE else "keep" if gain >= MIN_GAIN else "delete"
    return row | {"on": min(first, again), "off": without, "gain": gain, "error": error, "verdict": verdict}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    gain = f"{row['gain']:.2f}x" if "gain" in row else row["reason"]
    return f"{row['verdict']:<7} {gain:<6} {row['backend']}: {row['path']}: {row['case']}"


def main(arguments: list[str] | None = None) -> int:
    """Measure all paths; status 1 if a result was wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.fast_paths", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--begin", type=int, default=0, help="the number of the first path")
    parser.add_argument("--current", type=Path, default=os.devnull, help="a file for the number of the current path")
    parser.add_argument("--device", type=torch.device, default="cuda")
    chosen = parser.parse_args(arguments)
    device = chosen.device
    wrong, listed = 0, paths(capability(device))
    with open(chosen.out / RESULTS, "a") as file:
        for number, path in enumerate(listed[chosen.begin :], start=chosen.begin):
            chosen.current.write_text(str(number))
            if (reason := unavailable(path.backend, device)) is not None:
                print(f"{path.backend}: {path.name}: skipped, {reason}", flush=True)
                continue
            for case in path.cases:
                row = measure(path, case, device)
                wrong += row["verdict"] == "wrong"
                print(json.dumps(row), file=file, flush=True)
                print(line(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
