"""The record of what the compiler makes of each Triton kernel: what `transformer-kernels info --static` prints.

One launch stands for each kernel and path on each architecture, compiled without a GPU. The record holds bounds, never
a speed. It and its page are made anew by `python -m transformer_kernels.reports.static`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformer_kernels.reports.machine_code import CLASSES

CHECKOUT = Path(__file__).resolve().parents[2]
RECORD = CHECKOUT / "benchmarks" / "results" / "static" / "triton.json"
PAGE = RECORD.with_suffix(".md")

CHOSEN = "|".join(
    (
        r"any length (plain|causal) bfloat16 D (64|128): attention",
        r"any length (biased|sequences causal dropout) bfloat16 D 128: attention_(forward|backward)",
        r"128 keys causal padded bfloat16 D 64: attention_short",
        r"decode plain bfloat16 D 128: attention",
        r"^layer_norm bf16 (1024|16384: .*(two_pass|columns)|32768: .*two_pass)",
        r"^add_layer_norm dropout bf16 1024",
        r"^softmax bf16 (1024|32768: .*two_pass|65536)",
        r"^cross_entropy( in place)? bf16 (1024|32768)|^cross_entropy bf16 256: .*backward",
        r"^embedding (dropout|norm) bf16 1024",
        r"^(bias_gelu none bf16 256|gelu none bf16|swiglu packed bf16 1024)",
    )
)
"""Which launches are recorded."""

GROWTH = 1.03
"""How much larger than recorded a figure may be."""

HEADING = """# What the machine code of the Triton kernels allows

Compiled for sm_80 (A100) and sm_90 (H100) by Triton {triton}, without a GPU; nothing here is timed. The bound is the
share of the data sheet's tensor rate (or, without matrix products, memory rate) that a loop cannot exceed if each
instruction is issued once and all that can overlap does: issue slots, special functions (exp2), fp32 arithmetic of
sm_80. Latency, conflicts and the memory system only take from it, so it is a bound and never a speed; 100 % means that
something else decides. Instructions are those of a warp in one round of a loop, or of the whole kernel where it has
none; attention has a loop without masks and one with. A decode step waits for memory long before its tensor bound.

`transformer-kernels info --static` prints this page, `python -m transformer_kernels.reports.static` makes it anew, and
a gate fails where a figure grows by more than 3 %.

"""


def chosen() -> dict[str, Any]:
    """Compile the launches that are recorded; their figures by name and architecture, as they stand in the record."""
    from transformer_kernels.reports import triton as kernel_report

    return dict(map(figures, kernel_report.report(matching=CHOSEN)))


def figures(report: Any) -> tuple[str, dict[str, Any]]:
    """What is recorded of a `KernelReport`, under its name and architecture."""
    major, minor = report.capability
    names = ("registers", "spills", "shared", "programs")
    found: dict[str, Any] = {name: getattr(report, name) for name in names}
    return f"{report.name} sm_{major}{minor}", {**found, "loops": [dataclasses.asdict(loop) for loop in report.loops]}


def recorded(path: Path = RECORD) -> dict[str, Any]:
    """The record: the version of Triton, and the figures of each launch.

    Raises:
        FileNotFoundError: this is no source checkout.
    """
    if not path.is_file():
        raise FileNotFoundError("the record of static bounds is in the source checkout, in benchmarks/results/static")
    return json.loads(path.read_text())


def grown(reports: Iterable[Any], record: Mapping[str, Any]) -> list[str]:
    """Which figures of recorded launches grew, and which programs and bounds fell, by more than 3 %."""
    found = []
    for name, now in map(figures, reports):
        if (before := record["launches"].get(name)) is not None:
            flat, flat_before = dict(_costs(now)), dict(_costs(before))
            found += [
                f"{name}: {figure} {flat_before.get(figure, 0):g} -> {cost:g}"
                for figure, cost in flat.items()
                if cost > GROWTH * flat_before.get(figure, 0)
            ]
    return found


def _costs(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What must not grow: of programs and bounds the inverse."""
    yield from ((name, figures[name]) for name in ("registers", "spills", "shared"))
    yield "1 / programs", 1 / figures["programs"]
    for number, loop in enumerate(figures["loops"], 1):
        yield f"instructions of loop {number}", loop["instructions"]
        yield f"1 / bound of loop {number}", 1 / loop["bound"]


def table(record: Mapping[str, Any]) -> str:
    """A line in Markdown for each loop of each launch."""
    labels = [*CLASSES, "other"]
    head = ["launch", "GPU", "registers", "spills", "shared bytes", "programs on a multiprocessor", "instructions"]
    rows = [[*head, *labels, "bound"]]
    for name, figures in record["launches"].items():
        launch, _, architecture = name.rpartition(" ")
        shared = [launch, architecture, *(str(figures[key]) for key in ("registers", "spills", "shared", "programs"))]
        for loop in figures["loops"]:
            counts = [str(loop["classes"].get(label, 0)) for label in labels]
            rate = "tensor" if loop["classes"].get("matrix") else "memory"
            rows.append([*shared, str(loop["instructions"]), *counts, f"{loop['bound']:.0%} of {rate} rate"])
            shared = [""] * len(shared)
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(record: Mapping[str, Any]) -> str:
    """The page beside the record."""
    return HEADING.format(triton=record["triton"]) + table(record) + "\n"


def main() -> None:
    """Compile, and write the record and the page."""
    from transformer_kernels.backends.triton import load

    write({"triton": load().__version__, "launches": chosen()})
    print(f"wrote {RECORD} and {PAGE}")


def write(record: Mapping[str, Any]) -> None:
    """Replace the record, a line for each launch, and its page."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in record["launches"].items())
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(f'{{"triton": {json.dumps(record["triton"])}, "launches": {{\n{lines}\n}}}}\n')
    PAGE.write_text(page(record))


if __name__ == "__main__":
    main()
