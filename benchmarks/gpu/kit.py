"""Compiles in advance, without a GPU, what the record of a GPU needs: runs/gpu-kit.tar.xz, minutes on two cores.

    python -m benchmarks.gpu.kit                      make it, for an H100 or H200
    python -m benchmarks.gpu.kit --minutes 90         all Triton kernels: the parity suite launches many

It has the CUDA extension for the GPU's architecture, the Triton kernels that the calls launch, and the program of the
conformance tests with its expected output. A driver that launches nothing collects the Triton kernels, of which as many
are compiled as the time allows, in the order of the calls. Each part is used if it was built from the same sources,
Triton's kernels by the same release of Triton: its cache keys contain a hash of Triton's files, which differ between
builds for two Pythons, so `unpack` computes the keys anew.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from transformer_kernels.backends import build, triton
from transformer_kernels.backends.triton import Capability

ARCHIVE = environment.ROOT / "runs" / "gpu-kit.tar.xz"
OBJECTS = environment.ROOT / "build" / "gpu"
PACKAGE = environment.ROOT / "transformer_kernels"
EXTENSION, CONFORMANCE, DESCRIPTION = "_kernels.abi3.so", "conformance", "kit.json"
CONFORMANCE_FOLDER = "BENCHMARK_CONFORMANCE"
"""A variable that names the folder of the conformance program and its output."""
LOADS = "import transformer_kernels.backends.cuda as cuda; cuda.load()"
COMPILES = "import sys; from benchmarks.gpu import kit; raise SystemExit(kit.main(['--compile', sys.argv[1]]))"
PARTS = ("smoke", "tables", "steps", "tests")
PRESET = 6
"""Compression level of xz."""


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a GPU, or the interpreted one on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return triton.INTERPRETED_CAPABILITY


def architecture_of(device: torch.device) -> str:
    """The architecture to compile for, as nvcc names it: 90a on an H100."""
    major, minor = capability_of(device)
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def conformance_sources() -> str:
    """The hash of the conformance program's sources."""
    files = [environment.ROOT / "tests" / "emulation" / name for name in ("conformance.cu", "device_memory.h")]
    digest = hashlib.sha256(build.source_hash(emulated=True).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def triton_version() -> str:
    return str(environment.installed("triton"))


# On the machine with the GPU


@dataclass(frozen=True)
class Used:
    """The parts of the kit that are usable here."""

    extension: bool = False
    kernels: int = 0
    conformance: bool = False
    why: tuple[str, ...] = ()

    def describe(self) -> str:
        parts = ["the extension"] * self.extension + [f"{self.kernels} Triton kernels"] * bool(self.kernels)
        parts += ["the conformance program"] * self.conformance
        return "; ".join([" and ".join(parts) or "nothing", *self.why])


def unpack(folder: Path, architecture: str, archive: Path = ARCHIVE, package: Path | None = None) -> Used:
    """Unpack the usable parts: the extension into the package, the others below `folder`."""
    package = package or PACKAGE
    if not archive.is_file():
        return Used(why=(f"there is no {archive.name}",))
    kit = folder / "kit"
    shutil.rmtree(kit, ignore_errors=True)
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(kit, filter="data")
        described = json.loads((kit / DESCRIPTION).read_text())
    except (OSError, ValueError, tarfile.TarError) as error:
        return Used(why=(f"{archive.name} cannot be read: {error}",))
    if described["architecture"] != architecture:
        return Used(why=(f"it is for {described['architecture']}, and this is {architecture}",))
    why = []
    extension = described["extension"] == build.source_hash() and (kit / EXTENSION).is_file()
    if extension:
        shutil.copy(kit / EXTENSION, package / EXTENSION)
        (package / "_kernels_source_hash.txt").write_text(f"{described['extension']}\n")
    else:
        why.append("its extension is of other sources")
    kernels = 0
    if described["triton"] == triton_version():
        kernels = adopt(described["kernels"], kit, Path(os.environ.get("TRITON_CACHE_DIR") or folder / "triton"))
    else:
        why.append(f"its kernels are of Triton {described['triton']}, and this is {triton_version()}")
    conformance = described["conformance"] == conformance_sources() and (kit / CONFORMANCE).is_file()
    if conformance:
        os.environ[CONFORMANCE_FOLDER] = str(kit.resolve())
    else:
        why.append("its conformance program is of other sources")
    return Used(extension, kernels, conformance, tuple(why))


def adopt(kernels: list[dict[str, str]], kit: Path, cache: Path) -> int:
    """Put the kit's Triton kernels into the cache under the keys of this machine's Triton; returns their number.

    A kernel whose source or options changed is not found under its key, and is compiled.
    """
    from triton.runtime.cache import _base32, triton_key

    for number, kernel in enumerate(kernels):
        digest = hashlib.sha256(f"{triton_key()}{kernel['key']}".encode()).hexdigest()
        target = cache.resolve() / _base32(digest)
        target.mkdir(parents=True, exist_ok=True)
        metadata = json.loads((kit / "triton" / f"{number}.json").read_text()) | {"hash": digest}
        files = {f"{kernel['name']}.{kind}": target / f"{kernel['name']}.{kind}" for kind in ("json", "cubin")}
        files[f"{kernel['name']}.json"].write_text(json.dumps(metadata))
        shutil.copyfile(kit / "triton" / f"{number}.cubin", files[f"{kernel['name']}.cubin"])
        group = {"child_paths": {name: str(path) for name, path in files.items()}}
        (target / f"__grp__{kernel['name']}.json").write_text(json.dumps(group))
    return len(kernels)


def compile_extension(architecture: str, package: Path | None = None) -> list[str]:
    """Compile the extension into the package; the errors of the sources that had to be left out.

    Objects of a compilation that broke off are used by the next one.

    Raises:
        BuildError: nothing can be compiled.
    """
    package, toolkit = package or PACKAGE, build.find_toolkit()
    if toolkit is None:
        raise build.CompilerMissing(build.NO_NVCC)
    failed: list[str] = []
    built = build.build_cuda(OBJECTS, toolkit, architecture, failed=failed)
    shutil.copyfile(built, package / EXTENSION)
    (package / "_kernels_source_hash.txt").write_text(build.source_hash() + "\n")
    return failed


# On a machine without one


def make(architecture: str, parts: tuple[str, ...], minutes: float, archive: Path = ARCHIVE) -> int:
    """Make the archive; 1 if the extension or the conformance program is missing."""
    missing, until = [], time.time() + 60.0 * minutes
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder)
        described: dict[str, Any] = {"architecture": architecture, "extension": "", "conformance": ""}
        try:
            if failed := compile_extension(architecture, kit):
                raise build.BuildError("\n".join(failed))
            described["extension"] = build.source_hash()
        except build.BuildError as error:
            (kit / EXTENSION).unlink(missing_ok=True)
            missing.append(f"no extension: {error}")
        try:
            make_conformance(architecture, kit)
            described["conformance"] = conformance_sources()
        except (build.BuildError, subprocess.CalledProcessError, AssertionError) as error:
            missing.append(f"no conformance program: {error}")
        fill(architecture.rstrip("af"), parts, kit, until)
        described |= {"triton": triton_version(), "kernels": json.loads((kit / "kernels.json").read_text())}
        (kit / DESCRIPTION).write_text(json.dumps(described))
        pack(kit, archive, len(described["kernels"]))
    kernels, size = len(described["kernels"]), archive.stat().st_size / 2**20
    print("\n".join([*missing, f"{archive}: {size:.1f} MiB, {kernels} Triton kernels of {described['triton']}"]))
    return int(bool(missing))


def make_conformance(architecture: str, kit: Path) -> None:
    """The program of tests/emulation/conformance.cu for the GPU, and the emulation's output."""
    from tests.emulation import programs

    os.environ["TRANSFORMER_KERNELS_EMULATE_ARCH"] = architecture.rstrip("af")
    programs.compile_for_device("conformance", architecture, kit / CONFORMANCE)
    emulated = programs.run("conformance", "plain")
    emulated.check_returncode()
    (kit / f"{CONFORMANCE}.txt").write_text(emulated.stdout)


def pack(kit: Path, archive: Path, kernels: int) -> None:
    """The archive: the description first, then the files that it describes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    names = [DESCRIPTION, EXTENSION, CONFORMANCE, f"{CONFORMANCE}.txt"]
    names += [f"triton/{number}.{kind}" for number in range(kernels) for kind in ("json", "cubin")]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=PRESET) as packed:
        for name in names:
            if (kit / name).is_file():
                packed.add(kit / name, name)
    archive.write_bytes(buffer.getvalue())


def fill(capability: str, parts: tuple[str, ...], kit: Path, until: float) -> None:
    """Compile the Triton kernels of these parts into kit/triton, with their names and keys in kernels.json."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0", "TRANSFORMER_KERNELS_EMULATE": "0"}
        keys = Path(cache) / "keys.jsonl"
        for part in parts:
            command = [sys.executable, "-m", "benchmarks.gpu.compile_only", capability, part, str(keys), str(until)]
            subprocess.run(command, cwd=environment.ROOT, env={**os.environ, **variables}, check=True)
        collect(Path(cache), keys, kit)


def collect(cache: Path, keys: Path, kit: Path) -> None:
    """Move compiled kernels from Triton's cache to the kit."""
    from triton.runtime.cache import _base32

    kernels: dict[str, dict[str, str]] = {}
    (kit / "triton").mkdir()
    for line in map(json.loads, keys.read_text().splitlines()):
        folder = cache / _base32(line["digest"])
        binary = next(folder.glob("*.cubin"), None)
        if binary is None or line["digest"] in kernels:  # ptxas refused it, or another part has it
            continue
        for kind in ("json", "cubin"):
            shutil.move(binary.with_suffix(f".{kind}"), kit / "triton" / f"{len(kernels)}.{kind}")
        kernels[line["digest"]] = {"name": binary.stem, "key": line["key"]}
    (kit / "kernels.json").write_text(json.dumps(list(kernels.values())))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="90a", help="default: %(default)s, an H100 or H200")
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="part of the Triton kernels")
    parser.add_argument("--minutes", type=float, default=20.0, help="of compilation in all (default: %(default)s)")
    parser.add_argument("--compile", metavar="ARCHITECTURE", help="only compile the extension into the package")
    chosen = parser.parse_args(arguments)
    if chosen.compile:
        failed = compile_extension(chosen.compile)
        print("\n".join(failed))
        return int(bool(failed))
    return make(chosen.architecture, tuple(part for part in PARTS if part not in chosen.without), chosen.minutes)


if __name__ == "__main__":
    raise SystemExit(main())
