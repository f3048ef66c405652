"""Static reports of the Triton kernels from their machine code, without a GPU.

The compilations of launches run ahead of time, and their SASS is disassembled with the tools bundled with Triton.
`make gates` and the tests assert the gates (see `failures`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compilers import attention_calls, row_calls
from benchmarks.compilers.launches import Launch, record
from benchmarks.compilers.machine_code import (
    Code,
    Flow,
    Loop,
    disassembled,
    disassembler,
    in_flight,
    loops_of,
    name_of,
    programs_of,
)
from transformer_kernels.backends.triton import Capability, load

MODULE = "benchmarks.compilers.triton"
OPERATIONS = ("attention", *row_calls.CALLS)

SHARED_MEMORY_LIMIT = {(8, 0): 99 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}
"""Maximum bytes per block, by capability: 8.6, 8.9 and 12.0, with 99 KiB, use the tiles of 8.0."""

TILED = ((8, 0), (9, 0))
"""Capabilities with their own tiles, for which every launch is compiled."""

SERVED = tuple(capability for capability in SHARED_MEMORY_LIMIT if capability not in TILED)
"""Other capabilities that use these tiles."""

MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")
WIDE_LOADS = r"(LDG\.[\w.]*128|LDGSTS\.[\w.]*128|UTMALDG)"
WIDE_STORES = r"(STG\.[\w.]*128|UTMASTG)"
ANY_LOAD = r"(LDG\b|LDGSTS\b|UTMALDG)"
OPERAND = r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = (\d), parent = #\w+, kWidth = (\d+)\}>>"
"""An operand of a product in registers: sizes, 0 for the left and 1 for the right one, and the width."""


@dataclass(frozen=True)
class KernelReport:
    """The resources of a compiled launch, and the gates that it fails."""

    name: str
    capability: tuple[int, int]
    num_warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    matrix: int
    loads: int
    wide_loads: int
    wide_stores: int
    instructions: int
    programs: int
    in_flight: int
    loops: tuple[Loop, ...]
    failures: tuple[str, ...]


def launches(operations: Iterable[str] = OPERATIONS, capabilities: Iterable[Capability] = TILED) -> list[Launch]:
    """The compilations requested by the calls of the named operations, for each capability."""
    return [
        launch
        for operation in operations
        for capability in capabilities
        for launch in record(calls_of(operation).calls(operation), capability)
    ]


def calls_of(operation: str) -> Any:
    """The module with the calls and gates of an operation.

    Raises:
        KeyError: no calls are defined for the operation's Triton kernels.
    """
    if operation == "attention":
        return attention_calls
    if operation not in row_calls.CALLS:
        raise KeyError(f"kernel report: no calls of {operation}; add them to row_calls.py")
    return row_calls


def compile_launch(launch: Launch) -> tuple[bytes, int, dict[str, Any]]:
    """Compile ahead of time; return the cubin, the bytes of shared memory per block, and the stages by name."""
    kernel = load().compile(launch.source, target=launch.target, options=dict(launch.options))
    return kernel.asm["cubin"], kernel.metadata.shared, kernel.asm


def disassemble(cubin: bytes) -> tuple[dict[str, int], Code]:
    """Resource usage (REG, STACK, LOCAL, ...) and machine code of the kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(str(disassembler()), "-res-usage", file.name)
        (code,) = disassembled(Path(file.name)).values()
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}, code


def serialised(ptx: str) -> tuple[str, ...]:
    """The warnings of ptxas about serialised wgmma instructions (C7510 to C7519), which Triton does not print."""
    if "wgmma" not in ptx:
        return ()
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(90) if inspect.signature(get_ptxas).parameters else get_ptxas()  # 3.4 has one for all targets
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas.path, "-v", "--gpu-name", "sm_90a", str(source), "-o", f"{source}.cubin"]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(sorted({f"wgmma is serialised ({code})" for code in re.findall(r"\((C75\d\d)\)", finished.stderr)}))


def too_wide(ttgir: str) -> tuple[str, ...]:
    """Operands of products in registers whose layout spans more than twice the summed axis of the tile.

    A thread holds `kWidth` adjacent elements, and four threads a row, twice. Triton derives the width from what is
    before an operand (see `weight_operand` of the Triton kernels). Executed, products over half of what the layout
    spans are right, and those over a quarter are wrong.
    """
    found = set()
    for rows, columns, index, width in re.findall(OPERAND, ttgir):
        summed = int(rows if index == "1" else columns)
        if summed < 4 * int(width):
            found.add(f"an operand with kWidth {width} of a product over {summed}")
    return tuple(sorted(found))


def examine(launch: Launch, gates: Iterable[str]) -> KernelReport:
    """Compile one launch, parse its machine code and check its gates."""
    cubin, shared, stages = compile_launch(launch)
    usage, code = disassemble(cubin)
    flow, counts = Flow(code), Counter(name_of(text) for _, text in code)
    num_warps = launch.options["num_warps"]
    programs = programs_of(usage["REG"], shared, num_warps, launch.capability)

    def count(pattern: str) -> int:
        return sum(number for name, number in counts.items() if re.match(pattern, name))

    report = KernelReport(
        name=launch.name,
        capability=launch.capability,
        num_warps=num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        spills=count(r"(LDL|STL)\b"),
        shared=shared,
        matrix=sum(count(rf"{name}\b") for name in MATRIX_INSTRUCTIONS),
        loads=count(ANY_LOAD),
        wide_loads=count(WIDE_LOADS),
        wide_stores=count(WIDE_STORES),
        instructions=sum(counts.values()),
        programs=programs,
        in_flight=in_flight(flow, shared, num_warps, programs),
        loops=tuple(loops_of(flow, launch.capability, num_warps)),
        failures=(),
    )
    found = failures(report, gates) + serialised(stages["ptx"]) + too_wide(stages["ttgir"])
    return dataclasses.replace(report, failures=found)


def failures(report: KernelReport, gates: Iterable[str]) -> tuple[str, ...]:
    """The failed gates of a report; shared memory is always checked."""
    found = []
    if report.shared > SHARED_MEMORY_LIMIT[report.capability]:
        found.append(f"{report.shared} bytes of shared memory")
    for gate in sorted(gates):
        if gate == "no_spills" and (report.spills or report.stack):
            found.append(f"{report.spills} spill instructions, {report.stack} bytes of stack")
        elif gate == "matrix" and not report.matrix:
            found.append("no matrix instruction")
        elif gate == "wide_loads" and not report.wide_loads:
            found.append("no 16-byte load")
        elif gate == "wide_stores" and not report.wide_stores:
            found.append("no 16-byte store")
        else:
            assert gate in ("no_spills", "matrix", "wide_loads", "wide_stores"), gate
    return tuple(found)


def examine_all(
    operations: Sequence[str], matching: str, jobs: int, every: int = 1, capabilities: tuple[Capability, ...] = TILED
) -> list[KernelReport]:
    """Reports of every n-th launch of `operations` whose name matches `matching`, in the order of the calls."""
    work = [
        (operation, capabilities, index)
        for operation in operations
        for index, launch in enumerate(_launches(operation, capabilities))
        if index % every == 0 and re.search(matching, launch.name)
    ]
    if jobs == 1:
        return [_examine_listed(item) for item in work]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:  # inherits the recorded launches
        return list(pool.map(_examine_listed, work, chunksize=4))


def report(
    operations: Sequence[str] = OPERATIONS,
    matching: str = "",
    jobs: int | None = None,
    every: int = 1,
    capabilities: Sequence[Capability] = TILED,
) -> list[KernelReport]:
    """The reports, from a new process without TRITON_INTERPRET, since the interpreter compiles nothing."""
    command = [sys.executable, "-m", MODULE, "--json", "--jobs", str(jobs or _default_jobs()), "--matching", matching]
    command += ["--every", str(every), "--arch", *(f"{major}.{minor}" for major, minor in capabilities), "--"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    finished = subprocess.run([*command, *operations], env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"kernel report: compilation failed\n{finished.stderr[-4000:]}")
    rows = json.loads(finished.stdout.splitlines()[-1])
    return [
        KernelReport(
            **{
                **row,
                "capability": tuple(row["capability"]),
                "loops": tuple(Loop(**loop) for loop in row["loops"]),
                "failures": tuple(row["failures"]),
            }
        )
        for row in rows
    ]


def table(reports: Sequence[KernelReport]) -> str:
    """The reports as text, one line each."""
    width = max([len(report.name) for report in reports], default=6)
    heading = f"{'kernel':{width}}  target  warps  regs  spills  shared  matrix  16-byte loads  stores  verdict"
    lines = [heading, "-" * len(heading)]
    for row in reports:
        major, minor = row.capability
        lines.append(
            f"{row.name:{width}}  sm_{major}{minor}  {row.num_warps:6}  {row.registers:4}  {row.spills:6}"
            f"  {row.shared:6}  {row.matrix:6}  {f'{row.wide_loads} of {row.loads}':>13}  {row.wide_stores:6}"
            f"  {'; '.join(row.failures) or 'ok'}"
        )
    failing = sum(bool(row.failures) for row in reports)
    lines.append(f"{len(reports)} compilations, {failing} failing")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a gate fails."""
    parser = argparse.ArgumentParser(prog="transformer-kernels kernels", description=__doc__)
    parser.add_argument(
        "operations", nargs="*", metavar="operation", help=f"some of {', '.join(OPERATIONS)}; all by default"
    )
    parser.add_argument("--matching", default="", help="only launches whose name matches this regular expression")
    parser.add_argument("--every", type=int, default=1, help="only every n-th launch of an operation")
    parser.add_argument("--jobs", type=int, default=_default_jobs(), help="number of parallel processes")
    parser.add_argument(
        "--arch", nargs="+", type=_capability, default=TILED, metavar="x.y",
        help="compute capabilities to compile for, such as 8.0",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="compile in this process and print JSON instead of the table"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    operations = arguments.operations or OPERATIONS
    if arguments.json:
        reports = examine_all(operations, arguments.matching, arguments.jobs, arguments.every, tuple(arguments.arch))
        print(json.dumps([dataclasses.asdict(row) for row in reports]))
        return 0
    reports = report(operations, arguments.matching, arguments.jobs, arguments.every, arguments.arch)
    print(table(reports))
    return int(any(row.failures for row in reports))


def _capability(text: str) -> Capability:
    """Parse a supported capability such as "8.6"."""
    major, minor = map(int, text.split("."))
    if (major, minor) not in SHARED_MEMORY_LIMIT:
        raise ValueError(text)
    return major, minor


def _examine_listed(item: tuple[str, tuple[Capability, ...], int]) -> KernelReport:
    operation, capabilities, index = item
    launch = _launches(operation, capabilities)[index]
    return examine(launch, calls_of(operation).gates(launch))


@functools.cache
def _launches(operation: str, capabilities: tuple[Capability, ...]) -> list[Launch]:
    return launches([operation], capabilities)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _default_jobs() -> int:
    return min(os.cpu_count() or 1, 8)


if __name__ == "__main__":
    sys.exit(main())
