"""In-place operators of a graph: made functional if the graph owns the memory, so that patterns match values.

Dynamo's fake tensors share storage exactly as the real ones will. A tensor in memory that the graph allocates, of which
no other alias is read after a write, is a variable: the write makes its next value, and later readers read that one.
Other writes (to inputs, to a part that is read as a whole) stay as they are, and no match contains a value of such a
storage.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from transformer_kernels.patching.graph._canonical import fake, is_tensor, name_of, number

FUNCTIONAL = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
KNOWN = ("masked_fill_", "add_", "sub_", "mul_", "div_", "pow_", "relu_", "sigmoid_", "tanh_", "sqrt_", "rsqrt_",
         "neg_", "square_", "clamp_", "exp_")  # fmt: skip
"""In-place methods whose functional form has the same name without the last character."""

KEY = "transformer_kernels_in_place"


def name_assignments(graph: fx.Graph, regions: dict[fx.Node, int]) -> None:
    """Assignments of a number to elements, x[index] = -inf, as `masked_fill_`; of all elements to themselves, removed.

    x[:] += y is three operators: a view of all elements, an addition in place, and an assignment of the sum.
    """
    for node in list(graph.nodes):
        target = node.args[0] if node.target in (operator.getitem, operator.setitem) else None
        if not isinstance(target, fx.Node) or not is_tensor(target):
            continue
        value = node if node.target is operator.getitem else node.args[2]
        if is_tensor(value) and _is_alias(fake(value), fake(target)):
            if target.op == "placeholder" or len({regions[each] for each in (node, value, target)}) > 1:
                continue  # a view without a gradient is another value
            if value is node:
                node.replace_all_uses_with(target)
            graph.erase_node(node)
        elif value is not node and number(value) is not None and fake(target).is_floating_point():
            with graph.inserting_before(node):
                index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
                if (mask := _chosen(graph, target, index)) is not None:
                    filled = graph.call_method("masked_fill_", (target, mask, value))
                    filled.meta["example_value"] = fake(target)
                    graph.erase_node(node)


def _chosen(graph: fx.Graph, target: fx.Node, index: tuple[Any, ...]) -> fx.Node | None:
    """A bool mask, which broadcasts to the target, of the elements at an index of one mask or of constant positions."""
    every = len(index)
    while every and index[every - 1] not in (Ellipsis, slice(None)):
        every -= 1
    given, dims = index[every:], fake(target).dim()
    if (
        any(item not in (Ellipsis, slice(None)) for item in index[:every])
        or not given
        or not all(map(is_tensor, given))
    ):
        return None
    kept = dims - sum(fake(item).dim() if fake(item).dtype is torch.bool else 1 for item in given)
    if kept != every if Ellipsis not in index else kept < every - 1:
        return None
    if len(given) == 1 and fake(given[0]).dtype is torch.bool:
        return given[0]
    sizes = fake(target).shape[kept:]
    if not all(isinstance(size, int) for size in sizes) or not all(_is_constant(item) for item in given):
        return None
    made = []
    for function, shape in ((torch.zeros, sizes), (torch.ones, ())):
        made.append(
            graph.call_function(function, (tuple(shape),), {"dtype": torch.bool, "device": fake(target).device})
        )
        made[-1].meta["example_value"] = fake(target).new_empty(shape, dtype=torch.bool)
    mask = graph.call_method("index_put", (made[0], tuple(given), made[1]))
    mask.meta["example_value"] = fake(target).new_empty(sizes, dtype=torch.bool)
    return mask


def _is_constant(node: fx.Node) -> bool:
    """Whether a tensor of integers depends on sizes alone."""
    if node.op not in ("call_function", "call_method") or getattr(fake(node), "dtype", None) is torch.bool:
        return False
    return name_of(node) in ("triu_indices", "tril_indices", "arange") or all(map(_is_constant, node.all_input_nodes))


class Writes:
    """The in-place writes of a graph; `restore` undoes the changes that no match has removed."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._positions = {node: index for index, node in enumerate(graph.nodes)}
        self._storages: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for storage in _storages(fake(node)):
                self._storages.setdefault(storage, []).append(node)
        self._unsafe: dict[int, list[int]] = {}
        self._changed: list[fx.Node] = []
        self._sharing: dict[fx.Node, list[fx.Node]] = {}
        self.unknown: list[int] = []
        for node in list(graph.nodes):
            if writes(node):
                self._write(node)
            elif _may_write(node):
                self.unknown.append(self._positions[node])

    def _write(self, node: fx.Node) -> None:
        target = _target(node)
        if self._is_variable(node, target):
            readers = [user for user in target.users if self._positions.get(user, -1) > self._positions[node]]
            for user in readers:
                user.replace_input_with(target, node)
            node.meta[KEY] = node.target
            _make_functional(node)
            self._changed.append(node)
            self._sharing[node] = [view for storage in _storages(fake(node)) for view in self._storages[storage]]
            return
        for storage in _storages(fake(target)):
            self._unsafe.setdefault(storage, []).append(self._positions[node])
        if not _storages(fake(target)):
            self.unknown.append(self._positions[node])

    def _is_variable(self, node: fx.Node, target: Any) -> bool:
        known = node.target in FUNCTIONAL if node.op == "call_function" else node.target in KNOWN
        value = fake(target)
        if not known or not isinstance(value, Tensor) or not isinstance(fake(node), Tensor):
            return False
        others = [operand for operand in node.all_input_nodes if isinstance(fake(operand), Tensor)]
        if any(fake(other).dtype not in (value.dtype, torch.bool) for other in others):
            return False  # an in-place operator computes in the target's dtype
        sharing = [view for storage in _storages(value) for view in self._storages[storage]]
        earlier = [view for view in sharing if self._positions[view] < self._positions[node]]
        first = min(earlier, key=lambda view: self._positions[view])
        if first.op not in ("call_function", "call_method"):
            return False
        return all(view is target or not self._is_read_after(view, node) for view in earlier)

    def _is_read_after(self, view: fx.Node, write: fx.Node) -> bool:
        return any(self._positions.get(user, -1) > self._positions[write] for user in view.users)

    def touches(self, node: fx.Node) -> bool:
        """Whether a node's memory is written to in place somewhere in the graph."""
        return any(storage in self._unsafe for storage in _storages(fake(node)))

    def escapes(self, node: fx.Node) -> bool:
        """Whether a node's memory is returned, or passed to a function that may keep it or write to it."""
        sharing = (view for storage in _storages(fake(node)) for view in self._storages[storage])
        return any(user.op == "output" or _may_write(user) for view in (node, *sharing) for user in view.users)

    def between(self, node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
        """Whether a node's memory may change after `first` and before `last`."""
        begin, end = self.position(first), self.position(last)
        positions = [*self.unknown]
        for storage in _storages(fake(node)):
            positions += self._unsafe.get(storage, [])
        return any(begin < position < end for position in positions)

    def position(self, node: fx.Node) -> int:
        return self._positions[node]

    def place(self, node: fx.Node, at: fx.Node) -> None:
        """A new node runs where an original one ran."""
        self._positions[node] = self._positions[at]

    def after(self, node: fx.Node, root: fx.Node) -> bool:
        """Whether a node's memory is written to in place after `root`, other than by what `restore` may leave out."""
        last = self.position(root)
        return any(place > last for storage in _storages(fake(node)) for place in self._unsafe.get(storage, []))

    def restore(self, keepers: frozenset[fx.Node]) -> None:
        """In-place operators again, where no later node reads the value before the write.

        Args:
            keepers: nodes that keep their inputs for the backward pass.
        """
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        for node in self._changed:
            if node not in order:
                continue
            target = node.args[0]
            assert isinstance(target, fx.Node)
            sharing = self._sharing[node]
            whole = target in sharing and all(view in order and keepers.isdisjoint(view.users) for view in sharing)
            earlier = [view for view in sharing if self._positions[view] < self._positions[node]]
            if whole and all(order[user] <= order[node] for view in earlier for user in view.users):
                node.target = node.meta.pop(KEY)


def _storages(value: Any) -> list[int]:
    if isinstance(value, (tuple, list)):
        return [storage for item in value for storage in _storages(item)]
    if not isinstance(value, Tensor):
        return []
    try:
        return [value.untyped_storage()._cdata]
    except (NotImplementedError, RuntimeError):
        return []


def _is_alias(value: Tensor, other: Tensor) -> bool:
    """The same elements in the same memory."""
    alike = _storages(value) == _storages(other) != [] and value.requires_grad == other.requires_grad
    return alike and _is_whole(value, other)


def _is_whole(value: Any, other: Tensor) -> bool:
    """The same elements, as far as is known without a guard."""
    if not isinstance(value, Tensor) or value.dim() != other.dim() or value.dtype is not other.dtype:
        return False
    pairs = (*zip(value.shape, other.shape, strict=True), *zip(value.stride(), other.stride(), strict=True))
    return all(str(a) == str(b) for a, b in pairs) and str(value.storage_offset()) == str(other.storage_offset())


def _target(node: fx.Node) -> Any:
    if "out" in node.kwargs:
        return node.kwargs["out"]
    return node.args[0] if node.args else node.kwargs.get("input")


def writes(node: fx.Node) -> bool:
    """Whether an operator writes to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node) or ""
    name = name or str(getattr(node.target, "__name__", ""))
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True:
        return True
    if name in ("dropout", "alpha_dropout", "feature_dropout") and len(node.args) > 3 and node.args[3] is True:
        return True
    if len(node.args) > 1 and node.args[1] is True and name in ("relu", "silu", "relu6", "selu", "mish", "hardtanh"):
        return True
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _may_write(node: fx.Node) -> bool:
    """Functions that are not torch's and receive tensors: custom operators, higher-order operators, submodules."""
    if node.op == "call_module":
        return True
    return node.op == "call_function" and name_of(node) is None and bool(node.all_input_nodes)


def _make_functional(node: fx.Node) -> None:
    if node.op == "call_function":
        node.target = FUNCTIONAL[node.target]  # type: ignore[index]
    else:
        node.target = str(node.target)[:-1]
