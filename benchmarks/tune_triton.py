"""Select the tiles of the Triton row kernels on the local GPU, and write those that beat the rule to triton_tiles.py.

    python -m benchmarks.tune_triton --dry-run             list the candidates; requires no GPU
    python -m benchmarks.tune_triton softmax layer_norm    time the candidates and rewrite their entries of TUNED
    python -m benchmarks.tune_triton --out FILE            write the new triton_tiles.py to FILE

Only entries of this GPU's capability change. A candidate counts only if its results agree with the results of the
current tile. Compilation takes most of the time: about a second per candidate.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.compilers import row_calls
from transformer_kernels.backends import dispatch, triton_tiles
from transformer_kernels.backends.triton import Capability
from transformer_kernels.backends.triton_tiles import RowTile, Tiles

ELEMENTS = 2**25
"""Elements of each timed tensor: 64 MiB in 16 bits; input and output exceed any L2 cache."""

ELEMENTS_PER_THREAD = (8, 32)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
WARPS = (1, 2, 4, 8, 16, 32)
WORTH = 0.97
"""An entry is written if it takes at most this fraction of the rule's time; smaller gains are noise."""

Tuned = dict[tuple[str, Capability, int, int], tuple[RowTile, str]]


@dataclass(frozen=True)
class Target:
    """The tiles of one kernel, and the pass of the operation that uses them."""

    operation: str
    tiles: Tiles
    backward: bool

    @property
    def persistent(self) -> bool:
        return self.tiles.rule in (triton_tiles.persistent_rows, triton_tiles.persistent_blocks)

    def call(self, rows: int, width: int, dtype: torch.dtype, device: str) -> Callable[[], Any]:
        """One pass of the backend on random tensors."""
        described = dispatch.OPERATIONS[self.operation]
        backend = dispatch.family(described.folder, "triton")
        with torch.device(device):
            variants = row_calls.CALLS[self.operation][0](dtype, rows, width)
        call = described.prepare(**list(variants.values())[-1])
        backend = backend.of(call)
        if not self.backward:
            return lambda: backend.forward(call)
        with torch.no_grad():
            result = backend.forward(call)
        outputs = [result] if isinstance(result, Tensor) else list(result)[: described.public]
        grads = tuple(torch.randn_like(output) for output in outputs)
        wanted = (True,) * len(described.differentiable)
        kept = result if described.kept_results else None  # as backward gets it
        return lambda: backend.backward(call, kept, grads, wanted)


def targets(operations: Sequence[str] = tuple(row_calls.CALLS)) -> list[Target]:
    """All tiles of the operations' own modules."""
    found = []
    for operation in operations:
        kernels = dispatch.family(dispatch.OPERATIONS[operation].folder, "triton")
        for tiles in vars(sys.modules[kernels.__module__]).values():
            if isinstance(tiles, Tiles) and tiles.name in (f"{operation} forward", f"{operation} backward"):
                found.append(Target(operation, tiles, tiles.name.endswith("backward")))
    return found


def candidates(target: Target, width: int, present: RowTile) -> list[RowTile]:
    """Candidate tiles at one width: the current one first, then those with a sensible number of values per thread."""
    tiles = target.tiles
    if tiles.rule is triton_tiles.flat:
        shapes = [(1, columns) for columns in (512, 1024, 2048, 4096, 8192)]
    elif width > tiles.widest:
        split = tiles.rule in (triton_tiles.column_blocks, triton_tiles.persistent_blocks)
        shapes = [(rows, columns) for rows in ((2, 4, 8) if split else (1,)) for columns in (512, 1024, 4096, 8192)]
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


def points(target: Target) -> Iterator[tuple[int, int]]:
    """The element sizes and widths that have a tile of their own and a call."""
    widths = [width for width in target.tiles.widths() if width >= 16 or width == target.tiles.widths()[-1]]
    if target.operation == "embedding":
        widths = [width for width in widths if width <= target.tiles.widest]
    return ((itemsize, width) for itemsize in DTYPES for width in widths)


def installed(tiles: Tiles, capability: Capability, itemsize: int, width: int, tile: RowTile) -> Any:
    """A context in which this tile is used for the width."""
    columns = min(max(width, tiles.narrowest), 2 * tiles.widest)
    return mock.patch.dict(tiles._found, {(capability, itemsize, columns): tile})


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """The median device time of a call, one event pair each, after two calls to compile and warm up."""
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


def tuned_entry(target: Target, capability: Capability, itemsize: int, width: int) -> tuple[RowTile, str] | None:
    """The fastest candidate with the same results as the current tile, if it is worth an entry."""
    tiles = target.tiles
    present = tiles.find(capability, itemsize, width)
    call = target.call(max(1, ELEMENTS // width), width, DTYPES[itemsize], "cuda")
    times: dict[RowTile, float] = {}
    wanted: list[Tensor] = []
    for tile in candidates(target, width, present):
        with installed(tiles, capability, itemsize, width, tile):
            try:
                got = _flat(call())
                wanted = wanted or got
                if all(torch.allclose(a.float(), b.float(), 2e-2, 2e-2) for a, b in zip(got, wanted, strict=True)):
                    times[tile] = seconds(call)
            except Exception as error:  # too many resources, or a shape that the compiler rejects
                print(f"  {tile}: {type(error).__name__}", file=sys.stderr)
    best = min(times, key=lambda tile: times[tile])
    rule = tiles.rule(min(max(width, tiles.narrowest), 2 * tiles.widest), itemsize, tiles.widest)
    print(f"{tiles.name} {itemsize * 8}-bit {width}: {best}, {times[best] * 1e6:.1f} us")
    if best == rule or times[best] > WORTH * times.get(rule, float("inf")):
        return None
    against = f"{times[rule] * 1e6:.1f} us by the rule" if rule in times else "no result by the rule"
    where = f"{environment.device_name(torch.device('cuda'))}, {datetime.date.today()}"
    return best, f"{where}: {times[best] * 1e6:.1f} us, {against}"


def _flat(result: Any) -> list[Tensor]:
    return [value for value in (result if isinstance(result, tuple) else (result,)) if value is not None]


def render(tuned: Tuned) -> str:
    """The source of TUNED, as at the end of triton_tiles.py."""
    lines = ["TUNED: dict[tuple[str, Capability, int, int], tuple[RowTile, str]] = {"]
    for (name, capability, itemsize, columns), (tile, reason) in sorted(tuned.items()):
        lines += [f'    ("{name}", {capability}, {itemsize}, {columns}): (', f"        {_tile_source(tile)},"]
        lines += [f'        "{reason}",', "    ),"]
    return "\n".join([*lines, "}"])


def _tile_source(tile: RowTile) -> str:
    defaults = {field.name: field.default for field in fields(RowTile)}
    values = {field.name: getattr(tile, field.name) for field in fields(RowTile)}
    return f"RowTile({', '.join(f'{name}={value}' for name, value in values.items() if value != defaults[name])})"


def rewritten(source: str, tuned: Tuned) -> str:
    """The source of triton_tiles.py with a new TUNED."""
    start, end = source.index("TUNED: dict"), source.rindex("\n}\n") + 2
    return source[:start] + render(tuned) + source[end:]


def tune(operations: Sequence[str], out: Path | None = None) -> None:
    """Time all candidates of the operations on this GPU and write their entries to `out` after each kernel."""
    capability = torch.cuda.get_device_capability()
    tuned = dict(triton_tiles.TUNED)
    path = Path(str(triton_tiles.__file__))
    source = path.read_text()
    for target in targets(operations):
        for itemsize, width in points(target):
            key = target.tiles.name, capability, itemsize, width
            entry = tuned_entry(target, capability, itemsize, width)
            if entry is not None:
                tuned[key] = entry
        (out or path).write_text(rewritten(source, tuned))


def list_candidates(operations: Sequence[str]) -> None:
    """Print the number of candidates at each width, and the current tile."""
    total = 0
    for target in targets(operations):
        for itemsize, width in points(target):
            present = target.tiles.find((9, 0), itemsize, width)
            tiles = candidates(target, width, present)
            total += len(tiles)
            print(f"{target.tiles.name} {itemsize * 8}-bit {width}: {len(tiles)}, now {present}")
    print(f"{total} candidates; none was timed")


def main(argv: Sequence[str] | None = None) -> int:
    """List or tune; 2 if there is no GPU."""
    known = tuple(row_calls.CALLS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_triton", description=__doc__)
    parser.add_argument("operations", nargs="*", help=f"operations, from {', '.join(known)} (default: all)")
    parser.add_argument("--out", type=Path, help="output file for the new triton_tiles.py (default: in place)")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates without timing")
    arguments = parser.parse_args(argv)
    operations = arguments.operations or known
    if set(operations) - set(known):
        parser.error(f"unknown operation; there are {', '.join(known)}")
    if arguments.dry_run:
        list_candidates(operations)
        return 0
    if not torch.cuda.is_available():
        print("tuning requires a CUDA device: nothing was timed or changed (see --dry-run)", file=sys.stderr)
        return 2
    tune(operations, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
