"""Triton: import on first use with a cached failure, launches, and device queries.

Nothing here imports Triton at module level, so the package works without it. Kernels are functions with `@triton.jit`
in `ops/<family>/_triton*.py`; the dispatcher imports those modules only if `unavailable` returns None.
"""

from __future__ import annotations

import functools
import os
import re
from types import ModuleType
from typing import Any, cast

import torch

from transformer_kernels.backends import Backend, register
from transformer_kernels.backends.errors import BackendUnavailable

MINIMUM_VERSION = (3, 4)
"""Older compilers do not support named tuples in a kernel; torch 2.6 and 2.7 pin those versions."""

NEXT_UNSUPPORTED_VERSION = (4, 0)
SUPPORTED_VERSIONS = "3.4 or newer, below 4.0"

MINIMUM_CAPABILITY = (8, 0)

MAX_PROGRAMS = (2**31 - 1, 65535, 65535)
"""CUDA's limits of a grid, per axis."""

INTERPRETED_CAPABILITY = (9, 0)
"""The capability whose tiles the interpreter uses; tests override it."""

INTERPRETED_MULTIPROCESSORS = 3
"""Small, so that a persistent program loops over several tiles in the interpreter."""

Capability = tuple[int, int]

Pointer = torch.Tensor | None | tuple[torch.Tensor | None, ...]
"""A pointer argument of a kernel, or a record of pointers, such as a NamedTuple."""


def load() -> ModuleType:
    """Import Triton and return it; raises `BackendUnavailable` with the reason."""
    module, reason, cause = _load_once()
    if module is None:
        raise BackendUnavailable(f"triton: {reason}") from cause
    return module


def unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, with the remedy, or None."""
    module, reason, _ = _load_once()
    if module is None:
        return reason
    return _unavailable_on(device.type, device.index)


class Launch:
    """A launch of a kernel without its pointers, created once per layout.

    Triton inspects every argument of every launch for specialisation: numbers for type, 32 bits, 1 and divisibility by
    16, pointers for type and 16-byte alignment. Here numbers are inspected once, and if all pointers are aligned, the
    kernel compiled for their types is launched directly.
    """

    __slots__ = ("_arguments", "_compiled", "_grid", "_kernel", "_options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float | None, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        if any(blocks > most for blocks, most in zip(self._grid, MAX_PROGRAMS, strict=True)):
            raise ValueError(f"a launch of the triton backend has up to {MAX_PROGRAMS} programs; this needs {grid}")
        self._arguments = (*numbers, *constants)
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._compiled: dict[tuple[Any, ...], Any] | None = None
        if not interpreting() and not any(isinstance(x, int) and not -(1 << 31) <= x < 1 << 31 for x in numbers):
            specialised = _specialised(kernel, numbers, len(constants))
            key = (id(kernel), constants, num_warps, num_stages, specialised, *map(type, numbers))
            self._compiled = _COMPILED.setdefault(key, {})

    def __call__(self, *pointers: Pointer) -> None:
        """`kernel[grid](*pointers, *numbers, *constants)` on the device of the first tensor, which is the first pointer
        or the first one of a record."""
        first = pointers[0]
        device = cast(torch.Tensor, first[0] if isinstance(first, tuple) else first).device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            self._launch(device.index, pointers)
        else:
            with torch.cuda.device(device):
                self._launch(device.index, pointers)

    def _launch(self, device: int | None, pointers: tuple[Pointer, ...]) -> None:
        if self._compiled is None:
            self._kernel[self._grid](*pointers, *self._arguments, **self._options)
            return
        addresses: list[Any] = []
        key: list[Any] = [device]  # a kernel's records need no brackets in it
        address_bits = 0
        for x in pointers:
            if x is None:
                addresses.append(None)
                key.append(None)
            elif isinstance(x, tuple):
                record: tuple[int | None, ...] = ()
                for item in x:
                    if item is None:
                        record += (None,)
                        key += (None,)
                    else:
                        address = item.data_ptr()
                        address_bits |= address
                        record += (address,)
                        key += (item.dtype,)
                addresses.append(record)
            else:
                address = x.data_ptr()
                address_bits |= address
                addresses.append(address)
                key.append(x.dtype)
        triton, types = load(), tuple(key)
        known = None if address_bits % 16 or _is_profiled(triton.knobs.runtime) else self._compiled.get(types)
        if known is None:
            compiled = self._kernel[self._grid](*pointers, *self._arguments, **self._options)
            if compiled is not None and not address_bits % 16:  # None in reports, which do not launch
                self._compiled[types] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, packed = known
        stream = triton.runtime.driver.active.get_current_stream(device)
        run(*self._grid, stream, function, packed, None, None, None, *addresses, *self._arguments)


_COMPILED: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
"""Compiled kernels by kernel (which lives as long as its module), constants and numbers, then by device and types."""


def _specialised(kernel: Any, numbers: tuple[float | None, ...], constants: int) -> tuple[tuple[bool, bool], ...]:
    """Triton's specialisation of integers: whether each is 1, and whether it is divisible by 16."""
    parameters = kernel.params[len(kernel.params) - constants - len(numbers) :]
    pairs: Any = zip(parameters, numbers, strict=False)
    return tuple(
        [(x == 1, x % 16 == 0) for parameter, x in pairs if isinstance(x, int) and not parameter.do_not_specialize]
    )


def _is_profiled(runtime: Any) -> bool:
    """Whether launch hooks are registered; newer versions of Triton have lists of hooks."""
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


@functools.cache
def interpreting() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, so that kernels run on CPU tensors."""
    return type(load().language.philox).__name__ == "InterpretedFunction"


def capability(device: torch.device) -> Capability:
    """The compute capability whose tables `device` uses."""
    return INTERPRETED_CAPABILITY if device.type != "cuda" else tiles_of(_device_capability(device.index))


def tiles_of(found: Capability) -> Capability:
    """The capability whose tables a device uses: the oldest for 12.x, which lacks the shared memory of 9.0."""
    return found if found < (12, 0) else MINIMUM_CAPABILITY


def fp32_precision() -> str:
    """Precision of fp32 products: "ieee", or "tf32" if allowed by `torch.set_float32_matmul_precision` or
    `torch.backends.cuda.matmul.fp32_precision`."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # if set, torch.get_float32_matmul_precision() may raise
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of `device`; persistent kernels launch a multiple of it."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def vector_width(itemsize: int, *sizes: int) -> int:
    """Elements of a 16-byte access if all `sizes` are multiples of that number, else 1."""
    width = 16 // itemsize
    return width if all(size % width == 0 for size in sizes) else 1


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up; Triton's function costs several microseconds on the host."""
    return -(-dividend // divisor)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


@functools.cache
def _load_once() -> tuple[ModuleType | None, str | None, BaseException | None]:
    try:
        import triton
        import triton.language
    except Exception as error:  # a broken installation raises OSError, AttributeError, SyntaxError, ...
        return None, f"cannot be imported ({error}); install it with `pip install triton` (Linux)", error
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if not MINIMUM_VERSION <= version < NEXT_UNSUPPORTED_VERSION:
        reason = f"version {triton.__version__} is not supported; install {SUPPORTED_VERSIONS} (torch 2.8 brings it)"
        return None, reason, None
    imported_interpreting = type(triton.language.philox).__name__ == "InterpretedFunction"
    if imported_interpreting != (os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")):
        reason = "TRITON_INTERPRET was changed after triton was imported; set it before the process starts"
        return None, reason, None
    return triton, None, None


@functools.cache
def _unavailable_on(device_type: str, index: int | None) -> str | None:
    if interpreting():
        return None if device_type in ("cpu", "cuda") else f"the interpreter runs on CPU tensors, not on {device_type}"
    if device_type == "cpu":
        return "needs a CUDA device; for CPU tensors set TRITON_INTERPRET=1 before the process starts (slow, for tests)"
    if device_type != "cuda":
        return f"needs a CUDA device, not {device_type}"
    if torch.version.hip is not None:
        return "is supported on NVIDIA GPUs only; this is a ROCm build of torch"
    found = _device_capability(index)
    if found < MINIMUM_CAPABILITY:
        return f"needs compute capability 8.0 or newer (Ampere); this GPU has {found[0]}.{found[1]}"
    return None


@functools.cache
def _device_capability(index: int | None) -> Capability:
    return torch.cuda.get_device_capability(index)


register(Backend("triton", {"cuda": 0}, unavailable))
