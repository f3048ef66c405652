"""Equal computations of a graph become one: masks that each layer derives alike are prepared once for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from transformer_kernels.patching.graph._canonical import fake, is_plain, is_tensor, name_of
from transformer_kernels.patching.graph._constants import DETERMINISTIC
from transformer_kernels.patching.graph._writes import Writes


def forget_values(graph: fx.Graph) -> None:
    """Replace arguments of which only dtype or shape are read, as in mask.expand_as(scores) and x.type_as(scores)."""
    for node in graph.nodes:
        like = node.args[-1] if node.args else None
        value = fake(node)
        if not is_tensor(like) or not is_plain(value) or node.kwargs:
            continue
        name, sizes = name_of(node), tuple(value.shape)
        if name in ("type_as", "to") and len(node.args) == 2 and fake(node.args[0]).device == value.device:
            node.op, node.target, node.args = "call_method", "to", (node.args[0], value.dtype)
        elif not all(isinstance(size, int) for size in sizes):
            continue
        elif name in ("expand_as", "view", "reshape") and len(node.args) == 2:
            node.op, node.target, node.args = "call_method", str(name).removesuffix("_as"), (node.args[0], sizes)
        elif name in ("ones_like", "zeros_like") and value.is_contiguous():
            node.target, node.args = getattr(torch, name.removesuffix("_like")), (sizes,)
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def merge_equal(graph: fx.Graph, writes: Writes, regions: dict[fx.Node, int]) -> None:
    """Replace a node by an earlier one with the same operator and arguments, if they are indistinguishable.

    Only values without a gradient, in memory that is never written to and that does not leave the graph.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or name_of(node) not in DETERMINISTIC:
            continue
        value = fake(node)
        if not isinstance(value, Tensor) or value.requires_grad:
            continue
        if writes.escapes(node) or any(writes.touches(operand) for operand in (node, *node.all_input_nodes)):
            continue
        first = known.setdefault((node.op, node.target, regions[node], _key((node.args, node.kwargs))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(value: Any) -> Any:
    """Arguments as a hashable value; 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    if isinstance(value, slice):
        return slice, _key((value.start, value.stop, value.step))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
