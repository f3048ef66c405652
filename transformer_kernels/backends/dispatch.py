"""Selects the backend of a call: by argument, `use_backend`, `set_backend` or the environment, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from transformer_kernels.backends import cpu as _cpu
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.errors import BackendUnavailable, UnsupportedByBackend

BACKENDS = ("torch", "cpu", "triton", "cuda")
ENVIRONMENT_VARIABLE = "TRANSFORMER_KERNELS_BACKEND"

# The order in which "auto" asks. On a CPU the kernels for GPUs run only interpreted or emulated, for tests.
AUTO_ORDER = {"cuda": ("triton", "cuda", "torch"), "cpu": ("cpu", "torch")}
AUTO_ORDER_ELSEWHERE = ("torch",)


class Operation(Protocol):
    """What dispatch reads of an operation (ops/_operation.py)."""

    name: str
    folder: str
    by_pytorch: tuple[str, ...]
    adapt: Callable[[Any], Any] | None
    prepare: Callable[..., Any]

    def forget_plans(self) -> None:
        """Validate and dispatch the next call of each layout again."""

    def is_empty(self, call: Any) -> bool:
        """Whether there is nothing to launch."""

    def crossover(self, call: Any) -> str | None:
        """Which calls `patch` and `accelerate` leave to PyTorch, or None."""


OPERATIONS: dict[str, Operation] = {}
"""Every operation by name; each registers itself where it is defined."""

distrusted: Callable[[str, str, Any], str | None] | None = None
"""Why "auto" does not use a backend's kernel of an operation for a call; set by transformer_kernels."""

_scoped: ContextVar[str | None] = ContextVar("transformer_kernels_backend", default=None)
_default: str | None = None
_modules: dict[tuple[str, str], Any] = {}


def _checked(backend: str) -> str:
    if backend not in BACKENDS and backend != "auto":
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, auto; got {backend!r}")
    return backend


def set_backend(backend: str | None) -> None:
    """Make `backend` the default of this process; None returns to the environment variable, or to "auto".

    Args:
        backend: "torch", "cpu", "triton", "cuda", "auto" or None.

    Raises:
        ValueError: the name is unknown.
    """
    global _default
    _default = None if backend is None else _checked(backend)


# On POSIX the variables are a dict of bytes; os.environ.get itself takes a microsecond.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ) if os.name == "posix" else os.environ
_encoded = os.fsencode if _environment is not os.environ else str
_variable = _encoded(ENVIRONMENT_VARIABLE)
_named = {_encoded(name): name or "auto" for name in (*BACKENDS, "auto", "")}


def get_backend() -> str:
    """The backend of calls without `backend=` in this thread or task; "auto" by default."""
    name = _scoped.get() or _default
    if name is None:
        value = _environment.get(_variable)
        name = "auto" if value is None else _named.get(value) or _checked(os.environ[ENVIRONMENT_VARIABLE])
    return name


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, in this thread or task, calls without `backend=` use this one.

    Args:
        backend: "torch", "cpu", "triton", "cuda" or "auto".

    Raises:
        ValueError: the name is unknown.
    """
    token = _scoped.set(_checked(backend))
    try:
        yield
    finally:
        _scoped.reset(token)


def requested(backend: str | None) -> str:
    """The backend that a call asks for, by argument or by default."""
    return get_backend() if backend is None else _checked(backend)


def _module(operation: Operation, backend: str) -> Any:
    """The backend's `forward` and `backward` of an operation, imported once; None where it has none."""
    try:
        return _modules[operation.name, backend]
    except KeyError:
        pass
    module = family(operation.folder, "torch" if backend in operation.by_pytorch else backend)
    adapted = module if module is None or operation.adapt is None else operation.adapt(module)
    return _modules.setdefault((operation.name, backend), adapted)


def family(folder: str, backend: str) -> Any:
    """The kernels of a backend for a family of operations, by its folder's module; None where there are none.

    Its file has the backend's name; the two compiled backends may share `_compiled`.
    """
    if find_spec(f"{folder}._{backend}") is not None:
        return import_module(f"{folder}._{backend}")
    machine = {"cpu": _cpu, "cuda": _extension}.get(backend)
    if machine is None or find_spec(f"{folder}._compiled") is None:
        return None
    return import_module(f"{folder}._compiled").Kernels(machine)


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run on `device` at all, with the remedy; None if it can."""
    if backend == "cpu":
        return _cpu.unavailable(device)
    if backend == "triton":
        return _triton.unavailable(device)
    if backend == "cuda":
        return _extension.unavailable(device)
    return None


def _refusal(operation: Operation, backend: str, call: Any) -> str | None:
    """Why an available backend does not take this call; None if it does."""
    if backend != "torch" and call[0].dtype is torch.float64:
        return "float64 is computed by backend='torch' only"
    module = _module(operation, backend)
    if module is None:
        return f"it has no {operation.name} kernel"
    unsupported = getattr(module, "unsupported", None)
    return None if unsupported is None else unsupported(call)


def select(operation: Operation, backend: str | None, call: Any) -> Any:
    """The module whose `forward(call)` computes this call; call[0] is a tensor.

    Raises:
        BackendUnavailable: the named backend cannot run on this device.
        UnsupportedByBackend: it runs here, but does not take this call.
    """
    name = requested(backend)
    device = call[0].device
    if name == "auto":
        name = _automatic(operation, call, device)[0]
    elif (reason := unavailable(name, device)) is not None:
        loaded = {"cpu": _cpu, "cuda": _extension}.get(name)
        cause = None if loaded is None else loaded.cause()
        raise BackendUnavailable(f"{operation.name}: backend {name!r} is not available: {reason}") from cause
    elif (reason := _refusal(operation, name, call)) is not None:
        raise UnsupportedByBackend(f"{operation.name}: backend {name!r} does not support this call: {reason}")
    return _module(operation, "torch" if operation.is_empty(call) else name)


def _automatic(operation: Operation, call: Any, device: torch.device) -> tuple[str, dict[str, str]]:
    """The first backend in the order for this device that takes the call, and why those before it did not."""
    refusals: dict[str, str] = {}
    for name in AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE):
        reason = unavailable(name, device) or _refusal(operation, name, call)
        if reason is None and distrusted is not None and not operation.is_empty(call):
            reason = distrusted(operation.name, name, call)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    raise UnsupportedByBackend(f"{operation.name}: no backend supports this call: {refusals}")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the operation, the requested backend, the selected one, and why the others are not.

    `crossover` says which calls of the operation `patch` and `accelerate` leave to PyTorch; None: they leave none.
    """

    operation: str
    requested: str
    chosen: str | None
    reasons: dict[str, str]
    crossover: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: requested {self.requested}, selected {self.chosen or 'none'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines + ([] if self.crossover is None else [f"  {self.crossover}"]))


def explain(operation: str | Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """The backend selected for `operation(*args, **kwargs)`, and why the others are not. Nothing is computed.

    Args:
        operation: a public operation or its name, such as "attention".
        *args: of the operation.
        backend: of the operation.
        **kwargs: of the operation.

    Returns:
        an `Explanation`; print it, or read its fields.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments of the operation, or an unknown operation or backend.

    Examples:
        >>> print(explain("gelu", torch.randn(4, 64), backend="torch").chosen)
        torch
    """
    op = operation if isinstance(operation, str) else operation.__name__
    if op not in OPERATIONS:
        raise ValueError(f"explain: operation must be one of {', '.join(sorted(OPERATIONS))}; got {op!r}")
    call = OPERATIONS[op].prepare(*args, **kwargs)
    device, name = call[0].device, requested(backend)
    reasons = {each: unavailable(each, device) or _refusal(OPERATIONS[op], each, call) for each in BACKENDS}
    if name == "auto":
        chosen: str | None = _automatic(OPERATIONS[op], call, device)[0]
    else:
        chosen = name if reasons[name] is None else None
    order = AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE)
    supported = f"supports the call; auto tries in the order {', '.join(order)} on {device.type} tensors"
    shown = {each: reason or ("selected" if each == chosen else supported) for each, reason in reasons.items()}
    return Explanation(op, name, chosen, shown, OPERATIONS[op].crossover(call) if name == "auto" else None)
