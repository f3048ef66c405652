"""The compiled CPU kernels (csrc/cpu): loaded once, and if they cannot be, the reason is remembered.

Each kernel was compiled for several instruction sets; the widest that the processor has is used unless
TRANSFORMER_KERNELS_CPU_ISA names another: plain, avx2, avx512, avx512_bf16 or amx.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transformer_kernels._errors import BackendUnavailable
from transformer_kernels.backends import build as _build

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # by_dtype in csrc/cpu/kernel.h
ENVIRONMENT_VARIABLE = "TRANSFORMER_KERNELS_CPU_ISA"

_lock = threading.Lock()
_module: Any = None
_failure: BackendUnavailable | None = None


def load() -> Any:
    """The compiled module; raises BackendUnavailable, with the cause chained, each time it is not there.

    Raises:
        ValueError: TRANSFORMER_KERNELS_CPU_ISA names an instruction set that this processor lacks.
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
    return _module


class Held(int):
    """An address that keeps alive what stands there."""

    owner: Any

    def __new__(cls, address: int, owner: Any) -> Held:
        held = super().__new__(cls, address)
        held.owner = owner
        return held


@contextmanager
def recorded(calls: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    """While entered, the kernels that this thread calls are added to `calls`, with their arguments."""
    global _module
    before = _module = load()
    _module = _Recorder(before, calls)
    try:
        yield
    finally:
        _module = before


class _Recorder:
    """The compiled module, whose calls by one thread are noted."""

    def __init__(self, module: Any, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        self._module, self._calls, self._thread = module, calls, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._module, name)

        def call(*arguments: Any) -> Any:
            if arguments and threading.get_ident() == self._thread:  # without arguments it only tells
                self._calls.append((kernel, arguments))
            return kernel(*arguments)

        return call if callable(kernel) else kernel


def unavailable(device: torch.device) -> str | None:
    """Why the CPU kernels cannot run on tensors of this device, with the remedy; None when they can."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}; move them to the CPU"
    try:
        load()
    except BackendUnavailable as error:
        return str(error)
    return None


def cause() -> BaseException | None:
    """What stopped the module from loading, to be chained to the error that reports it."""
    return None if _failure is None else _failure.__cause__


def widened(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter in float32, as the kernels read it; keep the result until the kernel returned."""
    return parameter if parameter is None or parameter.dtype is torch.float32 else parameter.float()


def narrowed(gradient: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A float32 gradient in the dtype of its parameter; None without one of them."""
    if gradient is None or parameter is None:
        return None
    return gradient if parameter.dtype is torch.float32 else gradient.to(parameter.dtype)


def _load() -> Any:
    remedy = "with a C++ compiler installed, run pip install . again, or python setup.py build_ext --inplace"
    try:
        module: Any = importlib.import_module("transformer_kernels._cpu")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"the CPU kernels are not built: {remedy}") from error
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
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        module.use(named)
    return module
