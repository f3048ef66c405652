"""For each kernel: the GPUs on which its current sources were verified, or that they have changed since.

The record is `benchmarks/results/<gpu>/kernels.json`, written by tests on that GPU. A kernel is identified by the hash
of its sources: its own files and the files of this repository that they include or import.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compilers import row_calls
from transformer_kernels.backends import dispatch

OPERATIONS = ("attention", *row_calls.CALLS)
BACKENDS = ("triton", "cuda")

CHECKOUT = Path(__file__).resolve().parents[2]
HOST_ONLY = ("launch.h", "registry.h")
"""Files of csrc without device code."""
INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def kernel_sources(op: str, backend: str, checkout: Path = CHECKOUT) -> list[Path]:
    """The sources of a kernel; empty if the backend has no such kernel."""
    family = dispatch.OPERATIONS[op].folder.rpartition(".")[2]
    folder = checkout / "transformer_kernels" / "ops" / family
    if backend == "triton":
        return sorted(_closure(sorted(folder.glob("_triton*.py")), lambda path: _imported(path, checkout)))
    csrc = checkout / "csrc"
    own = [path for name in sorted({op, family}) for path in _compiled(csrc / "cuda", name)]
    host = folder / "_compiled.py"
    if not host.is_file() or not own:
        return []
    return sorted({host, *_closure(own, lambda path: _included(path, csrc))})


def machine_code_sources(source: str, checkout: Path = CHECKOUT) -> list[Path]:
    """The sources that affect the machine code of csrc/cuda/launchers/<source>.cu."""
    csrc = checkout / "csrc"
    closure = _closure([csrc / "cuda" / "launchers" / f"{source}.cu"], lambda path: _included(path, csrc))
    return sorted(path for path in closure if path.name not in HOST_ONLY)


def _compiled(folder: Path, op: str) -> list[Path]:
    return [path for path in sorted(folder.glob(f"*/{op}*")) if path.suffix in (".cu", ".cuh", ".h")]


def _closure(files: list[Path], following: Any) -> set[Path]:
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += following(path)
    return found


def _included(path: Path, csrc: Path) -> Iterator[Path]:
    """Files that a CUDA source includes; the emulation is not part of a kernel on a GPU."""
    for name in INCLUDE.findall(path.read_bytes()):
        for candidate in (path.parent / name.decode(), csrc / name.decode()):
            if candidate.is_file() and "emulation" not in candidate.parts:
                yield candidate.resolve()
                break


def _imported(path: Path, checkout: Path) -> Iterator[Path]:
    """Files of the backend triton that a Python source imports from this package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("transformer_kernels"):
            continue
        assert node.module is not None
        for module in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]:
            file = checkout.joinpath(*module.split(".")).with_suffix(".py")
            if (file.name.startswith("_triton") or file.match("backends/triton*.py")) and file.is_file():
                yield file


def kernel_hash(op: str, backend: str, checkout: Path = CHECKOUT) -> str | None:
    """SHA-256 over the names and contents of a kernel's sources; None if there is no such kernel."""
    sources = kernel_sources(op, backend, checkout)
    return digest_of(sources, checkout) if sources else None


def digest_of(paths: Iterable[Path], checkout: Path = CHECKOUT) -> str:
    """SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(checkout).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def recorded(checkout: Path = CHECKOUT) -> list[dict[str, Any]]:
    """All recorded verifications: kernel, dtype, hash, device, date, passed and failed tests, completeness."""
    files = sorted((checkout / "benchmarks" / "results").glob("*/kernels.json"))
    return [entry for file in files for entry in json.loads(file.read_text())]


def verification(checkout: Path = CHECKOUT) -> list[str]:
    """One line per kernel, with a record one per dtype: where its current sources were verified, if they were."""
    if not (checkout / "benchmarks").is_dir():
        return ["the record of verified kernels is in the source checkout, in benchmarks/results"]
    records = recorded(checkout)
    lines = []
    for op in OPERATIONS:
        for backend in BACKENDS:
            digest = kernel_hash(op, backend, checkout)
            if digest is not None:
                kernel = f"{op}/{backend}"
                known = [entry for entry in records if entry["kernel"] == kernel]
                dtypes = sorted({entry["dtype"] for entry in known})
                states = {dtype: _state(digest, [row for row in known if row["dtype"] == dtype]) for dtype in dtypes}
                lines += [f"{kernel:<22} {dtype}: {state}" for dtype, state in states.items()]
                if not states:
                    lines.append(f"{kernel:<22} {_state(digest, [])}")
    return lines


def summary(checkout: Path = CHECKOUT) -> list[str]:
    """The lines of `verification`, with the most common state in one last line."""
    kernels_by_state: dict[str, list[str]] = {}
    for line in (lines := verification(checkout)):
        kernels_by_state.setdefault(line.partition(" ")[2].strip(), []).append(line)
    shared = max(kernels_by_state, key=lambda state: len(kernels_by_state[state]), default="")
    count = len(kernels_by_state.get(shared, ()))
    if count < 2:
        return lines
    rest = [line for line in lines if line not in kernels_by_state[shared]]
    which = f"the other {count}" if rest else f"all {count}"
    return [*rest, f"{which:<22} {shared} (each: info --kernels)"]


def _state(digest: str, known: list[dict[str, Any]]) -> str:
    if not known:
        return "on no GPU yet: its tests ran interpreted or emulated on the CPU"
    newest_first = sorted(known, key=lambda entry: entry["date"], reverse=True)
    for entry in newest_first:
        if entry["hash"] == digest:
            return _judged(entry)
    entry = newest_first[0]
    return f"changed since {entry['date'][:10]}, when on {entry['device']} it was {_judged(entry).split(' on ')[0]}"


def _judged(entry: dict[str, Any]) -> str:
    where = f"on {entry['device']}, {entry['date'][:10]}"
    if entry["failed"]:
        return f"FAILED on {where.removeprefix('on ')}: {entry['failed']} of {entry['failed'] + entry['passed']} tests"
    if not entry["passed"]:
        return f"not run {where}: its tests were skipped"
    unfinished = "" if entry["complete"] else ", in part: the time ended before the tests did"
    return f"verified {where} ({entry['passed']} tests{unfinished})"
