"""The functions of torch that the code of a forward calls, read from its code object: no source is needed."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REROUTED = ("scaled_dot_product_attention", "gelu", "layer_norm", "rms_norm", "softmax", "cross_entropy")
"""Functions of torch.nn.functional whose calls `accelerate` intercepts."""

WRITTEN_IN_PYTHON = frozenset(name for name in REROUTED if isinstance(getattr(F, name), types.FunctionType))
"""Functions that it also intercepts if they were imported by name."""

OPERATORS = {"@": "matmul", "BINARY_MATRIX_MULTIPLY": "matmul", "*": "mul", "BINARY_MULTIPLY": "mul"}
"""Functions by their operators, and by their instructions before Python 3.11."""


class Call(NamedTuple):
    """A function of torch, or a method of a tensor, that a forward names.

    Attributes:
        name: of the function.
        through: the global name in the forward of torch.nn.functional, or of its function, by which it is reached; None
            for calls in other functions, methods of tensors and longer paths.
        seen: whether `accelerate` intercepts the call.
    """

    name: str
    through: str | None
    seen: bool


@functools.cache
def calls_of(kind: type) -> tuple[Call, ...] | None:
    """The calls in the forward of a class of modules, its own methods and functions that it calls included.

    None if the forward is not a Python function.
    """
    forward = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    if not isinstance(forward, types.FunctionType):
        return None
    return tuple(dict.fromkeys(_walk(forward, kind, set())))


def direct_calls(kind: type) -> Iterator[Call]:
    """Those in the forward itself that a global name reaches, of a forward under no decorator."""
    forward = kind.forward  # type: ignore[attr-defined]
    if isinstance(forward, types.FunctionType) and not hasattr(forward, "__wrapped__"):
        given = forward.__globals__
        for call in calls_of(kind) or ():
            if call.through is not None and given.get(call.through) in (F, getattr(F, call.name)):
                yield call


def _walk(function: types.FunctionType, owner: type, visited: set[Any]) -> Iterator[Call]:
    if function.__code__ in visited:
        return
    visited.add(function.__code__)
    first = function.__code__.co_varnames[:1]
    scope = _scope(function)
    codes = [function.__code__]
    for code in codes:
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]  # lambdas, comprehensions
        found: Any = None  # the value of the last instruction, where it is known: (object,), or "self"
        through: str | None = None  # the global name that it is
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                found, through = (scope[name],) if name in scope else None, name
                if found is not None:
                    yield from _of_global(name, found[0], owner, visited)
                if name == "super":
                    yield from _of_parents(function, owner, visited)
            elif step.opname.startswith("LOAD_FAST"):
                found = "self" if (name[-1] if isinstance(name, tuple) else name) in first else None
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if found == "self":
                    method = inspect.getattr_static(owner, name, None)
                    if isinstance(method, types.FunctionType) and not hasattr(nn.Module, name):
                        yield from _walk(method, owner, visited)
                    found = None
                elif found is not None and isinstance(found[0], types.ModuleType):
                    module, found = found[0], (getattr(found[0], name, None),)
                    if module in (F, torch, torch.special):
                        yield _of_module(name, module, through)
                    through = None
                elif found is None:
                    if callable(getattr(Tensor, name, None)):
                        yield Call(name, None, name == "softmax")
                else:
                    found = None
            elif step.opname.startswith("BINARY_") and (operator := OPERATORS.get(step.argrepr or step.opname)):
                yield Call(operator, None, False)
                found = None
            elif step.opname not in ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL", "RESUME", "NOP"):
                found = None


def _scope(function: types.FunctionType) -> dict[str, Any]:
    """The names that a function reads: builtins, globals and its closure."""
    scope = vars(builtins) | function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            scope.pop(name, None)
    return scope


def _of_global(name: str, found: Any, owner: type, visited: set[Any]) -> Iterator[Call]:
    """The calls of a global name: a function of torch imported by name, or another function of Python."""
    known = getattr(found, "__name__", "")
    if known and callable(found) and getattr(F, known, None) is found:
        yield Call(known, name, known in WRITTEN_IN_PYTHON)
    elif known and callable(found) and not isinstance(found, type) and getattr(torch, known, None) is found:
        yield Call(known, None, False)
    elif isinstance(found, types.FunctionType) and not found.__module__.startswith(("torch.", "transformers.")):
        yield from _walk(found, owner, visited)


def _of_module(name: str, owner: types.ModuleType, through: str | None) -> Call:
    if owner is not F:
        return Call(name, None, owner is torch and name in ("softmax", "layer_norm", "rms_norm"))
    return Call(name, through, name in REROUTED)


def _of_parents(function: types.FunctionType, owner: type, visited: set[Any]) -> Iterator[Call]:
    """The calls of the forwards that `super().forward` may mean."""
    for kind in owner.__mro__:
        method = vars(kind).get(function.__name__)
        if isinstance(method, types.FunctionType) and kind is not nn.Module:
            yield from _walk(method, owner, visited)
