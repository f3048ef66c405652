"""Compiles Triton kernels to PTX, without a GPU, and executes the PTX on CPU tensors."""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.compilers import launches
from tests.support.ptx.barriers import meets_in_parts
from tests.support.ptx.machine import Finding, Machine, narrowest_global
from tests.support.ptx.memory import Global, address_of
from tests.support.ptx.syntax import Kernel, parse
from tests.support.ptx.tensor_maps import SWIZZLES, TensorMap
from tests.support.ptx.types import Refused
from transformer_kernels.backends import build
from transformer_kernels.backends import triton as backend

LANES = 4096
"""Threads that run in step: as many CTAs as fit."""
INTEGERS = {"i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
Grid = tuple[int, ...]


@dataclass
class Execution:
    """The record of one kernel execution."""

    kernel: str
    target: str
    ptx: str
    ctas: int = 0
    instructions: int = 0
    """Executed, each by all threads that run in step."""
    findings: Counter[Finding] = field(default_factory=Counter)

    def check(self, *expected: str) -> None:
        """Fail unless every finding has one of these messages (or none is expected and there is none)."""
        others = {finding: count for finding, count in self.findings.items() if finding[1] not in expected}
        lines = [
            f"{kind}: {message}, {count} times; at {text[:120]}" for (kind, message, text), count in others.items()
        ]
        assert not others, "\n".join([f"{self.kernel} for {self.target}:", *lines])


Edit = Callable[[str, str], str]
"""From the name of a kernel and its PTX the PTX that runs instead."""


def execute(
    kernel: Kernel,
    grid: Grid,
    arguments: Sequence[Tensor | bytes],
    threads: int,
    shared: int,
    result: Execution,
    races: bool = True,
    names: Sequence[str] = (),
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Run every CTA of a grid; a tensor is passed as its address; `tensors` are those whose addresses are in bytes.

    Raises:
        Fault: an error that ends a kernel on a device. Refused: an instruction that is not implemented.
    """
    pieces, values = [], []
    for i, value in enumerate(arguments):
        if isinstance(value, Tensor):
            pieces += [(*_span(value), names[i] if names else f"argument {i}")] * bool(value.numel())
            value = value.data_ptr().to_bytes(8, "little")
        values.append(value)
    pieces += [(*_span(x), name) for name, x in (tensors or {}).items()]
    pieces += [(x.ctypes.data, x.ctypes.data + x.size, name) for name, x in kernel.constants.items()]
    values += [
        bytes(size) for _, size in kernel.parameters[len(values) :]
    ]  # scratch memory, which these kernels do not use
    parameters = {}
    for (name, size), data in zip(kernel.parameters, values, strict=True):
        if len(data) > size:
            raise ValueError(f"ptx: {name} of {kernel.name} has {size} bytes; got {len(data)}")
        parameters[name] = data.ljust(size, b"\0")
        if size > 8:  # a structure, whose address a kernel may take
            pieces.append((address_of(parameters[name]), address_of(parameters[name]) + size, name))
    memory = Global(pieces, narrowest_global(kernel), races)
    x, y, z = (*grid, 1, 1)[:3]
    # CTAs run one at a time if one may wait for a lock, and for wgmma, whose written registers are then exact.
    # Likewise for barriers of a part of a CTA: vector clocks are stored for one CTA.
    alone = any(
        each.opcode == "wgmma" or "cas" in each.modifiers or meets_in_parts(each, threads) for each in kernel.code
    )
    count, together = x * y * z, 1 if alone else max(1, LANES // threads)
    for first in range(0, count, together):
        ctas = list(range(first, min(first + together, count)))
        machine = Machine(kernel, memory, parameters, (x, y, z), ctas, threads, shared, races)
        machine.run()
        result.findings.update(machine.findings)
        result.ctas += len(ctas)
        result.instructions += machine.executed


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to its last."""
    start = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def pack(type: str, value: Any) -> bytes:
    """A number as an argument of one of Triton's types."""
    if type in ("fp32", "fp64", "f32", "f64"):
        return struct.pack("<d" if type.endswith("64") else "<f", float(value))
    size: int = INTEGERS[type]
    return (int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little")


@functools.lru_cache(maxsize=256)
def _parsed(ptx: str) -> Kernel:
    return parse(ptx)


@contextmanager
def compiler() -> Iterator[None]:
    """Triton compiles to PTX and no further, into a separate cache."""
    triton = backend.load()
    if backend.interpreting():
        raise RuntimeError("ptx: TRITON_INTERPRET is set, and the interpreter has nothing to compile")
    from triton.backends.nvidia.compiler import CUDABackend

    folder = build.cache_folder() / "tests" / "ptx"
    with (
        mock.patch.object(CUDABackend, "make_cubin", lambda self, source, metadata, options, capability: b""),
        mock.patch.object(triton.knobs.cache, "dir", str(folder)),
    ):
        yield


def compile_launch(launch: launches.Launch) -> Any:
    """The compiled kernel: its PTX in `asm`, and the bytes of shared memory of a CTA in `metadata`."""
    with compiler():
        return backend.load().compile(launch.source, target=launch.target, options=dict(launch.options))


def capability_of(target: str) -> backend.Capability:
    """(8, 0) of "sm_80"."""
    digits = target.removeprefix("sm_").removesuffix("a")
    if not (target.startswith("sm_") and digits.isdigit()):
        raise ValueError(f"ptx: target must be sm_80, sm_90, ...; got {target!r}")
    return int(digits[:-1]), int(digits[-1])


def run_ptx(
    kernel: Any,
    grid: Grid,
    args: Mapping[str, Any],
    target: str = "sm_90",
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    races: bool = True,
    edit: Edit | None = None,
    expected: Sequence[str] = (),
) -> Execution:
    """Compile a Triton kernel for a GPU and execute its PTX on CPU tensors, which it reads and writes as on a device.

    The process must not have TRITON_INTERPRET set. Triton specialises the arguments as it does at a launch: integers
    that are 1 or multiples of 16, pointers that are aligned.

    Args:
        kernel: what `@triton.jit` made.
        grid: programs along each axis, up to three.
        args: arguments by name: contiguous or strided CPU tensors, TensorDescriptors of them, numbers, and the
            constants that are `tl.constexpr`.
        target: "sm_80", "sm_90", and others whose PTX has no instructions beyond theirs.
        num_warps, num_stages: as at a launch.
        races: detect races too, which doubles the time.
        edit: a function of the kernel's name and its PTX, whose result is executed; to plant a bug.
        expected: messages that do not fail the run.

    Returns:
        The counts of the run, its findings and the PTX.

    Raises:
        AssertionError: races, uninitialised registers, copies or products without a wait, divergent barriers.
        Fault: an address outside of every tensor, a misaligned access, lanes that are missing at a shuffle.
        Refused: an instruction that the interpreter does not implement.

    Example:
        >>> run_ptx(add_kernel, (4,), {"x": x, "y": y, "out": out, "n": 1000, "BLOCK": 256}, target="sm_80")
    """
    noted: list[launches.Launch] = []
    capability = capability_of(target)

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        noted.append(launches._launch("", fn.jit_function, capability, key, compile))
        return True

    triton = backend.load()
    hook = mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note)
    with compiler(), launches._standing_in(triton, capability), hook:
        kernel[grid](**{"num_warps": num_warps, "num_stages": num_stages, **args})
    result = run_launch(noted[0], grid, [args.get(name) for name in kernel.arg_names], races, edit)
    result.check(*expected)
    return result


def run_launch(
    launch: launches.Launch, grid: Grid, arguments: Sequence[Any], races: bool = True, edit: Edit | None = None
) -> Execution:
    """Compile a recorded launch and execute it with arguments, one for each parameter of the kernel."""
    compiled = compile_launch(launch)
    ptx = compiled.asm["ptx"]
    if edit is not None:
        ptx = edit(launch.kernel_name, ptx)
    names: list[str] = []
    values: list[Tensor | bytes] = []
    described: dict[str, Tensor] = {}
    maps = iter(compiled.metadata.tensordesc_meta or ())
    for name, value in zip(launch.kernel.arg_names, arguments, strict=True):
        type = launch.signature.get(name, "constexpr")
        if isinstance(type, str) and type.startswith("tensordesc"):
            given = _descriptor(value, next(maps, None))
            described[name] = value.base
            names += [name] * len(given)
            values += given
            continue
        record = isinstance(type, tuple)
        members = zip(value._fields, type, value, strict=True) if record else [("", type, value)]
        for member, kind, x in members:
            if kind != "constexpr":
                names.append(f"{name}.{member}" if record else name)
                values.append(x if kind.startswith("*") else pack(kind, x))
    kernel = _parsed(ptx)
    result = Execution(launch.kernel_name, kernel.target, ptx)
    threads, shared = 32 * launch.options["num_warps"], max(compiled.metadata.shared, 16)
    execute(kernel, grid, values, threads, shared, result, races, names, described)
    return result


def _descriptor(value: Any, described: Mapping[str, Any] | None) -> list[Tensor | bytes]:
    """The arguments that Triton's launcher passes for a TensorDescriptor: a tensor map, or without one the address."""
    shape, strides = list(value.shape), list(value.strides)
    if value.padding != "zero":
        raise Refused("ptx: a TensorDescriptor that pads with NaN")
    axes = [pack("i32", size) for size in shape] + [pack("i64", stride) for stride in strides]
    if described is None:
        whole = [pack("i64", each) for each in (*shape, *strides)]
        return [value.base, *whole, pack("i1", 0), *axes]
    width = described["elem_size"]
    if described["fp4_padded"] or strides[-1] != 1:
        raise Refused("ptx: a TensorDescriptor of 4 bits, or whose last axis is strided")
    outer = tuple(width * stride for stride in strides[-2::-1])
    box, swizzle = tuple(described["block_size"][::-1]), SWIZZLES[described["swizzle"]]
    return [TensorMap(value.base.data_ptr(), width, tuple(shape[::-1]), outer, box, swizzle).pack(), *axes]


@contextmanager
def package_launches(target: str, races: bool = True, edit: Edit | None = None) -> Iterator[list[Execution]]:
    """Within the block the "triton" backend accepts CPU tensors: launches are compiled for `target` and executed.

    Yields the list of executions.
    """
    capability = capability_of(target)
    executions: list[Execution] = []
    noted: list[launches.Launch] = []
    triton = backend.load()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        noted.append(launches._launch("", fn.jit_function, capability, key, compile))
        return True

    def call(self: Any, *pointers: backend.Pointer) -> None:
        noted.clear()
        arguments = (*pointers, *self._arguments)
        self._kernel[self._grid](*arguments, **self._options)
        executions.append(run_launch(noted[0], self._grid, arguments, races, edit))

    with (
        compiler(),
        launches._standing_in(triton, capability),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note),
        mock.patch.object(backend.Launch, "__call__", call),
    ):
        yield executions
