"""nvcc's report on each CUDA kernel: registers, spills, shared memory and instruction counts.

    python -m benchmarks.compilers.cuda [--arch 80 90a] [operation ...]

No GPU is needed. Instructions are counted in the PTX of each kernel, before loops run: mma.sync becomes HMMA and wgmma
becomes HGMMA in machine code; a 16-byte access is a .v4.b32 (or .v2.b64) load or store of global memory.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compilers.machine_code import Code, disassembled
from transformer_kernels.backends import build as _build

DEFAULT_ARCHITECTURES = ("80", "90a")
NAMESPACE = "transformer_kernels::"


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel template, compiled for one architecture. Sizes in bytes; counts are static."""

    operation: str
    architecture: str
    name: str
    arguments: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    mma: int
    wgmma: int
    loads_16_bytes: int
    register_moves: int  # setmaxnreg
    serialised: bool  # ptxas warned (C75xx) that it serialises wgmma
    code: Code = field(default=(), repr=False)  # if requested


def compile_reports(
    operation: str, architecture: str, toolkit: _build.Toolkit | None = None, disassemble: bool = False
) -> list[Kernel]:
    """Compile cuda/launchers/<operation>.cu for one architecture, such as "80" or "90a", and parse the output of ptxas.

    With `disassemble` each kernel also has its machine code, if cuobjdump is installed.

    Raises:
        BuildError: nvcc is missing, or fails.
    """
    toolkit = toolkit or _build.find_toolkit()
    if toolkit is None:
        raise _build.CompilerMissing("no nvcc in CUDA_HOME, PATH or the pip package nvidia-cuda-nvcc")
    source = _build.CSRC / "cuda" / "launchers" / f"{operation}.cu"
    includes = [f"-I{path}" for path in toolkit.include] + [f"-I{sysconfig.get_paths()['include']}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(toolkit.nvcc), "-std=c++17", "-O3", "-cubin", "-Xptxas=-v", "--keep", f"--keep-dir={folder}"]
        command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", *includes]
        result = subprocess.run(
            [*command, str(source), "-o", f"{folder}/out.cubin"], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise _build.BuildError(f"{source.name} for sm_{architecture}:\n{result.stderr[-3000:]}")
        ptx = next(Path(folder).glob("*.ptx")).read_text()
        code = disassembled(Path(folder, "out.cubin")) if disassemble else {}
    return list(_parse(operation, architecture, result.stderr, ptx, code))


_ENTRY = re.compile(
    r"Compiling entry function '(?P<mangled>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def _parse(operation: str, architecture: str, log: str, ptx: str, code: dict[str, Code]) -> Iterable[Kernel]:
    entries = list(_ENTRY.finditer(log))
    bodies = {
        part.split("(", 1)[0].strip(): part for part in ptx.split(".entry ")[1:]
    }  # inline assembly has braces too
    names = demangled([entry["mangled"] for entry in entries])
    for entry, name in zip(entries, names, strict=True):
        body = bodies.get(entry["mangled"], "")
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        yield Kernel(
            operation,
            f"sm_{architecture}",
            *instance(name),
            int(entry["registers"]),
            int(entry["stores"]),
            int(entry["loads"]),
            int(entry["stack"]),
            int(shared[1]) if shared else 0,
            body.count("mma.sync"),
            body.count("wgmma.mma_async"),
            len(re.findall(r"ld\.global[.\w:]*\.(?:v4\.[bfu]32|v2\.[bfu]64)", body)),
            body.count("setmaxnreg"),
            re.search(r"\(C75\d\d\)", log) is not None,
            code.get(entry["mangled"], ()),
        )


def instance(name: str) -> tuple[str, str]:
    """Template name and arguments of a demangled name."""
    short, _, arguments = name.partition("<")
    arguments = arguments.replace(NAMESPACE, "").replace("(anonymous namespace)::", "")
    return short.split("::")[-1].split(" ")[-1].split("(")[0], re.sub(r"\(.*", "", arguments)[:-1]


def demangled(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return names
    result = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return result.stdout.strip().split("\n")


def table(kernels: Iterable[Kernel]) -> str:
    """One line per kernel and architecture, with the worst of its instances."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.architecture), []).append(kernel)
    head = (
        "kernel",
        "arch",
        "instances",
        "registers",
        "spills",
        "stack",
        "static smem",
        "mma",
        "wgmma",
        "16-byte loads",
    )
    rows = [head]
    for (name, architecture), group in sorted(groups.items()):
        registers = sorted(kernel.registers for kernel in group)
        rows.append(
            (
                name,
                architecture,
                str(len(group)),
                f"{registers[0]}-{registers[-1]}",
                str(max(kernel.spill_stores + kernel.spill_loads for kernel in group)),
                str(max(kernel.stack for kernel in group)),
                str(max(kernel.static_shared for kernel in group)),
                str(max(kernel.mma for kernel in group)),
                str(max(kernel.wgmma for kernel in group)),
                str(max(kernel.loads_16_bytes for kernel in group)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def operations() -> list[str]:
    """The operations with CUDA sources."""
    return sorted(path.stem for path in (_build.CSRC / "cuda" / "launchers").glob("*.cu"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("operation", nargs="*", default=operations())
    parser.add_argument("--arch", nargs="+", default=DEFAULT_ARCHITECTURES)
    options = parser.parse_args(arguments)
    try:
        kernels = [k for op in options.operation for arch in options.arch for k in compile_reports(op, arch)]
    except _build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
