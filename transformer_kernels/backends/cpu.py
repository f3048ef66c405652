"""The compiled CPU kernels (csrc/cpu), loaded once; a failure to load is cached.

Each kernel is compiled for several instruction sets (TRANSFORMER_KERNELS_CPU_LEVELS at installation). The widest that
the processor supports is used, unless TRANSFORMER_KERNELS_CPU_ISA selects another: plain, avx2, avx512, avx512_bf16 or
amx. With TRANSFORMER_KERNELS_REPRODUCIBLE=1 results have the same bits with each of them (`reproduce`).
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from transformer_kernels.backends import Backend, register
from transformer_kernels.backends import build as _build
from transformer_kernels.backends.errors import BackendUnavailable

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # by_dtype in csrc/cpu/kernel.h
ENVIRONMENT_VARIABLE = "TRANSFORMER_KERNELS_CPU_ISA"
REPRODUCIBLE_VARIABLE = "TRANSFORMER_KERNELS_REPRODUCIBLE"

PACKAGE = Path(__file__).resolve().parents[1]

dependents: list[Callable[[], None]] = []
"""Functions that clear caches which depend on the instruction set and on reproducible mode."""

OWN_ORDER = ("avx512_bf16", "amx")
"""Instruction sets whose products of bfloat16 have an order of their own: "avx512" has the same bits as "avx2"."""

_lock = threading.Lock()
dispatch_modes = torch._C._len_torch_dispatch_stack
_module: Any = None
_failure: BackendUnavailable | None = None
_reproducible = False
_threads = threading.local()
_level = ""  # in use before results were reproducible


def load() -> Any:
    """The compiled module.

    Raises:
        BackendUnavailable: it cannot be loaded; the cause is chained.
        ValueError: TRANSFORMER_KERNELS_CPU_ISA names an instruction set that was not built or this processor lacks.
    """
    global _module, _failure
    if _module is not None:
        return _module
    with _lock:
        if _module is None and _failure is None:
            try:
                _module = _load()
            except BackendUnavailable as error:
                _failure = error
    if _failure is not None:
        raise BackendUnavailable(str(_failure)) from _failure.__cause__
    if wants_reproducible():
        try:
            reproduce(True)
        except BackendUnavailable as error:  # no other backend may take its place
            raise RuntimeError(f"{REPRODUCIBLE_VARIABLE} is set: {error}") from error
    return _module


def is_reproducible() -> bool:
    """Whether results have the same bits at every instruction set."""
    return _reproducible


def wants_reproducible() -> bool:
    """Whether TRANSFORMER_KERNELS_REPRODUCIBLE is set, and not to 0."""
    return os.environ.get(REPRODUCIBLE_VARIABLE, "0") not in ("", "0")


def mode() -> AbstractContextManager[Any]:
    """The mode that replaces or names PyTorch's operators in this thread, also inside of registered operators."""
    return getattr(_threads, "mode", None) or nullcontext()


def set_mode(mode: AbstractContextManager[Any] | None) -> AbstractContextManager[Any] | None:
    """Set the result of `mode`; returns the previous one."""
    before = getattr(_threads, "mode", None)
    _threads.mode = mode
    return before


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within this context, kernel calls of this thread are not recorded."""
    module = load()
    before = module.record_with(None)
    try:
        yield
    finally:
        module.record_with(before)


def _fuses(level: str) -> bool:
    """Whether the kernels of an instruction set round a product and a sum once."""
    return level != "plain" or platform.machine().lower() in ("aarch64", "arm64")


def reproduce(on: bool) -> bool:
    """Turn on or off results with the same bits at every instruction set; returns the previous setting.

    Products are this package's, of bfloat16 in float32, and a row is computed as in a batch.

    Raises:
        BackendUnavailable: the kernels cannot be loaded, or none of those built here fuses products with sums.
    """
    global _reproducible, _level
    module, before = load(), _reproducible
    if on == before:
        return before
    if on:
        used = module.instruction_set()
        level = "avx512" if used in OWN_ORDER else used
        if level not in module.built:
            raise BackendUnavailable(
                f"reproducible results need the kernels of {level}, which were not built: run "
                "TRANSFORMER_KERNELS_CPU_LEVELS=present pip install . again"
            )
        if not _fuses(level):
            raise BackendUnavailable(
                "reproducible results need kernels with a fused multiply-add (AVX2 or newer, or aarch64); "
                f"those of {level} have none"
            )
        _level = used
    else:
        level = _level
    module.reproduce(on)
    _reproducible = False  # while the level changes
    module.use(level)
    _reproducible = on
    return before


@contextmanager
def recorded(calls: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    """Within this context, kernel calls of this thread and their arguments are appended to `calls`."""
    module = load()

    def record(kernel: str, names: list[str], arguments: tuple[Any, ...]) -> None:
        calls.append((getattr(module, kernel), _arguments_of(kernel, tuple(names))(*arguments) if names else arguments))

    before = module.record_with(record)
    try:
        yield
    finally:
        module.record_with(before)


@functools.cache
def _arguments_of(kernel: str, names: tuple[str, ...]) -> Any:
    """A NamedTuple of a kernel's arguments."""
    return namedtuple(kernel, names)


def unavailable(device: torch.device) -> str | None:
    """Why the CPU kernels cannot run on tensors of this device, with the remedy, or None."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}; move them to the CPU"
    try:
        load()
    except BackendUnavailable as error:
        return str(error)
    return None


def cause() -> BaseException | None:
    """The error that prevented loading, to be chained."""
    return None if _failure is None else _failure.__cause__


def has_bfloat16_products() -> bool:
    """Whether PyTorch multiplies bfloat16 matrices with instructions for it, not excluded by ATEN_CPU_CAPABILITY."""
    if torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2"):
        return False
    supports = [getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")]
    return any(support is not None and support() for support in supports)


def parameter(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter in float32; the result must be kept alive until the kernel has returned."""
    return parameter if parameter is None or parameter.dtype is torch.float32 else parameter.float()


def index(ids: torch.Tensor | None) -> torch.Tensor | None:
    """Indices in int64."""
    return None if ids is None else ids.long()


def within(ids: torch.Tensor, limit: int, ignored: int = 0) -> bool:
    """Whether indices on the CPU, at least one, are in [0, limit), or with the compiled module equal to `ignored`."""
    if _module is not None and limit > 0 and ids.dtype is torch.int64 and ids.is_contiguous():
        inside: bool = _module.within(ids.data_ptr(), ids.numel(), limit, ignored)  # no kernel: it is not recorded
        return inside
    lowest, highest = ids.aminmax()
    return lowest.item() >= 0 and highest.item() < limit  # tensors take nine times as long to compare


def bind(kernel: str, device: torch.device, **fields: Any) -> Any:
    """A kernel with these fields, which computes synchronously."""
    return getattr(load(), kernel)(**fields, device=0, stream=0)


def allocator(device: torch.device) -> Any:
    """Without a dispatch mode it bypasses the dispatcher, which takes twice as long."""
    return _empty_for_modes if dispatch_modes() else _empty


def _empty_for_modes(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty: Any = getattr(_guards, "_empty_strided_cpu", _empty_for_modes)  # what inductor calls: not public


def sum_like(parameter: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """Memory for a parameter's gradient, in float32; None where it is not wanted."""
    return parameter.new_empty(parameter.shape, dtype=torch.float32) if wanted else None


def workspace(like: torch.Tensor) -> None:
    """None: threads have memory of their own."""


def partials(x: torch.Tensor, rows: int, columns: int, sums: int, by_columns: bool = False) -> tuple[None, int]:
    """None: each thread allocates its partial sums."""
    return None, 0


def describe() -> str:
    """The instruction set in use, and a better one that this processor supports."""
    module = load()
    used, best = module.instruction_set(), module.processor
    if used == best:
        return f"kernels for {used}"
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return f"kernels for {used}, which {ENVIRONMENT_VARIABLE} names; this processor has {best}"
    return (
        f"kernels for {used}; this processor has {best}, but they were built for {', '.join(module.built)}: "
        "pip install . again on this machine, or with TRANSFORMER_KERNELS_CPU_LEVELS=all for every processor"
    )


def _load() -> Any:
    remedy = "with a C++ compiler installed, run pip install . again, or python setup.py build_ext --inplace"
    try:
        module: Any = importlib.import_module("transformer_kernels._cpu")
    except ModuleNotFoundError as error:
        note = PACKAGE / _build.CPU_BUILD_NOTE
        why = note.read_text().strip() if note.is_file() else _build.other_processor() or remedy
        raise BackendUnavailable(f"the CPU kernels are not built: {why}") from error
    except ImportError as error:
        raise BackendUnavailable(
            f"the CPU kernels do not load ({error}): they are broken or were built for another Python; {remedy}"
        ) from error
    if (_build.CSRC / "cpu").is_dir() and module.source_hash != (expected := _build.cpu_source_hash()):
        found, expected = module.source_hash[:16], expected[:16]
        cause = ImportError(f"{module.__file__}: built from sources {found}, expected {expected}")
        raise BackendUnavailable(
            f"the CPU kernels were built from other sources ({found}, expected {expected}): {remedy}"
        ) from cause
    module.use = functools.partial(_use, module.use)
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        module.use(named)
    return module


def _use(switch: Callable[[str], None], level: str) -> None:
    """Switch to another instruction set, and clear the decisions for the previous one.

    Raises:
        ValueError: it was not built, this processor lacks it, or it has an order of additions of its own meanwhile.
    """
    if _reproducible and (level in OWN_ORDER or not _fuses(level)):
        raise ValueError(f"{level} has an order of additions of its own; end the reproducible block before")
    switch(level)
    for forget in dependents:
        forget()


register(Backend("cpu", {"cpu": 0}, unavailable, cause, sys.modules[__name__]))
