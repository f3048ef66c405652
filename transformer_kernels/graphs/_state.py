"""The state that a recorded step reads besides its arguments, and whether it has changed.

A replay does not run the function's Python. Each recording therefore has a `State`: the modules, tensors, optimizers
and plain values reachable from the function through its closure, object, globals and constants. Before each replay it
is compared by identity, in tens of microseconds; if an identity differs, the state is collected again and compared by
value.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

MANY = 1000
"""Elements of a container; larger containers are compared by identity and number of elements only."""

SIMPLE = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice}
TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
INTERNALS = set(vars(nn.Module())) - {"training"}
GLOBAL_HOOKS = [name for name in vars(nn_module) if name.startswith("_global_") and name.endswith("_hooks")]
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(path).parent) for path in (torch.__file__, Path(__file__).parent)),
    "<frozen",
)
LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL", "LOAD_NAME")
END = object()

_cell_contents, _code_of = attrgetter("cell_contents"), attrgetter("__code__", "__defaults__", "__kwdefaults__")
_hooks_of = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, PyTorch, this package or another installed one, and not to the user."""
    return file.startswith(LIBRARIES)


class State:
    """A snapshot of the state that a function can read besides its arguments.

    Args:
        roots: the function, and constant arguments, by their names in messages.
        optimizer: the optimizer that the function steps, if any.

    Attributes:
        tokens: for each path, such as "model.0.eps", the properties that a replay depends on.
        tensors: the tensors among them.
        written: paths that the function writes, which are not compared.
    """

    def __init__(self, roots: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        self.tokens: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.written: tuple[str, ...] = ()
        self._alive: dict[int, Any] = {}  # keeps identities from being reused
        self._visited: set[Any] = set()
        self._files = {_file(value) for value in roots.values()}
        # Compared before each replay
        self._has_gradients = optimizer is not None
        self._objects: dict[int, Any] = {}
        self._functions: dict[int, Any] = {}
        self._fields: list[tuple[Any, dict[str, Any]]] = []
        self._lookups: dict[int, tuple[Callable[[str], Any], set[str]]] = {}
        self._views: list[Any] = []
        self._empty: list[Any] = []
        self._tables: list[Any] = []
        self._cells: list[CellType] = []
        self._composed: dict[int, Tensor] = {}
        self._memory: dict[int, Tensor] = {}
        self._moments: dict[int, Tensor] = {}
        for name in GLOBAL_HOOKS:
            self._table(name, vars(nn_module)[name])
        if optimizer is not None:
            self._reach("optimizer", optimizer)
        for path, root in roots.items():
            self._reach(path, root)
        self._names = [(get, tuple(names)) for get, names in self._lookups.values()]
        self._tables += [table for _, table in self._fields]
        self._kept, self._numbers = tuple(self._identities()), [*self._counts()]

    def holds(self) -> bool:
        """Whether all objects and their memory have the same identity."""
        try:
            return (
                not any(self._empty)
                and all(map(is_, self._identities(), self._kept))
                and [*self._counts()] == self._numbers
            )
        except (AttributeError, KeyError, RuntimeError, ValueError):  # an attribute was removed, or is being changed
            return False

    def changes(self, now: State) -> list[str]:
        """The paths where two states differ, except those that the function writes."""
        paths = {path: None for path in (*self.tokens, *now.tokens) if self.tokens.get(path) != now.tokens.get(path)}
        return [path for path in paths if not f"{path}.".startswith(self.written)]

    def describe(self, path: str, now: State) -> str:
        """A message about the change at a path."""
        before, after = self.tokens.get(path), now.tokens.get(path)
        if before is None or after is None:
            return f"{path} was {'added' if before is None else 'removed'}"
        if all(isinstance(value, tuple) and isinstance(value[0], type) for value in (before, after)):
            return f"{path} was {before[1]} and is {after[1]}"
        return f"{path} was replaced"

    def _identities(self) -> Iterator[Any]:
        hooked = (*self._memory.values(), *self._composed.values()) if self._has_gradients else ()
        return chain(
            map(type, self._objects.values()),
            chain.from_iterable([get(table) for get, table in self._fields]),
            chain.from_iterable(map(_code_of, self._functions.values())),
            map(_cell_contents, self._cells),
            chain.from_iterable([map(get, names) for get, names in self._names]),
            chain.from_iterable(self._views),
            chain.from_iterable(map(_hooks_of, hooked)),
            (END,),  # so that a missing or additional identity is a difference
        )

    def _counts(self) -> Iterator[Any]:
        own = self._memory.values()
        return chain(
            map(len, self._tables),
            map(Tensor.data_ptr, own),
            map(Tensor.stride, own),
            map(Tensor.numel, own),
            map(Tensor.data_ptr, self._moments.values()),
        )

    # How values are reached

    def _reach(self, path: str, value: Any, names: Sequence[str] = ()) -> None:
        """Add a value. `names`: the chain of attributes that code reads; empty: any attribute may be read."""
        kind = type(value)
        if kind in SIMPLE:
            self.tokens[path] = (kind, repr(value))
        elif isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value, names)
        elif isinstance(value, ModuleType | type):
            self._named(path, value, names)
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self._callable(path, value, names)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(path, value)
        elif isinstance(value, torch.optim.Optimizer):
            if self._is_new(path, value):
                self._table(path, vars(value))
        elif isinstance(value, Enum) or not hasattr(value, "__dict__") or kind.__module__.startswith("torch."):
            self._is_new(path, value)
        elif names:
            self._named(path, value, names)
        elif self._is_new(path, value):
            self._objects[id(value)] = value
            self._table(path, vars(value))
            self._method(path, value, "__call__")

    def _is_new(self, path: str, value: Any) -> bool:
        """Add the object at a path; returns whether its contents have not been added yet."""
        self.tokens[path] = id(value), id(type(value))
        self._alive[id(value)] = value
        new = id(value) not in self._visited
        self._visited.add(id(value))
        return new

    def _tensor(self, path: str, tensor: Tensor) -> None:
        hooks = [table for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if table]
        new = self._is_new(path, tensor)
        self.tensors[path] = tensor
        parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        for name in parts:  # of a DTensor, which has no memory itself
            self._reach(f"{path}.{name}", getattr(tensor, name))
        try:
            memory = 0 if parts else tensor.data_ptr(), tensor.stride()
        except (RuntimeError, NotImplementedError):  # without storage: compared by identity
            return
        kept = [self._alive.setdefault(id(hook), hook) for table in hooks for hook in table.values()]
        self.tokens[path] = (memory, tensor.shape, tensor.dtype, tensor.requires_grad, *map(id, kept))
        if new:
            self._views += [table.values() for table in hooks]
            if parts:
                self._composed[id(tensor)] = tensor
                return
            (self._moments if path.startswith("optimizer.state[") else self._memory)[id(tensor)] = tensor

    def _table(self, path: str, table: dict[str, Any]) -> None:
        """Attributes or hooks."""
        self._watch(table)
        for name, value in list(table.items()):
            self._reach(f"{path}.{name}", value)

    def _watch(self, values: Any) -> None:
        if not values:
            self._empty.append(values)
        else:
            self._views.append(values.values() if isinstance(values, dict) else values)

    def _container(self, path: str, value: Any) -> None:
        if not self._is_new(path, value):
            return
        if len(value) > MANY and not path.startswith("optimizer."):
            self._tables.append(value)
            return
        self._watch(value)
        if isinstance(value, set | frozenset):
            self._alive.update((id(item), item) for item in value)
            self.tokens[path] = frozenset(map(id, value))
            return
        if isinstance(value, dict) and value:
            self._views.append(value)
        for number, item in enumerate(list(value.items() if isinstance(value, dict) else value)):
            key, item = item if isinstance(value, dict) else (number, item)
            self._reach(f"{path}[{key!r}]" if type(key) in SIMPLE else f"{path}[{number}]", item)

    def _module(self, path: str, module: nn.Module, names: Sequence[str]) -> None:
        if self._is_new(path, module):
            table = vars(module)
            own = [name for name in table if name not in INTERNALS]
            self._objects[id(module)] = module
            self._fields.append((itemgetter(*TABLES, *own), table))
            for name in TABLES:
                self._table(path, table[name])
            for name in HOOKS:
                self._table(f"{path}.{name}", table[name])
            for name in own:
                self._reach(f"{path}.{name}", table[name])
            self._method(path, module, "forward")
        if names:
            self._method(path, module, names[0])

    def _named(self, path: str, owner: Any, names: Sequence[str]) -> None:
        """Add an attribute of an object, a class or a Python module, with the chain of attributes read from it."""
        self.tokens[path] = id(owner), id(type(owner))
        self._alive[id(owner)] = owner
        if not names:
            return
        if isinstance(owner, type):
            self._method(path, owner, *names)
            return
        if not isinstance(owner, ModuleType):
            self._objects[id(owner)] = owner
        name, *rest = names
        table = vars(owner)
        self._look_up(owner, table, name)
        if name in table:
            self._reach(f"{path}.{name}", table[name], rest)
        elif not isinstance(owner, ModuleType):
            self._method(path, owner, name, *rest)

    def _look_up(self, owner: Any, table: Any, name: str) -> None:
        self._lookups.setdefault(id(owner), (table.get, set()))[1].add(name)

    def _method(self, path: str, owner: Any, name: str, *rest: str) -> None:
        """Add class attributes of a name, following the user's methods, including those called through `super()`."""
        for kind in (owner if isinstance(owner, type) else type(owner)).__mro__[:-1]:
            if kind is nn.Module:
                return
            self._alive[id(kind)] = kind
            self._look_up(kind, vars(kind), name)
            if name not in vars(kind):
                continue
            found = vars(kind)[name]
            found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
            self._reach(f"{path}.{kind.__name__}.{name}", found, rest)
            if isinstance(found, FunctionType):
                self._follow(found, owner, path)

    def _callable(self, path: str, value: Any, names: Sequence[str] = ()) -> None:
        new = self._is_new(path, value)
        if names and isinstance(value, FunctionType):
            self._named(path, value, names)
        if isinstance(value, functools.partial):
            if new:
                self._reach(path, value.func)
                self._reach(f"{path}.args", value.args)
                self._reach(f"{path}.keywords", value.keywords)
        elif isinstance(value, MethodType):
            owner = value.__self__
            if isinstance(owner, nn.Module | torch.optim.Optimizer):
                self._reach("self", owner)
            self._follow(value.__func__, owner, "self")
        else:
            self._follow(value)

    def _follow(self, function: Any, owner: Any = None, path: str = "") -> None:
        """Add the objects named in a function's code: closure variables, globals, defaults, and its object."""
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None or (code, id(owner)) in self._visited:
            return
        if is_library(code.co_filename) and code.co_filename not in self._files:
            return
        self._visited.add((code, id(owner)))
        self._functions[id(function)] = function
        parts = _code_of(function)
        self.tokens[f"{path}.{function.__qualname__}"] = tuple(map(id, parts))
        self._alive.update((id(item), item) for item in parts)
        self._watch(function.__kwdefaults__)
        known: dict[str, tuple[str, Any]] = {}
        positional = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
        for name, value in (defaults | (function.__kwdefaults__ or {})).items():
            known[name] = name, value
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                known[name] = name, cell.cell_contents
            except ValueError:  # an unassigned variable
                continue
            self._cells.append(cell)
        if owner is not None and positional:
            known[positional[0]] = path, owner
        for name, *names in _chains(code):
            if name not in known and name in function.__globals__:
                self._look_up(function.__globals__, function.__globals__, name)
                known[name] = name, function.__globals__[name]
            if name in known:
                self._reach(*known[name], names)


def _file(root: Any) -> str:
    """The file of a root's code, which is followed even if it belongs to a library."""
    while isinstance(root, functools.partial):
        root = root.func
    root = inspect.unwrap(root)
    code = getattr(root, "__code__", None) or getattr(type(root).__call__, "__code__", None)
    return "" if code is None else code.co_filename


@functools.lru_cache(maxsize=4096)
def _chains(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The chains of names that code reads: ("self", "model") for `self.model(x)`."""
    found: list[tuple[str, ...]] = []
    current: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and current:
            current.append(step.argval)
        elif step.opname not in ("COPY", "DUP_TOP", "PUSH_NULL", "EXTENDED_ARG"):
            if current and not (step.opname == "STORE_ATTR" and len(current) == 1):  # a store is not a read
                found.append(tuple(current))
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            loads = any(load in step.opname for load in LOADS)  # Python 3.13 combines two loads
            found += [(name,) for name in names[:-1] if loads]
            current = [names[-1]] if loads else []
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += _chains(inner)
    return tuple(dict.fromkeys(found))
