"""Builds csrc: with nvcc for GPUs, with a host compiler for their emulation and for the CPU backend.

setup.py loads this file before torch is installed: no import of this package, and at the top only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
RELEASE_ARCHITECTURES = "80;90a;100;120+PTX"
"""Machine code also runs on later GPUs of its generation: sm_80 code on sm_86, sm_87 and sm_89, sm_100 code on sm_103,
sm_120 code on sm_121. No kernel uses an instruction that these GPUs add; PTX covers later generations."""
BUILD_NOTE = "_kernels_build.txt"
"""A file next to the extension, or instead of it: what was built for GPUs and why, for `info` and errors."""
CPU_BUILD_NOTE = "_cpu_build.txt"
"""The same for the CPU backend."""

NO_NVCC = (
    "no nvcc in CUDA_HOME, PATH or the pip package nvidia-cuda-nvcc. Install a CUDA toolkit, or pip install "
    "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime, all of one release, and run "
    "pip install . again in the checkout"
)
NOT_WANTED = (
    "TRANSFORMER_KERNELS_CUDA_ARCHS was none when it was built; for GPUs run pip install . in a checkout or the sdist, "
    "where nvcc is"
)
NO_GPU = (
    "nvcc is there and no GPU to build for. For GPUs that are elsewhere name them, as in "
    "TRANSFORMER_KERNELS_CUDA_ARCHS=90a pip install . in the checkout, or release for all that a release has"
)
STABLE_ABI = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
EXTENSION_SUFFIX = ".abi3.so" if STABLE_ABI else sysconfig.get_config_var("EXT_SUFFIX")
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
    """The GPU architectures that an installation builds for, and why; empty: none."""
    named = os.environ.get("TRANSFORMER_KERNELS_CUDA_ARCHS", "").strip()
    if named == "none":
        return "", NOT_WANTED
    if platform.system() == "Windows":
        return "", "the CUDA kernels are not built on Windows: use WSL 2"
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
    raise CompilerMissing("no C++ compiler was found: install g++, or name one in CXX, and run pip install . again")


def _python_flags() -> list[str]:
    """Python's headers, with its stable ABI where it has one: one build then runs on every Python from 3.10 on."""
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").is_file():
        raise CompilerMissing(
            f"Python.h was not found in {folder}: install Python's development files (python3-dev), and run "
            "pip install . again"
        )
    return [f"-I{folder}", *(["-DPy_LIMITED_API=0x030A0000"] if STABLE_ABI else [])]


def _defines(**values: object) -> list[str]:
    return [f'-D{name}="{value}"' if isinstance(value, str) else f"-D{name}={value}" for name, value in values.items()]


@dataclass
class Step:
    """A file and the command that builds it from `inputs` and the dependencies listed in `<target>.d`."""

    target: Path
    command: list[str]
    inputs: list[Path]

    def __post_init__(self) -> None:
        self.record = self.target.with_name(f"{self.target.name}.command")
        """The command, once it succeeded; as old as its start."""

    @classmethod
    def compile(cls, target: Path, source: Path, command: list[str]) -> Step:
        listed = ["-MD", "-MF", f"{target}.d"]
        return cls(target, [*command, *listed, "-c", str(source), "-o", str(target)], [source])

    def is_current(self) -> bool:
        try:
            if self.record.read_text() != shlex.join(self.command) or not self.target.is_file():
                return False
            started = self.record.stat().st_mtime_ns
            return all(path.stat().st_mtime_ns <= started for path in [*self.inputs, *self._listed()])
        except OSError:
            return False

    def _listed(self) -> list[Path]:
        listed = Path(f"{self.target}.d")
        if not listed.is_file():
            return []
        names = listed.read_text().replace("\\\n", " ").split(": ", 1)[1]
        return [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", names) if name]

    def run(self) -> None:
        if self.is_current():
            return
        self.record.write_text("")
        started = self.record.stat().st_mtime_ns
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
        )
        if result.returncode:
            lines = result.stdout.decode(errors="replace").strip().splitlines()
            raise BuildError("\n".join([f"{shlex.join(self.command)} failed:", *lines[-30:]]))
        self.record.write_text(shlex.join(self.command))
        os.utime(self.record, ns=(started, started))


def _make(objects: list[Step], linking: Step, jobs: int | None = None) -> Path:
    """Runs the steps that are not current, and then links."""
    _compile(objects, jobs)
    linking.run()
    return linking.target


def _compile(objects: list[Step], jobs: int | None = None, failed: list[str] | None = None) -> list[Step]:
    """Runs the steps that are not current, the largest sources first; returns those that succeeded.

    The first error is raised, and the remaining steps are dropped; or with a list `failed`, all errors are added.
    """
    longest_first = sorted(objects, key=lambda step: -step.inputs[0].stat().st_size)
    with ThreadPoolExecutor(jobs or _jobs()) as pool:
        running = {pool.submit(step.run): step for step in longest_first}
        for process, step in running.items():
            try:
                process.result()
            except BuildError as error:
                if failed is None:
                    pool.shutdown(cancel_futures=True)
                    raise
                failed.append(str(error))
                objects = [other for other in objects if other is not step]
    return objects


def _linkable(objects: list[Step]) -> list[Step]:
    """The objects whose symbols of this package are defined by one another: others would not load."""
    tables = {step.target: _symbols(step.target) for step in objects}
    while True:
        defined = set().union(*(tables[step.target][0] for step in objects))
        kept = [step for step in objects if tables[step.target][1] <= defined]
        if len(kept) == len(objects):
            return kept
        objects = kept


def _symbols(target: Path) -> tuple[set[str], set[str]]:
    """The symbols of this package that an object defines, and those that it needs."""
    listed = subprocess.run(["nm", str(target)], capture_output=True, text=True, check=True).stdout
    found: tuple[set[str], set[str]] = (set(), set())
    for *_, kind, name in (line.split() for line in listed.splitlines() if len(line.split()) > 1):
        if "transformer_kernels" in name:
            found[kind == "U"].add(name)
    return found


def _jobs() -> int:
    if os.environ.get("MAX_JOBS", "").isdigit():
        return max(1, int(os.environ["MAX_JOBS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compression(nvcc: Path) -> list[str]:
    """nvcc's flag for the smallest machine code, a seventh: from CUDA 13 on, whose code needs driver 580 anyway.

    Before, the flag would require driver 550 instead of 525.
    """
    output = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)", output)
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def build_cuda(
    folder: Path, toolkit: Toolkit, architectures: str, csrc: Path = CSRC, failed: list[str] | None = None
) -> Path:
    """Builds the extension for GPUs in `folder` and returns its path.

    With a list `failed`, sources that do not compile are left out with those that need them, and their errors are added
    to the list: for a machine on which the other kernels are to be tested.
    """
    if not toolkit.library:
        raise CompilerMissing(
            f"libcudart_static.a was not found beside {toolkit.nvcc}: install the CUDA runtime's development files"
        )
    folder.mkdir(parents=True, exist_ok=True)
    gencode, names = gencode_flags(architectures)
    device = [str(toolkit.nvcc), "-std=c++17", "-O3", "--threads=2", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-psabi"]
    if len(gencode) > 1:  # to be shipped; the code of one GPU is not, and would take longer
        device += _compression(toolkit.nvcc)
    device += [f"-I{path}" for path in toolkit.include] + _python_flags()
    compiler = shlex.split(find_host_compiler())
    host = [*compiler, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *_python_flags()]
    info = _defines(TK_SOURCE_HASH=source_hash(), TK_ARCHITECTURES=names)
    objects = []
    for source in sorted((csrc / "cuda").rglob("*.cu")):
        only_hopper = [flag for flag in gencode if flag.endswith("=sm_90a") and source.stem.endswith("_sm90")]
        objects.append(Step.compile(folder / f"{source.stem}.o", source, [*device, *(only_hopper or gencode)]))
    objects.append(Step.compile(folder / "module.o", csrc / "cuda" / "module.cpp", host))
    objects.append(Step.compile(folder / "build_info.o", csrc / "cuda" / "build_info.cpp", [*host, *info]))
    libraries = [*(f"-L{path}" for path in toolkit.library), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    objects = _compile(objects, failed=failed)
    if failed:
        objects = _linkable(objects)
    linking = _link(compiler, objects, folder / f"_kernels{EXTENSION_SUFFIX}", libraries, release=True)
    linking.run()
    return linking.target


def _link(compiler: list[str], objects: list[Step], target: Path, libraries: list[str], release: bool = False) -> Step:
    shared = ["-shared", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    stripped = ["-Wl,--exclude-libs,ALL", "-s"] if release else []
    inputs = [step.target for step in objects]
    return Step(target, [*compiler, *shared, *map(str, inputs), "-o", str(target), *libraries, *stripped], inputs)


CPU_LEVELS = {
    "plain": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "avx512_bf16": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16",
    "amx": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16",
}
"""The instruction sets of the CPU backend, narrowest first, with the flags of GCC and Clang."""

CPU_FOLDERS = {"rows": ("plain", "avx2", "avx512"), "products": tuple(CPU_LEVELS), "measures": tuple(CPU_LEVELS)}
"""For which of them the kernels of a folder of csrc/cpu are compiled; others use the next narrower one.

Those of measures are for tests and benchmarks: only an in-place build (present) has them.
"""


def cpu_source_hash(csrc: Path = CSRC) -> str:
    """SHA-256 over the names and contents of the sources of the CPU backend."""
    return _digest(
        csrc, [*(csrc / "cpu").rglob("*"), *(csrc / "calls").rglob("*"), csrc / "module.h", csrc / "registry.h"]
    )


OTHER_PROCESSOR = (
    "they are for x86-64 processors on Linux and macOS, and this is {}; the torch backend runs every operation. "
    "TRANSFORMER_KERNELS_CPU_LEVELS=plain pip install . compiles {}"
)
NEON_KERNELS = "those for NEON, which pass their tests under qemu-user; their speed was never measured"
PORTABLE_KERNELS = "the portable ones, which no test ran there"


def cpu_levels_named() -> str:
    return os.environ.get("TRANSFORMER_KERNELS_CPU_LEVELS", "").strip() or "native"


def no_cpu_kernels() -> str:
    """Why an installation compiles nothing for the CPU backend, before a compiler runs; empty where it does."""
    named = cpu_levels_named()
    if named == "none":
        return "TRANSFORMER_KERNELS_CPU_LEVELS is none"
    return other_processor() if platform.system() == "Windows" or named in ("native", "present", "all") else ""


def other_processor() -> str:
    """Why this kind of machine has no CPU kernels by default; empty where it has."""
    if _is_x86() and platform.system() != "Windows":
        return ""
    kernels = NEON_KERNELS if platform.machine().lower() in ("aarch64", "arm64") else PORTABLE_KERNELS
    why = OTHER_PROCESSOR.format(f"{platform.machine()} on {platform.system()}", kernels)
    return why.split(". ")[0] if platform.system() == "Windows" else why  # where none are compiled


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_levels(compiler: list[str]) -> list[str]:
    """The instruction sets to compile for, of TRANSFORMER_KERNELS_CPU_LEVELS: the portable one, the best of this
    processor and the one of reproducible results (native), every one that it has (present), all, or those in a list.

    Raises:
        ValueError: a name is unknown. BuildError: the compiler does not work, or lacks a level in the list.
    """
    named = cpu_levels_named()
    known = _levels_of(compiler)
    if named == "all":
        return known
    if named in ("native", "present"):
        best = _best_level(compiler)
        present = [level for level in known if list(CPU_LEVELS).index(level) <= best]
        reproducible = "avx512" if "avx512_bf16" in present else present[-1]  # backends/cpu.py: reproduce
        native = {"plain", reproducible, present[-1]}
        return present if named == "present" else [level for level in present if level in native]
    wanted = {"plain", *named.replace(";", ",").replace(" ", ",").split(",")} - {""}
    if unknown := sorted(wanted - CPU_LEVELS.keys()):
        raise ValueError(
            f"TRANSFORMER_KERNELS_CPU_LEVELS must be native, present, all, none, or a list of {', '.join(CPU_LEVELS)}; "
            f"got {', '.join(unknown)}"
        )
    if lacking := sorted(wanted - {*known}):
        raise BuildError(
            f"{shlex.join(compiler)} does not compile for {', '.join(lacking)}, which TRANSFORMER_KERNELS_CPU_LEVELS "
            f"names: use a newer compiler, or leave it out"
        )
    return [level for level in known if level in wanted]


def _levels_of(compiler: list[str]) -> list[str]:
    """The instruction sets that the compiler supports."""
    known = []
    for level, flags in CPU_LEVELS.items():
        command = [*compiler, *flags.split(), "-x", "c++", "-fsyntax-only", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            known.append(level)
        elif level == "plain":
            lines = "\n".join((result.stdout + result.stderr).strip().splitlines()[-5:])
            raise BuildError(
                f"the C++ compiler {shlex.join(compiler)} does not work: install g++, or name another one in CXX, and "
                f"run pip install . again\n{lines}"
            )
        if not _is_x86():
            break
    return known


def _best_level(compiler: list[str]) -> int:
    """The index in CPU_LEVELS of this processor's best instruction set, by the function that the module uses."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "level"
        source = f'#include "{CSRC / "cpu" / "processor.h"}"\nint main() {{ return transformer_kernels::widest(); }}\n'
        command = [*compiler, "-std=c++17", "-x", "c++", "-", "-o", str(program)]
        compiled = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if compiled.returncode:
            lines = "\n".join(compiled.stderr.strip().splitlines()[-5:])
            raise BuildError(
                f"the C++ compiler {shlex.join(compiler)} does not work: install g++ with its standard library, or "
                f"name another one in CXX, and run pip install . again\n{lines}"
            )
        try:
            return subprocess.run([program], check=False).returncode
        except OSError:  # no program may run in the folder of temporary files: every level, as the choice is made later
            return len(CPU_LEVELS)


def build_cpu(folder: Path, sanitizer: str = "", csrc: Path = CSRC) -> Path:
    """Builds the kernels of the CPU backend in `folder`, with sanitizer="address" instrumented; returns the module."""
    if why := no_cpu_kernels():
        raise CompilerMissing(why)
    compiler = shlex.split(find_host_compiler())
    folder.mkdir(parents=True, exist_ok=True)
    levels = cpu_levels(compiler)
    instrumented = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr"]
    command = [*compiler, *CPU_FLAGS, *_python_flags(), *(instrumented if sanitizer else [])]
    unoptimised = ["-O0", "-g1"] if sanitizer else []  # instrumented vectors take -O1 minutes a file
    built = sum(1 << list(CPU_LEVELS).index(level) for level in levels)
    module = _defines(TK_SOURCE_HASH=cpu_source_hash(csrc), TK_BUILT=built)
    compilations = [
        ("common", csrc / "cpu" / "parallel.cpp", ["-O2"]),
        ("common", csrc / "cpu" / "module.cpp", ["-O2", *module]),
        *_cpu_kernels(csrc, levels),
    ]
    objects = [
        Step.compile(folder / f"{source.stem}.{level}.o", source, [*command, *flags, *unoptimised])
        for level, source, flags in compilations
    ]
    libraries = [*(instrumented if sanitizer else []), "-lpthread"]
    return _make(objects, _link(compiler, objects, folder / f"_cpu{EXTENSION_SUFFIX}", libraries))


CPU_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w"]
OPTIMISATION = "-O2"
"""-O3 takes a fifth more time to compile, and no kernel less to run: of 34 calls the median ratio is 1.00."""
PORTABLE_OPTIMISATION = "-O1"
"""Beside a better level: a third less time to compile, 6 % more to run."""


def _cpu_kernels(csrc: Path, wanted: list[str]) -> list[tuple[str, Path, list[str]]]:
    """The compilations of each kernel: a level, the source, and the flags."""
    order = list(CPU_LEVELS)
    compilations = []
    for folder, own in CPU_FOLDERS.items():
        if folder == "measures" and cpu_levels_named() != "present":
            continue
        levels = {[level for level in own if order.index(level) <= order.index(name)][-1]: None for name in wanted}
        present = [f"-DTK_HAS_{level.upper()}" for level in levels]
        for level in levels:
            flags = [OPTIMISATION, *CPU_LEVELS[level].split(), "-fno-exceptions", "-fno-rtti"]
            if level == "plain":
                flags = [PORTABLE_OPTIMISATION if len(wanted) > 1 else OPTIMISATION, "-DTK_PLAIN", *present]
            for source in sorted((csrc / "cpu" / folder).glob("*.cpp")):
                compilations.append((level, source, [f"-DTK_LEVEL={level}", *flags]))
    return compilations


def cache_folder() -> Path:
    """TRANSFORMER_KERNELS_CACHE, else a folder of the user's cache."""
    named = os.environ.get("TRANSFORMER_KERNELS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_kernels"


def private_folder(folder: Path) -> Path:
    """Creates a folder for compiled files that only this user can write to.

    Raises:
        BuildError: it cannot be created or written to, or another user owns it and could have put files there.
    """
    remedy = "name a folder of your own in TRANSFORMER_KERNELS_CACHE"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            raise BuildError(f"another user owns {folder}, whose compiled files are not loaded: {remedy}")
        folder.chmod(0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise BuildError(f"{folder} cannot be written to ({error}): {remedy}") from error
    return folder


def emulation_flags(sanitizer: str) -> tuple[str, str, str]:
    """Flags for the kernels, for the emulation itself (never instrumented), and for linking."""
    common = "-std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi"
    if not sanitizer:
        # Against -O1 the build takes a quarter less time, and the tests of attention run 4 % longer.
        return f"{common} -Og", f"{common} -O2", ""
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
    compiler = find_host_compiler()
    digest = source_hash(csrc, emulated=True)
    target_name = f"_kernels-{digest[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    key = hashlib.sha256(f"{csrc}\0{compiler}\0{sys.version}".encode()).hexdigest()[:12]
    folder = private_folder(cache_folder() / "emulation" / f"{key}-{sanitizer or 'plain'}")
    target = folder / target_name
    if target.is_file() and hasattr(os, "getuid") and target.stat().st_uid != os.getuid():
        raise BuildError(f"another user owns {target}, which is not loaded: remove it")
    if target.is_file():
        return target
    from filelock import FileLock  # a dependency of torch, without which setup.py loads this file

    with FileLock(folder / "lock"):
        if not target.is_file():  # another process may have built it meanwhile
            os.replace(_build_emulated(folder, shlex.split(compiler), sanitizer, csrc, digest), target)
            _keep_newest(folder)
    return target


def _build_emulated(folder: Path, compiler: list[str], sanitizer: str, csrc: Path, digest: str) -> Path:
    kernel_flags, own_flags, link_flags = (flags.split() for flags in emulation_flags(sanitizer))
    common = ["-DTK_EMULATED", *_python_flags()]
    kernel = [*compiler, "-x", "c++", *kernel_flags, *common]
    own = [*compiler, *own_flags, *common]
    info = _defines(TK_SOURCE_HASH=digest, TK_ARCHITECTURES="emulated")
    objects = [
        Step.compile(folder / f"{source.stem}.o", source, kernel) for source in sorted((csrc / "cuda").rglob("*.cu"))
    ]
    for source in sorted([*csrc.glob("emulation/*.cpp"), *csrc.glob("cuda/*.cpp")]):
        flags = [*own, *info] if source.stem == "build_info" else own
        objects.append(Step.compile(folder / f"own_{source.stem}.o", source, flags))
    linking = _link(compiler, objects, folder / "_kernels.so", [*link_flags, "-lpthread"])
    linking.record.unlink(missing_ok=True)  # its file is moved away
    return _make(objects, linking, min(2, _jobs()))


def _keep_newest(folder: Path) -> None:
    """Remove all but the three newest modules."""
    built = sorted(folder.glob("_kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in built[3:]:
        path.unlink(missing_ok=True)
