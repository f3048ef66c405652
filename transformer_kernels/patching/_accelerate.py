"""`accelerate`: within a block, calls of torch's functions run this package's operations where these are exact.

The functions are replaced in their namespaces while a block is active and restored after the last one. A
TorchFunctionMode would intercept every call of torch, attributes of tensors included, at 2 us each; here a function
that is not in `FUNCTIONS` has no overhead. In other threads and outside the block the replacements call the original.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from transformer_kernels.backends.dispatch import get_backend, requested
from transformer_kernels.patching._report import CallReport, CallRow
from transformer_kernels.patching._torch_calls import (
    FASTER,
    FLEX,
    FUNCTIONS,
    REFUSED,
    VARLEN,
    Handler,
    flex_attention,
    is_left,
    softmax,
    varlen_attention,
)

PACKAGE = __name__.partition(".")[0]
FUNCTIONAL = torch.nn.functional.__name__
CHECKPOINT = torch.utils.checkpoint
OF_ANY_SIZE: tuple[Handler, ...] = (flex_attention, varlen_attention)
"""Rerouted even if small: PyTorch's functions have no gradients on CPUs."""
MAX_CALLS = 4096
"""Calls that are kept before they are added up."""


class _Block(NamedTuple):
    """A block that this thread or task is in, and the one around it."""

    acceleration: Acceleration
    around: _Block | None


_block: ContextVar[_Block | None] = ContextVar("transformer_kernels_acceleration")
_everywhere: list[_Block | None] = [None]
"""The block of `transformer-kernels run`, active in threads that have entered no block."""


def _active() -> Acceleration | None:
    block = _block.get(_everywhere[0])
    return None if block is None else block.acceleration


class _Rerouted:
    """A function of torch, rerouted. It is an object because, as a builtin, it must not bind as a method.

    A copy or a pickle of it is the name under which torch has the function.
    """

    def __init__(self, owner: Any, name: str, operation: str, handler: Handler) -> None:
        self.original = getattr(owner, name)
        self.operation, self.handler = operation, handler
        self.small = None if handler in OF_ANY_SIZE else (operation, None, FASTER)
        self.__name__ = self.__qualname__ = name
        self.__module__, self.__doc__ = owner.__name__, self.original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or (block := _block.get(_everywhere[0])) is None:
            return self.original(*args, **kwargs)
        frame: Any = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "")
        if caller == FUNCTIONAL:  # called by a function of torch.nn.functional that is written in Python
            caller = frame.f_back.f_globals.get("__name__", "")
        if caller.startswith(PACKAGE) and caller != __name__:  # an operation calls PyTorch's function
            return self.original(*args, **kwargs)
        acceleration = block.acceleration
        backend = acceleration.backend or get_backend()
        if backend == "auto" and self.small is not None and is_left(self.operation, args, kwargs):
            acceleration._count(self.small)
            return self.original(*args, **kwargs) if kwargs else self.original(*args)
        return acceleration._call(self, backend, args, kwargs)

    def __reduce__(self) -> Any:
        return pkgutil.resolve_name, (f"{self.__module__}:{self.__name__}",)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}, rerouted by {PACKAGE}>"


class _ReroutedMethod(_Rerouted):
    """A method of tensors, which torch.nn.functional calls too."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class Acceleration:
    """A block in which calls of torch's functions are rerouted, and their counts; made by `accelerate`."""

    def __init__(self, backend: str | None) -> None:
        if backend is not None:
            requested(backend)  # raises for an unknown name
        self.backend = backend
        self._counts: Counter[tuple[str, str | None, str | None]] = Counter()
        self._calls: list[tuple[str, str | None, str | None]] = []
        """Operation, backend and reason of the calls that `_counts` does not have yet."""
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    def __enter__(self) -> Acceleration:
        _installed.add()
        _block.set(_Block(self, _block.get(_everywhere[0])))
        return self

    def __exit__(self, *_: object) -> None:
        block = _block.get()
        assert block is not None
        _block.set(block.around)
        _installed.remove()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, inside the block whenever it is called."""
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"accelerate: a function or a module is needed; got {function!r}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"accelerate: {function.__name__} is a generator or a coroutine; use the block inside it")

        @functools.wraps(function)
        def accelerated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return accelerated

    def report(self) -> CallReport:
        """The calls rerouted so far, and the calls left to PyTorch with the reason; print it."""
        self._add_up()
        rows = [CallRow(*key, count) for key, count in self._counts.copy().items()]
        return CallReport(self.backend, tuple(sorted(rows, key=lambda row: (row.backend is None, row.operation))))

    def remove(self) -> None:
        """Remove the hooks from the model passed to `accelerate`."""
        while self._handles:
            self._handles.pop().remove()

    def __reduce__(self) -> Any:
        """A copy of a model counts for itself."""
        return Acceleration, (self.backend,)

    def _attach(self, model: nn.Module) -> None:
        """Put every forward of a model into the block, by hooks, which copies of the model keep."""
        self._handles.append(model.register_forward_pre_hook(self._before, prepend=True))
        self._handles.append(model.register_forward_hook(self._after, always_call=True))

    def _before(self, *_: Any) -> None:
        if not is_compiling():
            self.__enter__()

    def _after(self, *_: Any) -> None:
        if not is_compiling():
            self.__exit__()

    def _call(self, rerouted: _Rerouted, backend: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_compiling():  # code that is exported without Dynamo
            return rerouted.original(*args, **kwargs)
        try:
            result = rerouted.handler(backend, *args, **kwargs)
        except (TypeError, ValueError):
            if not _binds(rerouted.handler, backend, args, kwargs):
                result = "it has arguments such as out="
            elif backend == "auto" and rerouted.small is not None:
                result = REFUSED
            else:
                raise
        if isinstance(result, str):
            self._count((rerouted.operation, None, result))
            return rerouted.original(*args, **kwargs)
        self._count((rerouted.operation, _backend_of(result, backend), None))
        return result

    def _count(self, call: tuple[str, str | None, str | None]) -> None:
        """Count a call: `append` needs no lock, which would take a fifth of the time of a call that is left."""
        self._calls.append(call)
        if len(self._calls) >= MAX_CALLS:
            self._add_up()

    def _add_up(self) -> None:
        with self._lock:
            calls = self._calls[:]
            self._counts.update(calls)
            del self._calls[: len(calls)]


def _binds(handler: Handler, backend: str, args: Any, kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(handler).bind(backend, *args, **kwargs)
    except TypeError:
        return False
    return True


def _backend_of(result: Any, backend: str) -> str:
    """The backend's name in reports; for a GPU the selection of "auto" is not looked up for each call."""
    result = result if isinstance(result, Tensor) else result[0]
    return "cpu" if backend == "auto" and result.device.type == "cpu" else backend


class _Installed:
    """The exchange of torch's functions, counted over the blocks of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._exchanges: list[tuple[Any, str, Any, Any]] = []
        """Owner, name, the original, and what replaces it during a block."""
        self._late: set[str] = set()

    def add(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks > 1:
                return
            self._exchanges = self._exchanges or list(_exchanges())
            for module, late in ((VARLEN, _varlen_exchange), (FLEX, _flex_exchange)):
                if module in sys.modules and module not in self._late:
                    self._late.add(module)
                    self._exchanges.append(late())
            for owner, name, before, now in self._exchanges:
                if getattr(owner, name) is before:  # else another library has replaced it
                    setattr(owner, name, now)

    def remove(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks:
                return
            for owner, name, before, now in self._exchanges:
                if getattr(owner, name, None) is not now:
                    continue
                if owner is Tensor:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


_installed = _Installed()


def _exchanges() -> Iterator[tuple[Any, str, Any, Any]]:
    for owner, name, operation, handler in FUNCTIONS:
        rerouted = _Rerouted(owner, name, operation, handler)
        _known_to_scripts(rerouted)
        yield owner, name, rerouted.original, rerouted
    yield Tensor, "softmax", Tensor.softmax, _ReroutedMethod(Tensor, "softmax", "softmax", softmax)
    without_reentrant = "_checkpoint_without_reentrant_generator"  # followed by _impl from torch 2.14 on
    for name, at in ((without_reentrant, ""), (f"{without_reentrant}_impl", ""), ("CheckpointFunction", "apply")):
        if (before := getattr(CHECKPOINT, name, None)) is not None:
            yield CHECKPOINT, name, before, _recomputed_inside(before, at)


def _varlen_exchange() -> tuple[Any, str, Any, Any]:
    owner: Any = torch.ops.torch_attn
    rerouted = _Rerouted(owner, "_varlen_attn", "attention", varlen_attention)
    return owner, "_varlen_attn", rerouted.original, rerouted


def _flex_exchange() -> tuple[Any, str, Any, Any]:
    """The code of `flex_attention`, which programs import by name: the function stays the object that it is."""
    function = sys.modules[FLEX].flex_attention
    _flex.append(rerouted := _Rerouted(sys.modules[FLEX], function.__name__, "attention", flex_attention))
    code, module = function.__code__, function.__globals__
    rerouted.original = types.FunctionType(code, module, function.__name__, function.__defaults__)
    rerouted.original.__kwdefaults__ = function.__kwdefaults__
    return function, "__code__", code, _call_flex.__code__


_flex: list[_Rerouted] = []


def _call_flex(*args: Any, **kwargs: Any) -> Any:
    from transformer_kernels.patching import _accelerate  # the code runs among the globals of torch's module

    return _accelerate._flex[0](*args, **kwargs)


def _known_to_scripts(rerouted: _Rerouted) -> None:
    """Register the function with torch.jit.script as the builtin that it replaces."""
    table = torch.jit._builtins
    if (operator := table._find_builtin(rerouted.original)) is not None:
        table._register_builtin(rerouted, operator)


def _recomputed_inside(original: Any, at: str) -> Any:
    """Activation checkpointing whose recomputation, in backward and perhaps after the block, is in the block again."""

    def inside(function: Any, *rest: Any, **kwargs: Any) -> Any:
        acceleration = None if is_compiling() else _active()
        called = getattr(original, at) if at else original
        return called(function if acceleration is None else acceleration(function), *rest, **kwargs)

    if not at:
        return inside
    return type(original.__name__, (), {at: staticmethod(inside), "__doc__": original.__doc__})


def accelerate(target: Any = None, *, backend: str | None = None) -> Any:
    """Run the calls of torch's functions inside a block by this package's operations, where these are exact.

    Rerouted are torch.nn.functional's scaled_dot_product_attention (masks of keys, of queries and keys, biases,
    is_causal, grouped heads, dropout), layer_norm, rms_norm, gelu, softmax, cross_entropy, linear and embedding, on
    CPUs torch.nn.attention's varlen_attn and flex_attention, the functions and methods of `torch` behind them, and with
    that the modules of torch.nn that call them. The meaning of a call is torch's: causality is aligned top-left, True
    in a boolean mask is visible, classes are axis 1, the result has torch's dtype. Two things may differ: the order of
    the axes in memory of an attention's result, and the random numbers of its dropout, whose probability is rounded to
    a multiple of 2^-16. Every other call is PyTorch's own: other options, dtypes and tensor classes, transforms of
    torch.func, what torch.compile or torch.jit compile and, with "auto", what is too small to be faster. `report()`
    lists the reasons.

    Activation checkpointing recomputes inside the block that it ran in, also if backward runs after the block.
    Functions imported by name before the first block (`from torch.nn.functional import gelu`) stay torch's where they
    are builtins: gelu, linear, scaled_dot_product_attention and torch.softmax. Other threads, and processes that are
    started afresh, are not in the block.

    Args:
        target: a torch.nn.Module, a function, or None for a block.
        backend: "torch", "cpu", "triton", "cuda", "auto", or None to follow `set_backend`, `use_backend` and the
            environment at each call. A named backend computes every call that has an exact counterpart and
            raises where it does not support it.

    Returns:
        an `Acceleration`: context manager, decorator, `report()`, and `remove()` for a model. For a function, the
        function inside the block, with the Acceleration as its attribute `acceleration`.

    Raises:
        TypeError: the target is neither a module nor a function.
        ValueError: the name of the backend is unknown.
        BackendUnavailable, UnsupportedByBackend: from a call in the block, where a named backend cannot compute it.

    Examples:
        A block, in this thread or task:

        >>> x = torch.randn(512, 256)
        >>> with accelerate() as block:
        ...     y = torch.nn.functional.gelu(x)
        >>> report = block.report()  # print it: the calls, and why some were not rerouted

        A function:

        >>> @accelerate(backend="torch")
        ... def step(x):
        ...     return torch.nn.functional.gelu(x)

        Every forward of one model, in place:

        >>> model = torch.nn.LayerNorm(256)
        >>> block = accelerate(model)
        >>> block.remove()
    """
    made = Acceleration(backend)
    if target is None:
        return made
    if isinstance(target, nn.Module):
        made._attach(target)
        return made
    accelerated = made(target)
    accelerated.acceleration = made  # type: ignore[attr-defined]
    return accelerated


def accelerate_everywhere(backend: str | None) -> Acceleration:
    """A block for all threads of this process that are in no other, until it ends."""
    made = Acceleration(backend)
    _installed.add()
    _everywhere[0] = _Block(made, None)
    return made
