"""Selects the backend of a call: by argument, `use_backend`, `set_backend` or the environment, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from transformer_kernels.backends import REGISTERED, Backend, _order, register
from transformer_kernels.backends.errors import BackendUnavailable, UnsupportedByBackend

ENVIRONMENT_VARIABLE = "TRANSFORMER_KERNELS_BACKEND"

register(Backend("torch", {"cpu": 9, "cuda": 9}))
BACKENDS = ("torch", "cpu", "triton", "cuda")
for _name in BACKENDS[1:]:
    import_module(f"transformer_kernels.backends.{_name}")


def _auto_order(device_type: str) -> tuple[str, ...]:
    ranks = {backend.rank[device_type]: backend.name for backend in REGISTERED.values() if device_type in backend.rank}
    return tuple(ranks[rank] for rank in sorted(ranks))


# On a CPU the kernels for GPUs run only interpreted or emulated, for tests.
AUTO_ORDER = {device_type: _auto_order(device_type) for device_type in ("cuda", "cpu")}
AUTO_ORDER_ELSEWHERE = ("torch",)


def _order_of(operation: str, device: torch.device) -> tuple[str, ...]:
    return _order.measured(operation, AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE), device)


class Operation(Protocol):
    """The attributes of an operation that dispatch reads (ops/_operation.py)."""

    name: str
    folder: str
    adapter: Any
    prepare: Callable[..., Any]

    def forget_plans(self) -> None:
        """Validate and dispatch the next call of each layout again."""

    def crossover(self, call: Any) -> str | None:
        """Which calls `patch` and `accelerate` leave to PyTorch, or None."""


OPERATIONS: dict[str, Operation] = {}
"""Every operation by name; each registers itself where it is defined."""

distrusted: Callable[[str, str, Any], str | None] | None = None
"""Why "auto" does not use a backend's kernel of an operation for a call; set by transformer_kernels."""
observer: Callable[[Operation, Any], Any] | None = None
"""(operation, kernels) -> the kernels of a new plan, which observe its calls; set by `observe`. Plans are made once per
layout, so calls cost nothing while there is none."""
arguments_observer: Callable[[Sequence[torch.Tensor], Callable[[], Sequence[torch.Tensor]]], None] | None = None
"""(private copies of a recorded step's arguments, a function that returns those of the current call) -> None: called as
the step begins to be recorded; set by `observe`."""

_scoped: ContextVar[str | None] = ContextVar("transformer_kernels_backend", default=None)
_default: str | None = None
_kernels: dict[tuple[str, str], Any] = {}


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


def observe(by: Callable[[Operation, Any], Any] | None, arguments: Any = None) -> None:
    """Set the observers of the kernels of every plan and of the arguments of replays; None: there is none."""
    global observer, arguments_observer
    observer, arguments_observer = by, arguments
    for operation in OPERATIONS.values():
        operation.forget_plans()


def kernels_of(operation: Operation, backend: str) -> Any:
    """The backend's class of kernels of an operation (ops/_kernels.py), imported once; None where it has none."""
    try:
        return _kernels[operation.name, backend]
    except KeyError:
        pass
    kernels = family(operation.folder, backend)
    if kernels is not None and operation.adapter is not None:
        kernels = operation.adapter.on(kernels, backend)
    return _kernels.setdefault((operation.name, backend), kernels)


def backend_of(operation: Operation, kernels: Any) -> str:
    """The name of the backend that these kernels of an operation were selected from."""
    if kernels.backend is not None:
        return str(kernels.backend)
    if kernels.machine is not None:
        return next(name for name, backend in REGISTERED.items() if backend.machine is kernels.machine)
    loaded = ((name, kind) for (op, name), kind in _kernels.items() if op == operation.name and kind is not None)
    return next((name for name, kind in loaded if isinstance(kernels, kind)), "auto")


def family(folder: str, backend: str) -> Any:
    """The class of kernels of a backend for a family of operations, by its folder's module; None without a file.

    The file has the backend's name; the two compiled backends may share `_compiled`.
    """
    if find_spec(f"{folder}._{backend}") is not None:
        return import_module(f"{folder}._{backend}").Kernels
    machine = REGISTERED[backend].machine
    if machine is None or find_spec(f"{folder}._compiled") is None:
        return None
    return import_module(f"{folder}._compiled").Kernels.on(machine)


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run on `device` at all, with the remedy; None if it can."""
    return REGISTERED[backend].unavailable(device)


def has_transforms(backend: str) -> bool:
    """Whether a named backend leaves vmap, the other transforms of torch.func and forward-mode AD to PyTorch."""
    return "cpu" in REGISTERED[backend].rank


def _refusal(operation: Operation, backend: str, call: Any) -> str | None:
    """Why an available backend does not take this call; None if it does."""
    if backend != "torch" and call[0].dtype is torch.float64:
        return "float64 is computed by backend='torch' only"
    kernels = kernels_of(operation, backend)
    if kernels is None:
        return f"it has no {operation.name} kernel"
    if (refused := REGISTERED[backend].refused_dtype(call[0].device, call[0].dtype)) is not None:
        return refused
    reason: str | None = kernels.unsupported(call)
    return reason


def select(operation: Operation, backend: str | None, call: Any) -> Any:
    """The class of the kernels that compute this call; call[0] is a tensor.

    Raises:
        BackendUnavailable: the named backend cannot run on this device.
        UnsupportedByBackend: it runs here, but does not take this call.
    """
    name = requested(backend)
    device = call[0].device
    if name == "auto":
        name = _automatic(operation, call, device)[0]
    elif (reason := unavailable(name, device)) is not None:
        cause = REGISTERED[name].cause()
        raise BackendUnavailable(f"{operation.name}: backend {name!r} is not available: {reason}") from cause
    elif (reason := _refusal(operation, name, call)) is not None:
        raise UnsupportedByBackend(f"{operation.name}: backend {name!r} does not support this call: {reason}")
    return kernels_of(operation, "torch" if call.is_empty() else name)


def _automatic(operation: Operation, call: Any, device: torch.device) -> tuple[str, dict[str, str]]:
    """The first backend in the order for this device that takes the call, and why those before it did not."""
    refusals: dict[str, str] = {}
    for name in _order_of(operation.name, device):
        reason = unavailable(name, device) or _refusal(operation, name, call)
        if reason is None and distrusted is not None and not call.is_empty():
            reason = distrusted(operation.name, name, call)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    raise UnsupportedByBackend(f"{operation.name}: no backend supports this call: {refusals}")


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: the operation, the requested and the selected backend, and why not the others.

    `crossover` says which calls of the operation `patch` and `accelerate` leave to PyTorch; None: they leave none.
    `derivatives` says how those are computed that no kernel has.
    """

    operation: str
    requested: str
    chosen: str | None
    reasons: dict[str, str]
    crossover: str | None = None
    derivatives: str = ""

    def __str__(self) -> str:
        lines = [f"{self.operation}: requested {self.requested}, selected {self.chosen or 'none'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines + [f"  {line}" for line in (self.crossover, self.derivatives) if line])


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
    reasons = {
        candidate: unavailable(candidate, device) or _refusal(OPERATIONS[op], candidate, call) for candidate in BACKENDS
    }
    if name == "auto":
        chosen: str | None = _automatic(OPERATIONS[op], call, device)[0]
    else:
        chosen = name if reasons[name] is None else None
    order = _order_of(op, device)
    supported = f"supports the call; auto tries in the order {', '.join(order)} on {device.type} tensors"
    shown = {
        candidate: reason or ("selected" if candidate == chosen else supported) for candidate, reason in reasons.items()
    }
    transforms = "" if name == "auto" or has_transforms(name) else f"; {name} has neither of the last two"
    derivatives = f"double backward, forward-mode AD and torch.func are by PyTorch's operators{transforms}"
    crossover = OPERATIONS[op].crossover(call) if name == "auto" else None
    return Explanation(op, name, chosen, shown, crossover, derivatives)
