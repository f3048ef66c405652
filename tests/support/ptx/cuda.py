"""The CUDA kernels as the PTX that nvcc compiles from csrc, executed in place of the emulation.

g++ compiles the emulation, nvcc the kernels that a GPU runs. Both have the same launchers, so that the arguments of an
emulated launch are those of the compiled kernel, byte for byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import struct
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.compilers import cuda, cuda_launches
from tests.support.ptx.launch import Edit, Execution, execute
from tests.support.ptx.syntax import Kernel, parse
from tests.support.ptx.tensor_maps import BYTES, TensorMap
from transformer_kernels.backends import build
from transformer_kernels.backends import cuda as backend

OBSERVER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint * 6),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
)
ARCHITECTURE, ARCHITECTURES = "sm_80", {"attention_sm90": "sm_90a"}
"""What nvcc compiles for: most sources, and those for one architecture only."""
PANEL_COLUMNS = 64
"""Of 16 bits: a row of a box (csrc/cuda/primitives/hopper.h)."""
EMULATED_MAP = struct.Struct("<Q4q4qI4x")
"""emulation::TensorMap: address, sizes, strides in bytes, and the rows of a box."""


def compiled(source: str) -> str:
    """PTX of csrc/cuda/launchers/<source>.cu, kept for each state of the sources.

    Raises:
        CompilerMissing: there is no nvcc. BuildError: it fails.
    """
    toolkit = build.find_toolkit()
    if toolkit is None:
        raise build.CompilerMissing("no nvcc")
    folder = build.private_folder(build.cache_folder() / "tests" / "ptx" / f"cuda-{build.source_hash(build.CSRC)[:16]}")
    target = folder / f"{source}.ptx"
    if not target.is_file():
        includes = [f"-I{path}" for path in (*toolkit.include, sysconfig.get_paths()["include"])]
        command = [
            str(toolkit.nvcc),
            "-std=c++17",
            "-O3",
            "-ptx",
            f"-arch={ARCHITECTURES.get(source, ARCHITECTURE)}",
            *includes,
        ]
        partial = target.with_suffix(".partial")
        file = build.CSRC / "cuda" / "launchers" / f"{source}.cu"
        result = subprocess.run([*command, file, "-o", partial], capture_output=True, text=True, check=False)
        if result.returncode:
            raise build.BuildError(f"{file.name}:\n{result.stderr[-3000:]}")
        partial.rename(target)
    return target.read_text()


@functools.cache
def entries(source: str) -> dict[tuple[str, str], tuple[str, str]]:
    """By template and arguments: the mangled name of each kernel, and a module with this kernel only."""
    head, *bodies = re.split(r"(?=\.visible \.entry|\.weak \.entry)", compiled(source))
    names = [found[1] for body in bodies if (found := re.search(r"\.entry\s+([\w$]+)", body))]
    plain = [cuda.instance(name) for name in cuda.demangled(names)]
    return {
        (template, cuda_launches.plain(arguments)): (name, head + body)
        for (template, arguments), name, body in zip(plain, names, bodies, strict=True)
    }


@functools.cache
def kernel(source: str, template: str, arguments: str) -> Kernel:
    return parse(entries(source)[template, arguments][1])


@contextmanager
def by_ptx(*sources: str, races: bool = True, edit: Edit | None = None) -> Iterator[list[Execution]]:
    """Within the block the launches of the "cuda" backend execute the PTX of these sources, on CPU tensors.

    Yields a list that has what happened in each launch. It needs the emulation (TRANSFORMER_KERNELS_EMULATE=1), as
    sm_80.

    Raises:
        KeyError: a kernel that is in none of the sources. Others as `run_ptx`.
    """
    executions: list[Execution] = []
    errors: list[BaseException] = []

    def launch(template: str, arguments: str, sizes: list[int], shared: int, values: list[bytes]) -> None:
        source = next(source for source in sources if (template, arguments) in entries(source))
        compiled_kernel = kernel(source, template, arguments)
        if edit is not None:
            compiled_kernel = parse(edit(template, entries(source)[template, arguments][1]))
        if sizes[4:] != [1, 1]:
            raise ValueError(f"ptx: {template} has blocks of {sizes[3:]} threads")
        values = [_parameter(data, size) for data, (_, size) in zip(values, compiled_kernel.parameters, strict=True)]
        result = Execution(template, compiled_kernel.target, "")
        total = max(compiled_kernel.static_shared + shared, 16)
        grid = (sizes[0], sizes[1], sizes[2])
        execute(compiled_kernel, grid, values, sizes[3], total, result, races, tensors=_tensors_at(values))
        executions.append(result)

    @OBSERVER
    def observe(name: bytes, function: bytes, sizes: Any, shared: int, count: int, data: Any, bytes_: Any) -> None:
        if errors:
            return
        try:
            values = [ctypes.string_at(data[i], bytes_[i]) for i in range(count)]
            launch(*cuda_launches.template(function.decode()), list(sizes[0]), shared, values)
        except BaseException as error:  # an exception cannot pass through C
            errors.append(error)

    module = backend.load()
    module.set_observer(ctypes.cast(observe, ctypes.c_void_p).value)
    try:
        yield executions
    except AssertionError:
        if not errors:
            raise
    finally:
        module.set_observer(0)
    if errors:
        raise errors[0]


def _parameter(data: bytes, size: int) -> bytes:
    """The compiled kernel's parameter for one of an emulated launch, where tensor maps are larger."""
    maps = len(data) // EMULATED_MAP.size
    if len(data) != maps * EMULATED_MAP.size or size != maps * BYTES:
        return data
    found = b""
    for address, *axes, rows in EMULATED_MAP.iter_unpack(data):
        box = (PANEL_COLUMNS, rows, 1, 1)
        found += TensorMap(address, 2, tuple(axes[:4]), tuple(axes[5:]), box, 2 * PANEL_COLUMNS).pack()
    return found


def _tensors_at(values: list[bytes]) -> Mapping[str, Tensor]:
    """The storages of this process that contain an address in the parameters."""
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu" and each.layout is torch.strided:
            with contextlib.suppress(RuntimeError):  # a tensor subclass of another test has no storage
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage()
    words = {word for data in values for word in struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])}
    return {
        f"storage {start:#x} of {storage.nbytes()} bytes": torch.tensor([], dtype=torch.uint8).set_(storage)
        for start, storage in storages.items()
        if any(start <= word < start + storage.nbytes() for word in words)
    }
