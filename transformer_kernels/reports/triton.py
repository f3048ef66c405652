"""What the compiler made of every Triton kernel, read from the machine code; no GPU is needed.

Each configuration of every table is compiled ahead of time for sm_80 and sm_90, and its SASS is disassembled with the
tools that ship inside Triton. The gates (see `failures`) are what `make gates` and the tests assert.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
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

from transformer_kernels.backends.triton import Configuration, load
from transformer_kernels.ops import WITH_KERNELS

MODULE = "transformer_kernels.reports.triton"
MINIMUM_VERSION = (3, 3)
OPERATIONS = WITH_KERNELS

SHARED_MEMORY_LIMIT = {(8, 0): 163 * 1024, (9, 0): 227 * 1024}
"""Bytes that one block may use, by capability."""

MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA")
WIDE_LOADS = r"(LDG\.[\w.]*128|LDGSTS\.[\w.]*128|UTMALDG)"
WIDE_STORES = r"(STG\.[\w.]*128|UTMASTG)"
ANY_LOAD = r"(LDG\b|LDGSTS\b|UTMALDG)"
INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class KernelReport:
    """What one compiled configuration uses, and which gates it fails."""

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
    failures: tuple[str, ...]


def configurations(operations: Iterable[str] = OPERATIONS) -> list[Configuration]:
    """Every entry of every Triton table of the named operations; none for one without Triton kernels of its own."""
    listed: list[Configuration] = []
    for operation in operations:
        name = f"transformer_kernels.ops.{operation}._triton"
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            listed += module.configurations() if hasattr(module, "configurations") else []
    return listed


def compile_configuration(configuration: Configuration, capability: tuple[int, int]) -> tuple[bytes, int]:
    """Compile ahead of time; return the cubin and the bytes of shared memory that a block needs."""
    triton = load()
    if tuple(map(int, triton.__version__.split(".")[:2])) < MINIMUM_VERSION:
        raise RuntimeError(
            f"kernel report: needs Triton 3.3 or newer, its compiler's interface; got {triton.__version__}"
        )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(configuration.kernel.arg_names)
    assert set(names) == set(configuration.signature), (configuration.name, names, list(configuration.signature))
    aligned = {
        name
        for name, kind in configuration.signature.items()
        if kind.startswith("*") and name not in configuration.unaligned
    } | configuration.divisible
    source = ASTSource(
        configuration.kernel,
        {name: configuration.signature[name] for name in names},
        dict(configuration.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages, **configuration.options}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    kernel = triton.compile(source, target=target, options=options)
    return kernel.asm["cubin"], kernel.metadata.shared


def disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage (REG, STACK, LOCAL, ...) and SASS of a cubin, by the tools in Triton's wheel."""
    tools = Path(str(load().__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        sass = _output(tools / "nvdisasm", "-c", file.name)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}, sass


def examine(configuration: Configuration, capability: tuple[int, int]) -> KernelReport:
    """Compile one configuration, read its machine code and judge it by its gates."""
    cubin, shared = compile_configuration(configuration, capability)
    usage, sass = disassemble(cubin)
    counts = Counter(INSTRUCTION.findall(sass))

    def count(pattern: str) -> int:
        return sum(number for name, number in counts.items() if re.match(pattern, name))

    report = KernelReport(
        name=configuration.name,
        capability=capability,
        num_warps=configuration.num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        spills=count(r"(LDL|STL)\b"),
        shared=shared,
        matrix=sum(count(rf"{name}\b") for name in MATRIX_INSTRUCTIONS),
        loads=count(ANY_LOAD),
        wide_loads=count(WIDE_LOADS),
        wide_stores=count(WIDE_STORES),
        instructions=sum(counts.values()),
        failures=(),
    )
    return dataclasses.replace(report, failures=failures(report, configuration.gates))


def failures(report: KernelReport, gates: Iterable[str]) -> tuple[str, ...]:
    """Which gates a report does not pass: shared memory always, the others where the configuration names them."""
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


def examine_all(operations: Sequence[str], matching: str, jobs: int) -> list[KernelReport]:
    """Reports of the configurations of `operations` whose name contains `matching`, in the order of the tables."""
    listed = configurations(operations)
    work = [
        (index, capability)
        for index, configuration in enumerate(listed)
        if matching in configuration.name
        for capability in configuration.capabilities
    ]
    examine_one = functools.partial(_examine_listed, tuple(operations))
    if jobs == 1:
        return [examine_one(item) for item in work]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(examine_one, work, chunksize=4))


def report(operations: Sequence[str] = OPERATIONS, matching: str = "", jobs: int | None = None) -> list[KernelReport]:
    """The reports, made in a fresh process without TRITON_INTERPRET: the interpreter has nothing to compile."""
    command = [sys.executable, "-m", MODULE, "--json", "--jobs", str(jobs or _default_jobs()), "--matching", matching]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    finished = subprocess.run([*command, *operations], env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"kernel report: compilation failed\n{finished.stderr[-4000:]}")
    rows = json.loads(finished.stdout.splitlines()[-1])
    return [
        KernelReport(**{**row, "capability": tuple(row["capability"]), "failures": tuple(row["failures"])})
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
    """Print the table; return 1 when a gate fails."""
    parser = argparse.ArgumentParser(prog="transformer-kernels kernels", description=__doc__)
    parser.add_argument(
        "operations", nargs="*", metavar="operation", help=f"some of {', '.join(OPERATIONS)}; all by default"
    )
    parser.add_argument("--matching", default="", help="only configurations whose name contains this")
    parser.add_argument("--jobs", type=int, default=_default_jobs(), help="processes that compile side by side")
    parser.add_argument(
        "--json", action="store_true", help="compile in this process and print JSON instead of the table"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    operations = arguments.operations or OPERATIONS
    if arguments.json:
        reports = examine_all(operations, arguments.matching, arguments.jobs)
        print(json.dumps([dataclasses.asdict(row) for row in reports]))
        return 0
    reports = report(operations, arguments.matching, arguments.jobs)
    print(table(reports))
    return int(any(row.failures for row in reports))


def _examine_listed(operations: tuple[str, ...], item: tuple[int, tuple[int, int]]) -> KernelReport:
    index, capability = item
    return examine(_listed(operations)[index], capability)


@functools.cache
def _listed(operations: tuple[str, ...]) -> list[Configuration]:
    return configurations(operations)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _default_jobs() -> int:
    return min(os.cpu_count() or 1, 8)


if __name__ == "__main__":
    sys.exit(main())
