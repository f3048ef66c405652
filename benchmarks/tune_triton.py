"""Choose the launch configurations of the Triton row kernels on the GPU at hand, and write their tables.

    python -m benchmarks.tune_triton --dry-run             list what would be tried; needs no GPU
    python -m benchmarks.tune_triton softmax layer_norm    time the candidates and rewrite both tables

Only the rows of this GPU's capability change. A candidate counts only where its results agree with those of the present
table. Compiling takes most of the time: about a second for each candidate.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import WIDEST_EMBEDDING
from transformer_kernels.backends.triton import RowTile, Table

Entries = tuple[tuple[int | None, RowTile], ...]

ELEMENTS = 2**25
"""Elements of each tensor that is timed: 64 MiB in 16 bits, more than any L2 cache holds of input and output."""

ELEMENTS_PER_THREAD = (8, 32)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
WARPS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Target:
    """One table of one operation, and the call that it decides."""

    operation: str
    table: str
    module: str
    make: Callable[[Any, Tensor], Callable[[], Any]]
    persistent: bool = False
    split_rows: bool = False

    @property
    def name(self) -> str:
        return f"{self.operation} {self.table.lower()}"

    def launcher(self) -> ModuleType:
        """The module that looks the table up."""
        return importlib.import_module(f"transformer_kernels.ops.{self.operation}.{self.module}")


def _layer_norm_backward(module: Any, x: Tensor) -> Callable[[], Any]:
    weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    mean = x.float().mean(-1)
    rstd = torch.ones_like(mean)
    return lambda: module.backward_rows(x, None, x, None, weight, mean, rstd, 0.0, True)


def _layer_norm_forward(module: Any, x: Tensor) -> Callable[[], Any]:
    weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return lambda: module.forward_rows(x, None, None, weight, weight, 1e-5, 0.0)


def _cross_entropy_forward(module: Any, x: Tensor) -> Callable[[], Any]:
    targets = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return lambda: module.row_losses_and_gradient(x.clone(), targets, -100, 0.0)


def _cross_entropy_backward(module: Any, x: Tensor) -> Callable[[], Any]:
    targets = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    statistics = torch.ones((2, x.shape[0]), device=x.device)
    dloss = torch.ones((), device=x.device)
    return lambda: module.backward(dloss, x, targets, statistics, dloss, -100, 0.0, "mean")


def _embedding_arguments(x: Tensor) -> tuple[Any, ...]:
    """A shuffle of the rows of x, normalised where a row is narrow enough."""
    narrow = x.shape[-1] <= WIDEST_EMBEDDING
    tokens = torch.randperm(len(x), device=x.device)[None]
    return x, tokens, None, None, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if narrow else None


def _embedding_forward(module: Any, x: Tensor) -> Callable[[], Any]:
    arguments = _embedding_arguments(x)
    return lambda: module.forward(*arguments, arguments[-1], None, 1.0, 1e-5, 0.0)[0]


def _embedding_backward(module: Any, x: Tensor) -> Callable[[], Any]:
    mean = x.float().mean(-1)
    rstd = torch.ones_like(mean)
    arguments = _embedding_arguments(x)
    return lambda: module.backward(x[None], *arguments, mean, rstd, None, 1.0, 0.0, True)


TARGETS = (
    Target("softmax", "FORWARD", "_triton", lambda m, x: lambda: m.forward(x, None, False, 1.0)),
    Target("softmax", "BACKWARD", "_triton", lambda m, x: lambda: m.backward(x, x, 1.0)),
    Target("layer_norm", "FORWARD", "_triton_forward", _layer_norm_forward),
    Target("layer_norm", "BACKWARD", "_triton_backward", _layer_norm_backward, persistent=True),
    Target("gelu", "FORWARD", "_triton", lambda m, x: lambda: m.forward(x, "none"), split_rows=True),
    Target("gelu", "BACKWARD", "_triton", lambda m, x: lambda: m.backward(x, x, "none"), split_rows=True),
    Target("bias_gelu", "FORWARD", "_triton", lambda m, x: lambda: m.forward(x, x[0], "none"), split_rows=True),
    Target(
        "bias_gelu",
        "BACKWARD",
        "_triton",
        lambda m, x: lambda: m.backward(x, x, x[0], "none"),
        persistent=True,
        split_rows=True,
    ),
    Target("bias_relu", "FORWARD", "_triton", lambda m, x: lambda: m.forward(x, x[0]), split_rows=True),
    Target(
        "bias_relu",
        "BACKWARD",
        "_triton",
        lambda m, x: lambda: m.backward(x, x, x.dtype),
        persistent=True,
        split_rows=True,
    ),
    Target("cross_entropy", "FORWARD", "_triton", _cross_entropy_forward),
    Target("cross_entropy", "BACKWARD", "_triton", _cross_entropy_backward, split_rows=True),
    Target("embedding", "FORWARD", "_triton", _embedding_forward),
    Target("embedding", "BACKWARD", "_triton", _embedding_backward, persistent=True),
)


def candidates(target: Target, width: int | None, present: RowTile) -> list[RowTile]:
    """Tiles worth a try for one entry: the present one first, then those with a sane number of values per thread."""
    if target.operation == "gelu":
        shapes = [(1, columns) for columns in (512, 1024, 2048, 4096, 8192)]
    elif width is None:
        rows = (2, 4, 8) if target.split_rows else (1,)
        shapes = [(row, columns) for row in rows for columns in (256, 512, 1024, 2048, 4096, 8192, 16384)]
    else:
        shapes = [(rows, present.columns) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
    found = [present]
    for rows, columns in shapes:
        for num_warps in WARPS:
            if not ELEMENTS_PER_THREAD[0] <= rows * columns / (32 * num_warps) <= ELEMENTS_PER_THREAD[1]:
                continue
            for num_stages in (2, 3) if target.persistent and present.num_stages > 1 else (present.num_stages,):
                for programs in (1, 2, 4) if target.persistent else (present.programs,):
                    tile = RowTile(rows, columns, num_warps, num_stages, programs)
                    if tile != present:
                        found.append(tile)
    return found


def rows_of(width: int | None, target: Target) -> tuple[int, int]:
    """The shape that an entry is timed at: its widest row, or for the last entry four times a register's worth."""
    columns = width or (4096 if target.split_rows else 65536)
    return ELEMENTS // columns, columns


@contextmanager
def installed(target: Target, tile: RowTile) -> Iterator[Any]:
    """The launcher with a table that always answers `tile`."""
    module = target.launcher()
    present = getattr(module, target.table)
    setattr(module, target.table, Table("candidate", {((8, 0), size): ((None, tile),) for size in DTYPES}))
    try:
        yield module
    finally:
        setattr(module, target.table, present)


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a call on the device, one event pair each, after two to compile and warm up."""
    for _ in range(2):
        call()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def tuned_entry(target: Target, itemsize: int, width: int | None, present: RowTile) -> RowTile:
    """The fastest candidate whose results equal those of the present tile."""
    x = torch.randn(rows_of(width, target), device="cuda").to(DTYPES[itemsize])
    best, best_time, wanted = present, float("inf"), None
    for tile in candidates(target, width, present):
        with installed(target, tile) as module:
            call = target.make(module, x)
            try:
                got = [value for value in _flat(call()) if value is not None]
                wanted = wanted or got
                close = all(torch.allclose(a.float(), b.float(), 2e-2, 2e-2) for a, b in zip(got, wanted, strict=True))
                time = seconds(call) if close else float("inf")
            except Exception as error:  # too many resources, or a shape that the compiler refuses
                print(f"  {tile}: {type(error).__name__}", file=sys.stderr)
                continue
        if time < best_time:
            best, best_time = tile, time
    print(f"{target.name} {itemsize * 8}-bit {width or 'wider'}: {best}, {best_time * 1e6:.1f} us")
    return best


def _flat(result: Any) -> list[Tensor | None]:
    return list(result) if isinstance(result, tuple) else [result]


def render(document: str, tables: dict[str, Table[RowTile]], extra: str) -> str:
    """The source of a table module: its docstring, its tables (equal rows stand once), and what follows them."""
    bodies: dict[str, Entries] = {}
    heads = []
    for name, table in tables.items():
        rows = []
        for ((major, minor), itemsize), entries in table.rows.items():
            body = f"_{name}_{8 * itemsize}_BIT"
            if bodies.setdefault(body, tuple(entries)) != tuple(entries):
                body = f"{body}_SM_{major}{minor}"
                bodies[body] = tuple(entries)
            rows.append(f"        (({major}, {minor}), {itemsize}): {body},")
        heads.append("\n".join([f"{name} = Table(", f'    "{table.name}",', "    {", *rows, "    },", ")"]))
    sources = [f"{body} = {_entries_source(entries)}" for body, entries in bodies.items()]
    imports = "from transformer_kernels.backends.triton import RowTile, Table"
    return "\n\n".join([f'"""{document}"""', imports, *sources, *heads]) + "\n" + (f"\n{extra}" if extra else "")


def _entries_source(entries: Entries) -> str:
    lines = [f"({width}, {_tile_source(tile)})," for width, tile in entries]
    return f"({lines[0]})" if len(lines) == 1 else "\n    ".join(["(", *lines]) + "\n)"


def _tile_source(tile: RowTile) -> str:
    defaults = {field.name: field.default for field in fields(RowTile)}
    values = {field.name: getattr(tile, field.name) for field in fields(RowTile)}
    return f"RowTile({', '.join(f'{name}={value}' for name, value in values.items() if value != defaults[name])})"


def table_module(operation: str) -> ModuleType:
    """Where the tables of an operation stand."""
    return importlib.import_module(f"transformer_kernels.ops.{operation}._triton_table")


def current_source(operation: str, tables: dict[str, Table[RowTile]] | None = None) -> str:
    """The table module of an operation as this program writes it, with its present or with other tables."""
    module = table_module(operation)
    names = [target.table for target in TARGETS if target.operation == operation]
    text = Path(str(module.__file__)).read_text()
    extra = text[text.index("\nCOLUMN_TILE") + 1 :] if "\nCOLUMN_TILE" in text else ""
    return render(module.__doc__ or "", tables or {name: getattr(module, name) for name in names}, extra)


def tune(operation: str) -> None:
    """Time all candidates of an operation on this GPU and rewrite its table module."""
    capability = torch.cuda.get_device_capability()
    tables = {}
    for target in TARGETS:
        if target.operation != operation:
            continue
        table = getattr(table_module(operation), target.table)
        rows = dict(table.rows)
        nearest = max(known for known, _ in rows if known <= capability)
        for itemsize in DTYPES:
            entries = rows[nearest, itemsize]
            rows[capability, itemsize] = tuple((w, tuned_entry(target, itemsize, w, tile)) for w, tile in entries)
        tables[target.table] = Table(table.name, rows)
    source = current_source(operation, tables)
    Path(str(table_module(operation).__file__)).write_text(source)


def list_candidates(operations: Sequence[str]) -> None:
    """Print how many tiles each entry would try, and the first of them."""
    total = 0
    for target in TARGETS:
        if target.operation not in operations:
            continue
        table: Table[RowTile] = getattr(table_module(target.operation), target.table)
        for itemsize in DTYPES:
            for width, present in table.entries((9, 0), itemsize):
                tiles = candidates(target, width, present)
                total += len(tiles)
                shape = "x".join(map(str, rows_of(width, target)))
                print(f"{target.name} {itemsize * 8}-bit {width or 'wider'} at {shape}: {len(tiles)}, now {present}")
    print(f"{total} candidates; none was timed")


def main(argv: Sequence[str] | None = None) -> int:
    """List or tune; 2 where there is no GPU to tune on."""
    known = tuple(dict.fromkeys(target.operation for target in TARGETS))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_triton", description=__doc__)
    parser.add_argument("operations", nargs="*", help=f"some of {', '.join(known)}; all by default")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates, time nothing")
    arguments = parser.parse_args(argv)
    operations = arguments.operations or known
    if set(operations) - set(known):
        parser.error(f"unknown operation; there are {', '.join(known)}")
    if arguments.dry_run:
        list_candidates(operations)
        return 0
    if not torch.cuda.is_available():
        print("tuning needs a CUDA device: nothing was timed, no table was changed (see --dry-run)", file=sys.stderr)
        return 2
    for operation in operations:
        tune(operation)
    return 0


if __name__ == "__main__":
    sys.exit(main())
