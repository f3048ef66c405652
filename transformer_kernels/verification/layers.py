"""Which module of a model a call belongs to, in the forward and in the backward pass."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

MAX_MARKS = 100_000
COMPILED = "_orig_mod."
"""The prefix that torch.compile adds to paths in a module."""

_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node


def without_prefix(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(path, module or parameter), with the path that it has without torch.compile."""
    return ((path.replace(COMPILED, ""), owner) for path, owner in named)


class Layers:
    """The paths of the modules that run, from global hooks, while this context is entered.

    Autograd numbers its nodes in the order of the forward pass; a node of the backward pass belongs to the module that
    ran when its number was given.
    """

    def __init__(self) -> None:
        self._running: list[str] = []
        self._paths: dict[int, str] = {}  # of the modules of the outermost one that runs, by id
        self._named: dict[int, str] = {}
        self._known: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._numbers: list[int] = []
        self._marked: list[str] = []

    def __enter__(self) -> Layers:
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def name(self, model: nn.Module) -> None:
        """Name the modules of a model by their paths in it, also where one of them is called alone."""
        self._model = model  # alive, so that its ids are
        self._named |= {id(module): path for path, module in without_prefix(model.named_modules()) if path}

    def path_of(self, parameter: Tensor) -> str:
        """The path of a parameter in the named model, or in a module that has been called; else its shape."""
        named = [self._model] if self._named else []
        for model in (*named, *self._known):
            for path, found in without_prefix(model.named_parameters()):
                if found is parameter:
                    return path
        return f"a tensor of {tuple(parameter.shape)}"

    def current(self) -> tuple[str, bool]:
        """The path of the module, "" where none runs, and whether this is the backward pass."""
        node = _current_node()
        if node is None:
            return (self._running[-1] if self._running else ""), False
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._marked[index] if index >= 0 else ""), True

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._running:
            if module not in self._known:
                name = type(module).__name__
                layers = without_prefix(module.named_modules())
                self._known[module] = {id(layer): path or name for path, layer in layers}
            self._paths = self._known[module]
        path = self._named.get(id(module)) or self._paths.get(id(module), type(module).__name__)
        self._running.append(path)
        self._mark()

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling() and self._running:
            self._running.pop()
            self._mark()

    def _mark(self) -> None:
        """From the next number on, nodes belong to the innermost module."""
        number = _sequence_number()
        if self._numbers and number < self._numbers[-1]:  # of another thread
            return
        if len(self._numbers) >= MAX_MARKS:
            del self._numbers[: MAX_MARKS // 2], self._marked[: MAX_MARKS // 2]
        self._numbers.append(number)
        self._marked.append(self._running[-1] if self._running else "")
