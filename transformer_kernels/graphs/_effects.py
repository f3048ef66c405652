"""Operators whose schema does not declare their effects: collectives, and operators of other libraries.

A recording repeats such an operator as a call, whatever it returned when it was captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

DECLARED = {"aten", "prims"}
"""Namespaces whose schemas declare every write. PyTorch tests this for `aten`."""

COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
"""Namespaces of operators that may return before their results are complete."""

COMPLETED_BY_WAITING = {"c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_"}
"""Operators whose handle copies the result when the caller waits, in gloo, from a buffer of that call."""

ANNOTATIONS = {"profiler"}
"""Namespaces of operators that a replay need not repeat."""

ALIASES = {
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::lift",
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::wait_tensor",  # a recording waits before the first call that uses the tensor
    "c10d_functional::wait_tensor",
}
"""Operators that only return the memory of an argument, which their schema does not declare."""


def is_declared(function: Any) -> bool:
    """Whether an operator has no effects besides those in its schema."""
    return function.namespace in DECLARED


def only_views(function: Any) -> bool:
    """Whether an operator computes nothing."""
    return (function.is_view and not function._schema.is_mutable) or function._schema.name in ALIASES


def host_result(function: Any) -> str:
    """The type of a result that is neither a tensor nor the handle of a collective; empty if there is none."""
    kinds = [str(returned.type) for returned in function._schema.returns]
    return next((kind for kind in kinds if "Tensor" not in kind and not kind.endswith(".c10d.Work")), "")


def plain(values: Any) -> list[Tensor]:
    """The tensors in a nesting of lists, tuples and dicts; for a tensor subclass the tensors that it consists of."""
    found = []
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and hasattr(leaf, "__tensor_flatten__"):
            found += plain([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def completed(result: Any) -> Any:
    """The result of a collective after waiting for it, with handles for which the caller need not wait."""
    from torch._C._distributed_c10d import FakeWork

    def waited(value: Any) -> Any:
        if not (isinstance(value, torch.ScriptObject) and hasattr(value, "wait")):
            return value
        value.wait()
        return FakeWork().boxed()  # type: ignore[attr-defined]

    return pytree.tree_map(waited, result)


class Repeated:
    """A call of an operator, which a replay repeats in two parts, so that a collective overlaps the work in between.

    Args:
        function: the operator.
        inputs, options: its arguments.
        result: of its first call, which has not necessarily completed.
        kept: tensors on the memory of `result`, or None for what has the memory of an argument.
    """

    def __init__(self, function: Any, inputs: Any, options: Any, result: Any, kept: list[Tensor | None]) -> None:
        self._function, self._inputs, self._options, self._kept = function, inputs, options, kept
        self._result = result

    def start(self) -> None:
        """Call the operator."""
        self._result = self._function(*self._inputs, **self._options)

    def finish(self, *, waited: bool = False) -> None:
        """Wait until the call has completed, and copy its results to where later calls read them.

        Args:
            waited: whether the caller has waited; gloo's handle of a message never returns a second time.
        """
        result, self._result = self._result, None
        found = plain(result)
        for tensor in [] if waited else pytree.tree_leaves(result):
            if isinstance(tensor, torch.ScriptObject) and hasattr(tensor, "wait"):
                tensor.wait()
        for old, new in zip(self._kept, found, strict=True):
            if self._function.namespace in COLLECTIVES:
                torch.ops._c10d_functional.wait_tensor(new)
            if old is None:
                continue
            if old.shape != new.shape:
                was, now = tuple(old.shape), tuple(new.shape)
                raise RuntimeError(f"{self._function._schema.name} returned shape {was} at the capture and now {now}")
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
