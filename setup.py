"""Installs the package: with the CUDA extension where nvcc and a GPU are, with the CPU kernels where a C++ compiler is.

TRANSFORMER_KERNELS_CUDA_ARCHS   which GPUs to build for, as 80;90a;120+PTX, or release, or none; else those of this
                                 machine
TRANSFORMER_KERNELS_REQUIRE_CUDA 1: fail instead of installing without the extension
MAX_JOBS                         how many compilers run at once
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
    """Hands the compiling to _build.py and survives its failure."""

    def build_extension(self, extension):
        if extension.name == CPU_KERNELS:
            self.build_cpu(extension)
        else:
            self.build_cuda(extension)

    def build_cpu(self, extension):
        target = Path(self.get_ext_fullpath(extension.name))
        try:
            built = build.build_cpu(Path(self.build_temp).resolve() / "cpu")
        except build.BuildError as error:
            extension.optional = True
            print(f"transformer_kernels: installing without the CPU kernels: {error}", file=sys.stderr)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, target)

    def build_cuda(self, extension):
        architectures, why = build.wanted_architectures()
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.with_name(build.BUILD_NOTE)
        try:
            if not architectures:
                raise build.CompilerMissing(why)
            built = build.build_cuda(Path(self.build_temp).resolve() / "kernels", build.find_toolkit(), architectures)
        except (build.BuildError, ValueError) as error:
            if required():
                raise SystemExit(
                    f"transformer_kernels: the CUDA extension was required and not built: {error}"
                ) from error
            extension.optional = True
            self.announce_skip(error)
            note.write_text(f"{error}\n")
            return
        shutil.copyfile(built, target)
        target.with_name(HASH_FILE).write_text(build.source_hash() + "\n")
        note.write_text(f"built for {build.gencode_flags(architectures)[1]}: {why}\n")

    def announce_skip(self, error):
        print(f"transformer_kernels: installing without the CUDA extension: {error}", file=sys.stderr)

    def get_outputs(self):
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self):
        """For --inplace and editable installs: only what was built, and the note on what was not."""
        folder = Path(self.build_lib) / "transformer_kernels"
        for name in (HASH_FILE, build.BUILD_NOTE):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, ROOT / "transformer_kernels" / name)
        for extension in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(extension.name))
            if built.is_file():
                package = ROOT / "transformer_kernels"
                shutil.copyfile(built, package / built.name)


class WithExtension(Distribution):
    """A wheel belongs to one platform only when it holds compiled code."""

    def has_ext_modules(self):
        return build.find_toolkit() is not None or build.has_host_compiler()


setup(
    distclass=WithExtension,
    ext_modules=[Extension(name, sources=[]) for name in (CUDA_KERNELS, CPU_KERNELS)],
    cmdclass={"build_ext": BuildKernels},
)
