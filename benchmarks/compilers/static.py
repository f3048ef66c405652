"""The record of static reports of each kernel, printed by `transformer-kernels info --static`.

One launch represents each kernel and path on each architecture, compiled without a GPU. The record contains bounds, no
timings. `python -m benchmarks.compilers.static [triton] [cuda]` compiles kernels that have changed since.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.compilers import status
from benchmarks.compilers.machine_code import CLASSES, DEVICES
from transformer_kernels.backends import build as _build

FOLDER = status.CHECKOUT / "benchmarks" / "results" / "static"
BACKENDS = {"triton": "Triton", "cuda": "CUDA"}
DERIVATION = {
    "triton": ("launches.py", "machine_code.py", "row_calls.py", "triton.py"),
    "cuda": ("cuda.py", "cuda_launches.py", "machine_code.py", "row_calls.py"),
}
"""The files of this folder that affect the record of a kernel, besides its sources."""

CHOSEN = "|".join(
    (
        r"(any length (plain|causal)|many keys causal) bfloat16 D (64|128): attention",
        r"any length (biased|sequences causal dropout) bfloat16 D 128: attention_(forward|backward)",
        r"any length causal rotary bfloat16 D 64: attention",
        r"128 keys causal (padded|rotary) bfloat16 D 64: attention_short",
        r"decode plain bfloat16 D 128: attention",
        r"^layer_norm bf16 (1024|16384: .*(two_pass|columns)|32768: .*two_pass)",
        r"^add_layer_norm dropout bf16 1024",
        r"^rms_norm bf16 1024",
        r"^softmax bf16 (1024|32768: .*two_pass|65536)",
        r"^cross_entropy( in place)? bf16 (1024|32768)|^cross_entropy bf16 256: .*backward",
        r"^embedding (dropout|norm) bf16 1024",
        r"^(bias_gelu none bf16 256|gelu none bf16|swiglu packed bf16 1024|rotary bf16 64)",
    )
)
"""The recorded launches of Triton kernels; see cuda_launches.py for CUDA kernels."""

SERVED = "|".join(
    (
        r"any length (plain|causal) bfloat16 D (64|128): attention",
        r"any length biased bfloat16 D 128: attention_forward",
        r"128 keys causal padded bfloat16 D 64: attention_short",
        r"decode plain bfloat16 D 128: attention",
        r"^(?!attention)",
    )
)
"""The recorded launches for GPUs without their own tiles."""

GROWTH = 1.03
"""Maximum ratio of a figure to the recorded one."""

HEADING = """# Static bounds of the {backend} kernels

Compiled for {devices}
by {compiler}, without a GPU; nothing here is timed.

**bound**: upper bound on the fraction of the data sheet's tensor rate (memory rate without matrix products) of a loop,
assuming perfect overlap and one issue per instruction. A quarter of a multiprocessor issues one instruction per clock;
a warp occupies the integer lanes for two clocks (sm_120: one), special functions (exp2) for eight, and the fp32 lanes
for two on sm_80. Latency, bank conflicts and the memory system are ignored; at 100 % one of these is the limit.
Decoding is bound by memory.

**instr** and the classes: instructions per warp on the shortest path through an iteration with all of its work, or
through a kernel without a loop. Code that a branch may skip, such as disabled options, is excluded. Each innermost loop
has a line, such as those for tiles with and without masks; code outside of loops is excluded.

**programs**: blocks per multiprocessor, limited by registers, shared memory and warps. **in flight**: upper bound on
the bytes that they request from global memory before waiting (with TMA: the shared memory); the memory rate requires
{rates}
per nanosecond of latency. A dash: the loads are in a subroutine.

`transformer-kernels info --static` prints this page. `python -m benchmarks.compilers.static {name}` updates it. A gate
fails if a figure grows, or programs, bytes in flight or a bound decrease, by more than 3 %.
"""


def parts(backend: str) -> dict[str, str]:
    """The parts of a record, each with the hash of everything that affects its figures except the compiler.

    A part, an operation's Triton kernels or the kernels of launchers/<part>.cu, is the prefix of its launches' names.
    """
    here = Path(__file__).parent
    derivation = [here / name for name in DERIVATION[backend]]
    if backend == "cuda":
        from benchmarks.compilers import cuda_launches

        named = dict.fromkeys(itertools.chain(*map(cuda_launches.sources, cuda_launches.ARCHITECTURES)))
        return {part: status.digest_of([*status.machine_code_sources(part), *derivation]) for part in named}
    from benchmarks.compilers.triton import OPERATIONS

    chosen = hashlib.sha256((CHOSEN + SERVED).encode()).hexdigest()[:8]
    return {
        part: f"{chosen} {status.digest_of([*status.kernel_sources(part, backend), *derivation])}"
        for part in OPERATIONS
    }


def reports(backend: str, wanted: Iterable[str]) -> list[Any]:
    """The compiler's reports on the launches of some parts.

    Raises:
        BuildError: nvcc is missing, or fails. BackendUnavailable: Triton is missing.
    """
    if backend == "triton":
        from benchmarks.compilers import triton

        both = f"^(?=.*(?:{CHOSEN}))(?=.*(?:{SERVED}))"
        tiled = triton.report(list(wanted), CHOSEN)
        return tiled + triton.report(list(wanted), both, capabilities=triton.SERVED)
    from benchmarks.compilers import cuda, cuda_launches

    units = [
        (part, compiled, run_by)
        for part, compiled in itertools.product(wanted, cuda_launches.ARCHITECTURES)
        if (run_by := [gpu for gpu in cuda_launches.run_by(compiled) if part in cuda_launches.sources(gpu)])
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda unit: cuda.compile_reports(unit[0], unit[1], disassemble=True), units)
        return [
            report
            for (part, _, run_by), kernels in zip(units, compiled, strict=True)
            for architecture in run_by
            for report in cuda_launches.reports(part, architecture, kernels)
        ]


def release(backend: str) -> str:
    """The compiler's release, such as "Triton 3.6.0" or "nvcc 13.0"."""
    if backend == "triton":
        from transformer_kernels.backends.triton import load

        return f"Triton {load().__version__}"
    toolkit = _build.find_toolkit()
    if toolkit is None:
        raise _build.CompilerMissing(_build.NO_NVCC)
    printed = subprocess.run([str(toolkit.nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return "nvcc " + "".join(re.findall(r"release ([\d.]+)", printed))


def figures(report: Any) -> tuple[str, dict[str, Any]]:
    """The name with architecture, and the recorded figures, of a report."""
    major, minor = report.capability
    names = ("registers", "spills", "shared", "programs", "in_flight")
    found: dict[str, Any] = {name: getattr(report, name) for name in names}
    return f"{report.name} sm_{major}{minor}", {**found, "loops": [dataclasses.asdict(loop) for loop in report.loops]}


def recorded(backend: str) -> dict[str, Any]:
    """The record: the compiler, the hash of each part, and the figures of each launch.

    Raises:
        FileNotFoundError: not a source checkout.
    """
    path = FOLDER / f"{backend}.json"
    if not path.is_file():
        raise FileNotFoundError("the record of static bounds is in the source checkout, in benchmarks/results/static")
    return json.loads(path.read_text())


def changed(backend: str, record: Mapping[str, Any]) -> list[str]:
    """The parts whose sources differ from the recorded ones."""
    return [part for part, digest in parts(backend).items() if record["parts"].get(part) != digest]


def grown(reports: Iterable[Any], record: Mapping[str, Any]) -> list[str]:
    """The figures of recorded launches that grew, and programs, bytes and bounds that decreased, by more than 3 %."""
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
    """Figures that must not grow; inverses of programs, bytes in flight and bounds."""
    yield from ((name, figures[name]) for name in ("registers", "spills", "shared"))
    yield "1 / programs", 1 / figures["programs"]
    yield "1 / bytes in flight", 1 / max(1, figures["in_flight"])
    for number, loop in enumerate(figures["loops"], 1):
        yield f"instructions of loop {number}", loop["instructions"]
        yield f"1 / bound of loop {number}", 1 / loop["bound"]


def page(backend: str) -> str:
    """The page of a backend's record, with a table per part."""
    record = recorded(backend)
    architectures = {name.rpartition(" ")[2] for name in record["launches"]}
    found = {f"sm_{major}{minor}": device for (major, minor), device in DEVICES.items()}
    found = {name: device for name, device in found.items() if name in architectures}
    text = HEADING.format(
        backend=BACKENDS[backend],
        compiler=record["compiler"],
        name=backend,
        devices=_listed(f"{name} ({device.name})" for name, device in found.items()),
        rates=_listed(f"{device.bytes_of_a_multiprocessor:.1f} ({name})" for name, device in found.items()),
    )
    for part, launches in itertools.groupby(record["launches"].items(), key=lambda launch: _part(launch[0])):
        text += f"\n## {part}\n\n{_table(dict(launches))}\n"
    return text


def _listed(texts: Iterable[str]) -> str:
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


def _part(name: str) -> str:
    return name.partition(" ")[0].rstrip(":")


def _table(launches: Mapping[str, Any]) -> str:
    """A Markdown table with a line per loop and launch."""
    loops = [loop for figures in launches.values() for loop in figures["loops"]]
    labels = [label for label in (*CLASSES, "other") if any(loop["classes"].get(label) for loop in loops)]
    rows = [["launch", "GPU", "registers", "spills", "shared", "programs", "in flight", "instr", *labels, "bound"]]
    for name, figures in launches.items():
        launch, _, architecture = name.removeprefix(f"{_part(name)} ").rpartition(" ")
        once = [launch, architecture, *(str(figures[key]) for key in ("registers", "spills", "shared", "programs"))]
        once.append(str(figures["in_flight"] or "-"))
        for loop in figures["loops"]:
            counts = [str(loop["classes"].get(label, 0)) for label in labels]
            rate = "tensor" if loop["classes"].get("matrix") else "memory"
            rows.append([*once, str(loop["instructions"]), *counts, f"{loop['bound']:.0%} {rate}"])
            once = [""] * len(once)
    rows.insert(1, ["---"] * 2 + ["--:"] * (len(rows[0]) - 2))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Compile the kernels that have changed since they were recorded; write the records and their pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers.static", description=main.__doc__)
    parser.add_argument("backend", nargs="*", help=f"{' or '.join(BACKENDS)}; both by default")
    wanted = parser.parse_args().backend or BACKENDS
    if unknown := set(wanted) - BACKENDS.keys():
        parser.error(f"unknown backend {', '.join(sorted(unknown))}; there are {', '.join(BACKENDS)}")
    for backend in wanted:
        path, compiled = update(backend)
        print(f"compiled {', '.join(compiled) or 'nothing'}; wrote {path} and {path.with_suffix('.md')}")


def update(backend: str) -> tuple[Path, list[str]]:
    """Update a record and its page; return the record's path and the compiled parts."""
    path, hashes = FOLDER / f"{backend}.json", parts(backend)
    record = recorded(backend) if path.is_file() else {}
    if record.get("compiler") != release(backend):
        record = {"compiler": release(backend), "parts": {}, "launches": {}}
    wanted = changed(backend, record)
    launches = {name: found for name, found in record["launches"].items() if _part(name) in hashes.keys() - {*wanted}}
    launches |= dict(map(figures, reports(backend, wanted) if wanted else ()))
    order = list(hashes)
    launches = dict(sorted(launches.items(), key=lambda launch: order.index(_part(launch[0]))))  # stable
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in launches.items())
    text = f'{{"compiler": {json.dumps(record["compiler"])},\n"parts": {json.dumps(hashes, indent=0)},\n'
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{text}"launches": {{\n{lines}\n}}}}\n')
    path.with_suffix(".md").write_text(page(backend))
    return path, wanted


if __name__ == "__main__":
    main()
