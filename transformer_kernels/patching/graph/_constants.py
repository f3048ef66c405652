"""Parts of a graph that depend on buffers and sizes alone: masks, tables of angles. They are computed once.

The result is stored with the identity and the version of the buffers, and computed again when one of them has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from transformer_kernels.ops._plan import dispatch_modes
from transformer_kernels.patching.graph._canonical import fake, is_plain, name_of
from transformer_kernels.patching.graph._writes import Writes

CREATED = """
    ones zeros full arange eye tril triu tril_indices triu_indices tensor as_tensor scalar_tensor linspace ones_like
    zeros_like full_like new_ones new_zeros new_full new_tensor
"""
COMPUTED = """
    add sub rsub mul div floor_divide remainder pow neg abs sqrt rsqrt reciprocal square exp log cos sin polar outer
    ger clamp minimum maximum sum cumsum eq ne lt le gt ge not and or logical_xor any all masked_fill where
"""
ARRANGED = """
    getitem index_put getattr size item view reshape flatten expand expand_as repeat repeat_interleave unsqueeze squeeze
    transpose permute movedim mT narrow select chunk split unbind cat stack view_as_complex view_as_real
"""
COPIED = "contiguous clone detach float half bfloat16 double bool int long to type type_as"
DETERMINISTIC = frozenset(f"{CREATED} {COMPUTED} {ARRANGED} {COPIED}".split())
"""Operators whose results depend on their arguments alone."""

MAX_STORED = 8
"""Results of one part, for different lengths."""


class Constants:
    """Which nodes of a graph are functions of buffers and sizes."""

    def __init__(self, graph: fx.Graph, writes: Writes) -> None:
        self._writes = writes
        self._leaves: dict[fx.Node, bool] = {}
        self._known: dict[fx.Node, bool] = {}
        for node in graph.nodes:
            self._known[node] = self._depends_on_constants(node)

    def _depends_on_constants(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return not isinstance(fake(node), Tensor) or _is_stored(node)
        if node.op == "get_attr":
            return isinstance(fake(node), Tensor)
        if node.op not in ("call_function", "call_method") or name_of(node) not in DETERMINISTIC:
            return False
        if self._writes.touches(node):
            return False
        return all(self._known.get(operand, False) for operand in node.all_input_nodes)

    def holds(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and self._known.get(node, False)

    def number(self, node: fx.Node) -> float | None:
        """The value of a tensor of one element that depends on no buffer and no size, or None."""
        if not self.holds(node) or any(leaf.op == "placeholder" for leaf in self.leaves(node)):
            return None
        if fake(node).device.type == "meta":
            return None
        with torch.no_grad():
            value = self.function((node,), self.leaves(node))()
        value = value[0]
        return float(value) if value.numel() == 1 and not value.is_complex() else None

    def leaves(self, *nodes: fx.Node) -> list[fx.Node]:
        """The placeholders that the nodes depend on."""
        return [node for node in self._below(nodes) if node.op == "placeholder"]

    def _below(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            if node not in found:
                for operand in node.all_input_nodes:
                    visit(operand)
                found[node] = None

        for node in nodes:
            visit(node)
        return list(found)

    def function(self, nodes: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> Callable[..., tuple[Any, ...]]:
        """leaves -> the values of the nodes."""
        part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for index, leaf in enumerate(leaves):
            copies[leaf] = part.placeholder(f"leaf_{index}")
        for node in self._below(nodes):
            if node not in copies:
                copies[node] = part.node_copy(node, lambda operand: copies[operand])
        part.output(tuple(copies[node] for node in nodes))
        owner = nodes[0].graph.owning_module if nodes else None
        return fx.GraphModule(owner if owner is not None else torch.nn.Module(), part).forward  # type: ignore[no-any-return]


def _is_stored(node: fx.Node) -> bool:
    """Whether an input is a tensor of a module, neither trained nor part of the batch."""
    value = fake(node)
    argument = node.meta.get("grapharg")
    if value.requires_grad or argument is None or not is_plain(value):
        return False
    return "NNModule" in repr(getattr(argument, "source", ""))


class Stored:
    """A function of buffers and sizes, whose results are kept while the buffers are unchanged."""

    def __init__(self, part: Callable[..., tuple[Any, ...]], finish: Callable[..., Any]) -> None:
        self._part, self._finish = part, finish
        self._results: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __call__(self, *leaves: Any) -> Any:
        if dispatch_modes() or any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
            return self._computed(leaves)  # replays of a recorded step do so too; writes in inference are not counted
        key = tuple(
            [(id(leaf), leaf.data_ptr(), leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        )
        found = self._results.get(key)
        if found is None:
            if len(self._results) >= MAX_STORED:
                self._results.clear()
            result = self._computed(leaves)
            found = self._results[key] = (leaves, result)  # the leaves stay alive, and with them their identity
        return found[1]

    def _computed(self, leaves: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            return self._finish(*self._part(*leaves))
