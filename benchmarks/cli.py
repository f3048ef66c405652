"""`transformer-kernels bench`, from a source checkout: measure, record, merge, plot, compare."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.record import BUDGET, record
from benchmarks.report import growth_text, report
from benchmarks.runner import MAX_TASK_SECONDS, ROWS, add_selection, read_lines, selection, supervise
from transformer_kernels.training._optional import require

DESCRIPTION = """\
Without an action: measure on this device and print each row.

  bench --quick                               smoke test, a few seconds
  bench --op attention --budget 60            one operation for a minute
  bench --record --out DIR                    benchmark this processor within TIME_BUDGET seconds (make bench); for a
                                              GPU: benchmarks/gpu.sh --first, then --second (make gpu)
  bench --merge DIR                           merge such a folder into benchmarks/results/<device>/
  bench --plot [FOLDER]                       figures and report.md of a record (default: all recorded devices)
  bench --compare A B                         ratios with spread; exit status 1 if B is slower than A
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.compare:
            return print_comparison(*chosen.compare)
        if chosen.merge:
            folder = results.merge(chosen.merge)
            print(f"merged into {folder}")
            return draw([folder])
        if chosen.plot is not None:
            return draw([Path(chosen.plot)] if chosen.plot else sorted(results.RESULTS.glob("*/")))
        return _measure(chosen)
    except (FileNotFoundError, ValueError, ImportError) as error:
        print(f"transformer-kernels bench: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "transformer-kernels bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--record", action="store_true", help="benchmark into --out, with a description of the machine")
    action.add_argument("--merge", type=Path, metavar="DIR", help="merge a recorded folder into benchmarks/results")
    action.add_argument("--plot", nargs="?", const="", metavar="FOLDER", help="write a record's figures and report")
    action.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="rows, folders or pytest-benchmark's")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: cuda if available)")
    parser.add_argument("--out", type=Path, help="output folder (default: a temporary one)")
    parser.add_argument("--budget", type=float, help=f"total seconds (default: TIME_BUDGET, else {BUDGET:.0f})")
    parser.add_argument(
        "--longest", type=float, default=MAX_TASK_SECONDS, help="seconds after which a row counts as hung"
    )
    add_selection(parser)
    return parser


def _measure(chosen: argparse.Namespace) -> int:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if chosen.device == "auto" else chosen.device
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda; got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch sees no GPU")
    seconds = chosen.budget or float(os.environ.get("TIME_BUDGET") or BUDGET)
    if chosen.record:
        if chosen.out is None:
            raise ValueError("--record requires --out DIR")
        return record(device, chosen.out, seconds, selection(chosen))
    with tempfile.TemporaryDirectory() as folder:
        out = chosen.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        before = len(read_lines(out / ROWS))
        supervise(device, out, seconds, selection(chosen), longest=chosen.longest)
        if len(read_lines(out / ROWS)) == before:
            print("no row was measured", file=sys.stderr)
            return 1
        rows = results.load_rows(out)
        if text := growth_text(results.growth(rows)):
            print(f"\n{text}")
    return 0


def draw(folders: Sequence[Path]) -> int:
    """Write figures and report.md of each recorded device."""
    require("matplotlib")
    from benchmarks.plots import draw_all

    folders = [folder for folder in folders if (folder / "rows.jsonl").is_file()]
    if not folders:
        raise FileNotFoundError("nothing is recorded yet: bench --record --out DIR, then bench --merge DIR")
    for folder in folders:
        rows = results.load_rows(folder)
        if not results.timed(rows):
            raise ValueError(f"{folder} has no timed row")
        pictures = draw_all(rows, folder / "plots")
        tests = folder / results.TEST_SUMMARY
        page = report(
            rows,
            [path.relative_to(folder) for path in pictures],
            json.loads(tests.read_text()) if tests.is_file() else None,
        )
        (folder / "report.md").write_text(page)
        print(growth_text(results.growth(rows)))
        print(f"wrote {len(pictures)} figures and {folder / 'report.md'}")
    return 0


def print_comparison(before: Path, after: Path) -> int:
    """Print the comparison, worst first; status 1 if something became slower by more than its spread."""
    found = results.compare(results.load_rows(before), results.load_rows(after))
    if not found:
        raise ValueError(f"{before} and {after} have no timed row in common")
    for row in found:
        print(f"{row.ratio:6.2f}x +-{row.spread:5.1%}  {row.verdict:<6}  {row.name}")
    slower = sum(row.verdict == "SLOWER" for row in found)
    faster = sum(row.verdict == "faster" for row in found)
    print(f"{len(found)} compared: {slower} slower, {faster} faster (time after / time before)")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
