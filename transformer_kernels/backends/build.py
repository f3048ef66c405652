"""Builds csrc: with nvcc for GPUs, with a host compiler for their emulation and for dropout on the CPU.

Standard library only and no import of this package: setup.py loads this file before torch is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
RELEASE_ARCHITECTURES = "80;90a;100;120+PTX"
"""Machine code runs on the later GPUs of its generation too: that of sm_80 on sm_86, sm_87 and sm_89, that of sm_100 on
sm_103, that of sm_120 on sm_121. No kernel has an instruction that those add; PTX serves the generations to come."""
BUILD_NOTE = "_kernels_build.txt"
"""Beside the extension, or in its place: what the installation built for GPUs and why, for `info` and errors."""

NO_NVCC = (
    "no nvcc in CUDA_HOME, PATH or the pip package nvidia-cuda-nvcc. Install a CUDA toolkit, or pip install "
    "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime, all of one release, and run "
    "pip install . again in the checkout"
)
NO_GPU = (
    "nvcc is there and no GPU to build for. For GPUs that are elsewhere name them, as in "
    "TRANSFORMER_KERNELS_CUDA_ARCHS=90a pip install . in the checkout, or release for all that a release has"
)
SANITIZERS = ("address", "thread")
SOURCE_SUFFIXES = (".h", ".cuh", ".cu", ".cpp")


class BuildError(RuntimeError):
    """A compiler failed; the message ends with its last lines."""


class CompilerMissing(BuildError):
    """No compiler of the kind that is needed was found."""


def source_hash(csrc: Path = CSRC, emulated: bool = False) -> str:
    """SHA-256 over the names and contents of the sources that go into a build."""
    foreign = ("cpu",) if emulated else ("cpu", "emulation")
    return _digest(csrc, [path for path in csrc.rglob("*") if path.relative_to(csrc).parts[0] not in foreign])


def _digest(csrc: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in SOURCE_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@dataclass
class Toolkit:
    """An nvcc with the folders of its headers and libraries."""

    nvcc: Path
    include: list[Path] = field(default_factory=list)
    library: list[Path] = field(default_factory=list)


def find_toolkit() -> Toolkit | None:
    """nvcc from CUDA_HOME, else from PATH, else from the pip packages (nvidia-cuda-nvcc, -crt, -cccl and -runtime)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    for nvcc in ([Path(home) / "bin" / "nvcc"] if home else []) + ([Path(on_path)] if on_path else []):
        if nvcc.is_file():
            return Toolkit(nvcc, library=_libraries_beside(nvcc))
    return _toolkit_of_pip()


def _libraries_beside(nvcc: Path) -> list[Path]:
    roots = {nvcc.parent.parent, nvcc.resolve().parent.parent, Path("/usr/local/cuda")}
    folders = [root / name for root in roots for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    return [folder for folder in folders if (folder / "libcudart_static.a").is_file()]


def _toolkit_of_pip() -> Toolkit | None:
    folders = dict.fromkeys([*sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    packages = [Path(folder) / "nvidia" for folder in folders if (Path(folder) / "nvidia").is_dir()]
    for root in packages:
        for nvcc in sorted(root.glob("*/bin/nvcc"), reverse=True):
            include = sorted(path for path in root.glob("*/include") if _same_release(path, nvcc))
            library = sorted(path.parent for path in root.glob("*/lib*/libcudart_static.a"))
            return Toolkit(nvcc, include, library)
    return None


def _same_release(include: Path, nvcc: Path) -> bool:
    """From CUDA 13 on, the packages of one release share the folder nvidia/cu13; before, each had its own."""
    folder = nvcc.parent.parent.name
    return include.parent.name == folder if folder.startswith("cu1") else include.parent.name.startswith("cuda_")


def gencode_flags(architectures: str) -> tuple[list[str], str]:
    """nvcc's flags for "80;90a;120+PTX", and the list as the module will show it; +PTX adds code for later GPUs.

    All from 100 on are compiled from the PTX of the lowest: ptxas makes the machine code of 120 of either.
    """
    targets: list[tuple[str, str]] = []
    for entry in architectures.replace(",", ";").replace(" ", ";").split(";"):
        number = entry.strip().lower().removeprefix("sm_").replace(".", "")
        only_ptx, number = number.startswith("compute_"), number.removeprefix("compute_")
        if not number:
            continue
        number, _, ptx = number.partition("+")
        if not number.rstrip("af").isdigit() or ptx not in ("", "ptx"):
            raise ValueError(f"TRANSFORMER_KERNELS_CUDA_ARCHS: cannot read {entry!r}; write for example 80;90a;120+PTX")
        targets += [("sm", number)] * (not only_ptx) + [("compute", number)] * bool(ptx or only_ptx)
    if not targets:
        raise ValueError("TRANSFORMER_KERNELS_CUDA_ARCHS is empty")
    alike = [number for _, number in targets if number.isdigit() and int(number) >= 100]
    virtual = {number: min(alike, key=int) if number in alike else number for _, number in targets}
    names = {f"{kind}_{number if kind == 'sm' else virtual[number]}": virtual[number] for kind, number in targets}
    return [f"-gencode=arch=compute_{number},code={name}" for name, number in names.items()], " ".join(names)


def present_architectures() -> str:
    """The GPUs of this machine as nvidia-smi names them, such as "86;90a"; empty without one."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return ""
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    numbers = {line.strip().replace(".", "") for line in result.stdout.splitlines()}
    return ";".join("90a" if number == "90" else number for number in sorted(numbers) if number.isdigit())


def wanted_architectures() -> tuple[str, str]:
    """What an installation builds for GPUs, and why; nothing is built for an empty first part."""
    named = os.environ.get("TRANSFORMER_KERNELS_CUDA_ARCHS", "").strip()
    if named == "none":
        return "", "TRANSFORMER_KERNELS_CUDA_ARCHS is none"
    if find_toolkit() is None:
        return "", NO_NVCC
    if named:
        return RELEASE_ARCHITECTURES if named == "release" else named, f"TRANSFORMER_KERNELS_CUDA_ARCHS is {named}"
    present = present_architectures()
    return present, "the GPUs of the machine it was installed on" if present else NO_GPU


def find_host_compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise CompilerMissing("no C++ compiler was found: install g++, or name one in CXX")


def has_host_compiler() -> bool:
    try:
        return bool(find_host_compiler())
    except CompilerMissing:
        return False


def _find_ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
    if not found:
        raise CompilerMissing("ninja was not found: pip install ninja")
    return found


def _escape(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def _include_flags() -> str:
    try:
        import pybind11
    except ImportError as error:
        raise CompilerMissing("pybind11 was not found: pip install 'pybind11>=2.13'") from error
    return f"-I{sysconfig.get_paths()['include']} -I{pybind11.get_include()}"


def _build_info_flags(digest: str, architectures: str) -> str:
    return f"""-DTK_SOURCE_HASH='"{digest}"' -DTK_ARCHITECTURES='"{architectures}"'"""


def _run_ninja(folder: Path, jobs: int | None) -> None:
    command = [_find_ninja(), "-C", str(folder), *(["-j", str(jobs)] if jobs else [])]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )
    if result.returncode:
        last_lines = "\n".join(result.stdout.strip().splitlines()[-30:])
        raise BuildError(f"{' '.join(command)} failed:\n{last_lines}")


def _jobs() -> int | None:
    return int(os.environ["MAX_JOBS"]) if os.environ.get("MAX_JOBS", "").isdigit() else None


def _compression(nvcc: Path) -> list[str]:
    """nvcc's flag for the smallest machine code, a seventh: from CUDA 13 on, whose code needs driver 580 anyway.

    Before, it would ask for driver 550 where 525 does.
    """
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)", said)
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def build_cuda(folder: Path, toolkit: Toolkit, architectures: str, csrc: Path = CSRC) -> Path:
    """Builds the extension for GPUs in `folder` and returns its path."""
    if not toolkit.library:
        raise CompilerMissing(
            f"libcudart_static.a was not found beside {toolkit.nvcc}: install the CUDA runtime's development files"
        )
    folder.mkdir(parents=True, exist_ok=True)
    gencode, names = gencode_flags(architectures)
    device_flags = ["-std=c++17", "-O3", "--threads=2", "$gencode", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-psabi"]
    if len(gencode) > 1:  # to be shipped; the code of one GPU is not, and would take longer
        device_flags += _compression(toolkit.nvcc)
    device_flags += [f"-I{path}" for path in toolkit.include] + [f"-I{sysconfig.get_paths()['include']}"]
    compiler = find_host_compiler()
    target = folder / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = " ".join(f"-L{path}" for path in toolkit.library) + " -lcudart_static -ldl -lrt -lpthread"
    lines = [
        "ninja_required_version = 1.5",
        f"rule device\n  command = {toolkit.nvcc} {' '.join(device_flags)} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule host\n  command = {compiler} -std=c++17 -O2 -fPIC -fvisibility=hidden {_include_flags()} $defines"
        " -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {compiler} -shared $in -o $out {libraries} -Wl,--exclude-libs,ALL -s",
    ]
    objects = []
    for source in sorted([*csrc.glob("*.cu"), *csrc.glob("ops/*.cu")]):
        objects.append(f"{source.stem}.o")
        only_hopper = [flag for flag in gencode if flag.endswith("=sm_90a") and source.stem.endswith("_sm90")]
        lines.append(f"build {source.stem}.o: device {_escape(source)}\n  gencode = {' '.join(only_hopper or gencode)}")
    for name in ("bindings", "build_info"):
        objects.append(f"{name}.o")
        lines.append(f"build {name}.o: host {_escape(csrc / name)}.cpp")
    lines.append(f"  defines = {_build_info_flags(source_hash(csrc), names)}")
    lines.append(f"build {target.name}: link {' '.join(objects)}\n")
    _write_if_changed(folder / "build.ninja", "\n".join(lines))
    _run_ninja(folder, _jobs())
    return target


CPU_LEVELS = {
    "plain": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "avx512_bf16": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16",
    "amx": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16",
}
"""The instruction sets of the CPU backend, narrowest first, with the flags of GCC and Clang."""

CPU_FOLDERS = {"rows": ("plain", "avx2", "avx512"), "products": tuple(CPU_LEVELS)}
"""For which of them the kernels of a folder of csrc/cpu are compiled; others use the next narrower one."""


def cpu_source_hash(csrc: Path = CSRC) -> str:
    """SHA-256 over the names and contents of the sources of the CPU backend."""
    return _digest(csrc, [*(csrc / "cpu").rglob("*"), csrc / "registry.h"])


def build_cpu(folder: Path, sanitizer: str = "", csrc: Path = CSRC) -> Path:
    """Builds the kernels of the CPU backend in `folder`, with sanitizer="address" instrumented; returns the module."""
    target = folder / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    _write_if_changed(folder / "build.ninja", _cpu_ninja(csrc, find_host_compiler(), target.name, sanitizer))
    _run_ninja(folder, _jobs())
    return target


def _cpu_ninja(csrc: Path, compiler: str, target: str, sanitizer: str) -> str:
    flags = "-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-psabi"
    instrumented = (
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr" if sanitizer else ""
    )
    optimised = f"-O0 -g1 {instrumented}" if sanitizer else "-O3"  # instrumented vectors take -O1 minutes a file
    shared = "-shared -undefined dynamic_lookup" if sys.platform == "darwin" else "-shared"
    levels = _levels_of(compiler)
    lines = [
        "ninja_required_version = 1.5",
        f"rule compile\n  command = {compiler} {flags} {optimised} {_include_flags()} $flags"
        " -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {compiler} {shared} {instrumented} $in -o $out -lpthread",
    ]
    objects = {
        "parallel.o": (csrc / "cpu" / "parallel.cpp", ""),
        "module.o": (csrc / "cpu" / "module.cpp", f"""-DTK_SOURCE_HASH='"{cpu_source_hash(csrc)}"'"""),
        **_cpu_kernels(csrc, levels),
    }
    for name, (source, own_flags) in objects.items():
        lines.append(f"build {name}: compile {_escape(source)}\n  flags = {own_flags}")
    return "\n".join([*lines, f"build {target}: link {' '.join(objects)}\n"])


def _cpu_kernels(csrc: Path, known: list[str]) -> dict[str, tuple[Path, str]]:
    """Each object file of a kernel, with its source and the flags of its instruction set."""
    objects = {}
    for folder, wanted in CPU_FOLDERS.items():
        levels = [level for level in wanted if level in known]
        plain = "-DTK_PLAIN " + " ".join(f"-DTK_HAS_{level.upper()}" for level in levels)
        for source in sorted((csrc / "cpu" / folder).glob("*.cpp")):
            for level in levels:
                own = plain if level == "plain" else f"{CPU_LEVELS[level]} -fno-exceptions -fno-rtti"
                objects[f"{source.stem}.{level}.o"] = (source, f"-DTK_LEVEL={level} {own}")
    return objects


def _levels_of(compiler: str) -> list[str]:
    """The instruction sets that the compiler knows for this processor's family."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["plain"]
    command = [*compiler.split(), "-x", "c++", "-fsyntax-only", "/dev/null"]
    known = (
        level
        for level, flags in CPU_LEVELS.items()
        if subprocess.run([*command, *flags.split()], capture_output=True, check=False).returncode == 0
    )
    return list(known)


def cache_folder() -> Path:
    """TRANSFORMER_KERNELS_CACHE, else a folder of the user's cache."""
    named = os.environ.get("TRANSFORMER_KERNELS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_kernels"


def emulation_flags(sanitizer: str) -> tuple[str, str, str]:
    """Flags for the kernels, for the emulation itself (never instrumented), and for linking."""
    common = "-std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi"
    if not sanitizer:
        return f"{common} -O1", f"{common} -O2", ""
    if sanitizer == "address":
        kinds = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr"
    elif sanitizer == "thread":
        kinds = "-fsanitize=thread"
    else:
        raise ValueError(f"TRANSFORMER_KERNELS_EMULATE_SANITIZER must be address or thread; got {sanitizer!r}")
    define = f"-DEMULATION_{sanitizer.upper()}_SANITIZER"
    return f"{common} -O1 -g {define} {kinds}", f"{common} -O2 -g {define}", kinds


def build_emulated(sanitizer: str = "", csrc: Path = CSRC) -> Path:
    """Builds the extension for the CPU emulation in the cache, once for each state of the sources; returns its path."""
    if not csrc.is_dir():
        raise CompilerMissing(
            f"the emulation is built from the sources in csrc, which are not at {csrc}: use a checkout or the sdist"
        )
    kernel_flags, own_flags, link_flags = emulation_flags(sanitizer)
    compiler = find_host_compiler()
    place = hashlib.sha256(f"{csrc}\0{compiler}\0{sys.version}".encode()).hexdigest()[:12]
    folder = cache_folder() / "emulation" / f"{place}-{sanitizer or 'plain'}"
    digest = source_hash(csrc, emulated=True)
    target = folder / f"_kernels-{digest[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not target.is_file():  # another process may have built it meanwhile
            _write_if_changed(
                folder / "build.ninja", _emulated_ninja(csrc, compiler, kernel_flags, own_flags, link_flags, digest)
            )
            _run_ninja(folder, _jobs() or min(2, os.cpu_count() or 1))
            os.replace(folder / "_kernels.so", target)
            _keep_newest(folder, 3)
    return target


def _emulated_ninja(csrc: Path, compiler: str, kernel_flags: str, own_flags: str, link_flags: str, digest: str) -> str:
    build = "-MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
    lines = [
        "ninja_required_version = 1.5",
        f"rule kernel\n  command = {compiler} -x c++ {kernel_flags} -DTK_EMULATED {_include_flags()} {build}",
        f"rule own\n  command = {compiler} {own_flags} -DTK_EMULATED {_include_flags()} $defines {build}",
        f"rule link\n  command = {compiler} -shared {link_flags} $in -o $out -lpthread",
    ]
    objects = []
    for source in sorted([*csrc.glob("*.cu"), *csrc.glob("ops/*.cu")]):
        objects.append(f"{source.stem}.o")
        lines.append(f"build {source.stem}.o: kernel {_escape(source)}")
    for source in [*sorted(csrc.glob("emulation/*.cpp")), csrc / "bindings.cpp", csrc / "build_info.cpp"]:
        objects.append(f"own_{source.stem}.o")
        lines.append(f"build own_{source.stem}.o: own {_escape(source)}")
    lines.append(f"  defines = {_build_info_flags(digest, 'emulated')}")
    lines.append(f"build _kernels.so: link {' '.join(objects)}\n")
    return "\n".join(lines)


class _locked:
    """Holds an advisory lock on a file; it vanishes with the process."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        import fcntl

        self.file = open(self.path, "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self.file.close()


def _keep_newest(folder: Path, count: int) -> None:
    built = sorted(folder.glob("_kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in built[count:]:
        path.unlink(missing_ok=True)
