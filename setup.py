"""Installs the package: with the CUDA extension where nvcc and a GPU are, with the CPU kernels where a C++ compiler is.

TRANSFORMER_KERNELS_CPU_LEVELS   the instruction sets to compile for: native, the best one of this processor, the
                                 portable one and the one of reproducible results (as pip install . does); present,
                                 every one that it has (as an in-place build does); all; none; or a list of plain,
                                 avx2, avx512, avx512_bf16 and amx. On aarch64 plain uses NEON, and is compiled where
                                 it is named
TRANSFORMER_KERNELS_CUDA_ARCHS   which GPUs to build for, as 80;90a;120+PTX, or release, or none; default: this
                                 machine
TRANSFORMER_KERNELS_REQUIRE_CUDA 1: fail instead of installing without the extension
MAX_JOBS                         how many compilers run at once

Without a network: pip install --no-index --no-build-isolation --no-deps . with setuptools 77 or newer installed.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_KERNELS = "transformer_kernels._kernels"
CPU_KERNELS = "transformer_kernels._cpu"
HASH_FILE = "_kernels_source_hash.txt"


def load_build_module():
    """transformer_kernels/backends/build.py without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location(
        "_transformer_kernels_build", ROOT / "transformer_kernels" / "backends" / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_build_module()


def required() -> bool:
    return os.environ.get("TRANSFORMER_KERNELS_REQUIRE_CUDA", "") == "1"


class BuildKernels(build_ext):
    """Hands the compiling to backends/build.py and survives its failure."""

    def run(self):
        if self.inplace and not self.editable_mode:  # a developer's build, for tests of every level
            os.environ.setdefault("TRANSFORMER_KERNELS_CPU_LEVELS", "present")
        super().run()

    def build_extension(self, extension):
        if extension.name == CPU_KERNELS:
            self.build_cpu(extension)
        else:
            self.build_cuda(extension)

    def folder(self, kind):
        """Of object files: an editable install's own folder is temporary, which would compile all of them each time."""
        return (ROOT / "build" if self.editable_mode else Path(self.build_temp).resolve()) / kind

    def build_cpu(self, extension):
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.with_name(build.CPU_BUILD_NOTE)
        try:
            built = build.build_cpu(self.folder("cpu"))
        except (build.BuildError, ValueError) as error:
            extension.optional = True
            print(f"transformer_kernels: installing without the CPU kernels: {error}", file=sys.stderr)
            note.write_text(f"{error}\n")
            return
        note.unlink(missing_ok=True)
        for older in target.parent.glob("_cpu.*.so"):  # of one Python, which it would prefer to the stable ABI
            older.unlink()
        shutil.copyfile(built, target)

    def build_cuda(self, extension):
        architectures, why = build.wanted_architectures()
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.with_name(build.BUILD_NOTE)
        try:
            if not architectures:
                raise build.CompilerMissing(why)
            built = build.build_cuda(self.folder("kernels"), build.find_toolkit(), architectures)
        except (build.BuildError, ValueError) as error:
            if required():
                raise SystemExit(
                    f"transformer_kernels: the CUDA extension was required and not built: {error}"
                ) from error
            extension.optional = True
            self.announce_skip(error)
            note.write_text(f"{error}\n")
            return
        for older in target.parent.glob("_kernels.*.so"):
            older.unlink()
        shutil.copyfile(built, target)
        target.with_name(HASH_FILE).write_text(build.source_hash() + "\n")
        note.write_text(f"built for {build.gencode_flags(architectures)[1]}: {why}\n")

    def announce_skip(self, error):
        print(f"transformer_kernels: installing without the CUDA extension: {error}", file=sys.stderr)

    def get_outputs(self):
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self):
        """For --inplace and editable installs: only the built modules, and the note on the others."""
        folder, package = Path(self.build_lib) / "transformer_kernels", ROOT / "transformer_kernels"
        for name in (HASH_FILE, build.BUILD_NOTE, build.CPU_BUILD_NOTE):
            (package / name).unlink(missing_ok=True)
            if (folder / name).is_file():
                shutil.copyfile(folder / name, package / name)
        for extension in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(extension.name))
            if built.is_file():
                for older in package.glob(f"{built.name.split('.')[0]}.*.so"):
                    older.unlink()
                shutil.copyfile(built, package / built.name)


class WithExtension(Distribution):
    """A wheel belongs to one platform only when it may hold compiled code."""

    def has_ext_modules(self):
        return build.wanted_architectures()[0] != "" or build.no_cpu_kernels() == ""


setup(
    distclass=WithExtension,
    ext_modules=[Extension(name, sources=[], py_limited_api=build.STABLE_ABI) for name in (CUDA_KERNELS, CPU_KERNELS)],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if build.STABLE_ABI else {},
    cmdclass={"build_ext": BuildKernels},
)
