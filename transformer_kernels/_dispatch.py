"""Which backend answers a call: by argument, `use_backend`, `set_backend` or the environment, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels._errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends import triton as _triton

BACKENDS = ("torch", "triton", "cuda")
OPERATIONS = (
    "attention",
    "packed_attention",
    "softmax",
    "layer_norm",
    "add_layer_norm",
    "gelu",
    "bias_gelu",
    "bias_relu",
    "embedding",
    "cross_entropy",
    "linear_cross_entropy",
)
KERNELS_OF = {"packed_attention": "attention"}  # operations that are answered by the backends' files of another
WITH_KERNELS = tuple(name for name in OPERATIONS if name not in KERNELS_OF)
ENVIRONMENT_VARIABLE = "TRANSFORMER_KERNELS_BACKEND"

# The order in which "auto" asks. On a CPU the kernels of the other two run only interpreted or emulated, for tests.
AUTO_ORDER = {"cuda": ("triton", "cuda", "torch")}
AUTO_ORDER_ELSEWHERE = ("torch",)

_scoped: ContextVar[str | None] = ContextVar("transformer_kernels_backend", default=None)
_default: str | None = None
_modules: dict[tuple[str, str], ModuleType | None] = {}


def _checked(backend: str) -> str:
    if backend not in BACKENDS and backend != "auto":
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, auto; got {backend!r}")
    return backend


def set_backend(backend: str | None) -> None:
    """Make `backend` the default of this process; None returns to the environment variable, or to "auto".

    Args:
        backend: "torch", "triton", "cuda", "auto" or None.
    Raises:
        ValueError: the name is unknown.
    """
    global _default
    _default = None if backend is None else _checked(backend)


def get_backend() -> str:
    """The name that a call without `backend=` uses here and now; "auto" unless something else was asked for."""
    return _scoped.get() or _default or _checked(os.environ.get(ENVIRONMENT_VARIABLE) or "auto")


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, in this thread or task, calls without `backend=` use this one.

    Args:
        backend: "torch", "triton", "cuda" or "auto".
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


def _module(op: str, backend: str) -> ModuleType | None:
    """The backend's file for an operation, imported once; None where it has none."""
    key = (op, backend)
    if key not in _modules:
        name = f"transformer_kernels.ops.{KERNELS_OF.get(op, op)}._{backend}"
        _modules[key] = import_module(name) if find_spec(name) is not None else None
    return _modules[key]


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run on `device` at all, with the remedy; None if it can."""
    if backend == "triton":
        return _triton.unavailable(device)
    if backend == "cuda":
        return _extension.unavailable(device)
    return None


def _refusal(op: str, backend: str, arguments: tuple[Any, ...]) -> str | None:
    """Why an available backend does not take this call; None if it does."""
    if backend != "torch" and arguments[0].dtype is torch.float64:
        return "float64 is computed by backend='torch' only"
    module = _module(op, backend)
    if module is None:
        return f"it has no {op} kernel"
    return module.unsupported(*arguments)


def select(op: str, backend: str | None, arguments: tuple[Any, ...]) -> ModuleType:
    """The module whose `forward(*arguments)` answers this call; arguments[0] is a tensor.

    Raises:
        BackendUnavailable: the named backend cannot run on this device.
        UnsupportedByBackend: it runs here, but does not take this call.
    """
    name = requested(backend)
    device = arguments[0].device
    if name == "auto":
        name = _automatic(op, arguments)[0]
    elif (reason := unavailable(name, device)) is not None:
        cause = _extension.cause() if name == "cuda" else None
        raise BackendUnavailable(f"{op}: backend {name!r} is not available: {reason}") from cause
    elif (reason := _refusal(op, name, arguments)) is not None:
        raise UnsupportedByBackend(f"{op}: backend {name!r} does not support this call: {reason}")
    module = _module(op, name)
    assert module is not None
    return module


def _automatic(op: str, arguments: tuple[Any, ...]) -> tuple[str, dict[str, str]]:
    """The first backend in the order for this device that takes the call, and why those before it did not."""
    device = arguments[0].device
    refusals: dict[str, str] = {}
    for name in AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE):
        reason = unavailable(name, device) or _refusal(op, name, arguments)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    raise UnsupportedByBackend(f"{op}: no backend supports this call: {refusals}")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the operation, the backend asked for, the one that answers, and why the others do not."""

    operation: str
    requested: str
    chosen: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.operation}: asked for {self.requested}, answered by {self.chosen or 'none'}"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.reasons.items()])


def explain(operation: str | Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Which backend would answer `operation(*args, **kwargs)`, and why the others would not. Nothing is computed.

    Args:
        operation: a public operation or its name, such as "attention".
        *args, backend, **kwargs: exactly what the operation would be called with.
    Returns:
        an `Explanation`; print it, or read its fields.
    Raises:
        what the operation itself raises for bad arguments.
    """
    op = operation if isinstance(operation, str) else operation.__name__
    if op not in OPERATIONS:
        raise ValueError(f"explain: operation must be one of {', '.join(OPERATIONS)}; got {op!r}")
    arguments = import_module(f"transformer_kernels.ops.{op}").prepare(*args, **kwargs)
    device, name = arguments[0].device, requested(backend)
    reasons = {each: unavailable(each, device) or _refusal(op, each, arguments) for each in BACKENDS}
    if name == "auto":
        chosen: str | None = _automatic(op, arguments)[0]
    else:
        chosen = name if reasons[name] is None else None
    order = AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE)
    supported = f"supports the call; auto asks in the order {', '.join(order)} on {device.type} tensors"
    told = {each: reason or ("chosen" if each == chosen else supported) for each, reason in reasons.items()}
    return Explanation(op, name, chosen, told)


def is_empty(*tensors: Tensor) -> bool:
    """Whether any of the tensors has no element: then there is nothing to launch."""
    return any(tensor.numel() == 0 for tensor in tensors)
