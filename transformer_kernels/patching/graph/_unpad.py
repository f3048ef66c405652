"""Graphs in which padding is left out between the first value of tokens and the last (`compile(model, unpad=True)`).

Values of tokens are traced through operators that act on each token alone, from the queries, keys and values of
attention with a mask of keys. Where they enter, real tokens are packed into one row; where they leave, padding becomes
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from transformer_kernels import ops
from transformer_kernels.ops._foreign import foreign
from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops.attention._pattern import LARGE, Fused, Known
from transformer_kernels.ops.norm._by_std import std_norm
from transformer_kernels.ops.norm._pattern import layer_norm_as, rms_norm_as
from transformer_kernels.patching._products import by_columns, faster_linear
from transformer_kernels.patching._real_tokens import RealTokens, zeroed
from transformer_kernels.patching.graph import _calls
from transformer_kernels.patching.graph._canonical import fake, is_same, is_tensor, name_of
from transformer_kernels.patching.graph._multi_head import USED, multi_head_attention

Axes = tuple[int, int]
"""Where batches and tokens are among the axes of a value, counted from the last."""

POINTWISE = frozenset((
    "add", "sub", "mul", "div", "neg", "relu", "gelu", "tanh", "sigmoid", "silu", "erf", "exp", "square", "pow", "sqrt",
    "rsqrt", "clamp", "dropout", "contiguous", "clone", "float", "half", "bfloat16", "double", "to", "type", "type_as",
))  # fmt: skip
BY_ROWS = frozenset(("linear", "layer_norm", "rms_norm", "softmax"))
OURS_POINTWISE = frozenset((ops.gelu, ops.swiglu, ops.geglu, _calls.dropout))
OURS_BY_ROWS = frozenset((
    ops.linear, ops.layer_norm, ops.rms_norm, ops.add_layer_norm, ops.add_rms_norm, faster_linear, by_columns, std_norm,
    layer_norm_as, rms_norm_as, _calls.autocast_linear, _calls.linear_by_columns,
))  # fmt: skip
"""Operators of each element, and of the last axis and parameters of at most two axes."""

VIEWS = frozenset(("view", "reshape", "flatten", "unflatten"))


class Packing(NamedTuple):
    """The real tokens (B, L) of a batch, None where they are not known; packed, or None where all are computed."""

    real: Tensor | None
    tokens: RealTokens | None

    @property
    def bounds(self) -> Tensor | None:
        return None if self.tokens is None else self.tokens.bounds


def packing(mask: Any, x: Tensor, axes: Axes) -> Packing:
    """The packing of a batch, from the mask of an attention and a value of all tokens."""
    real = _real(mask, *(x.shape[axis] for axis in axes))
    return Packing(real, None if real is None else RealTokens.of(real, x.shape[-1]))


def _real(mask: Any, batch: int, length: int) -> Tensor | None:
    """The keys (B, L) that every query of a sequence sees; None where queries see other ones."""
    if isinstance(mask, Known):
        mask = mask.bias if mask.is_exact and mask.empty is None else None
    if mask is None or mask.requires_grad or is_traced(mask) or foreign(mask) is not None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    keys = mask[:, :1, :1]
    if mask.shape[-1] != length or not bool((mask == keys).all()):
        return None
    visible = keys
    if mask.dtype is not torch.bool:
        visible = keys == 0.0
        if not bool((visible | (keys <= LARGE)).all()):
            return None
    return visible[:, 0, 0].expand(batch, length)


def padding_as_mask(padding: Tensor) -> Tensor:
    """The padding (B, S) of torch.nn.MultiheadAttention as a mask of scaled_dot_product_attention."""
    return (~padding if padding.dtype is torch.bool else padding)[:, None, None]


def known(mask: Known, given: Packing) -> Known:
    """The bounds of packed sequences in place of a mask."""
    return mask if given.tokens is None else Known(None, (), True, bounds=given.bounds)


def attention(
    given: Packing, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, p: float, causal: bool, *,
    scale: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of packed sequences, else of padded ones."""
    if given.tokens is None:
        return _calls.attention(q, k, v, mask, p, causal, scale=scale, **options)
    return ops.attention(  # type: ignore[return-value]
        q, k, v, cu_seqlens=given.bounds, dropout_p=p, scale=scale, backend=options.get("backend")
    )


def packed(x: Tensor, given: Packing, axes: Axes) -> Tensor:
    """Values of all tokens -> those of the real ones, as one sequence."""
    if given.tokens is None:
        return x
    return given.tokens.packed(x.movedim(axes, (0, 1))).movedim((0, 1), axes)


def restored(x: Tensor, given: Packing, axes: Axes) -> Tensor:
    """Values of the real tokens -> those of all, 0 at padding."""
    if given.real is None:
        return x
    x = x.movedim(axes, (0, 1))
    rows = x.reshape(*x.shape[:2], -1)
    rows = zeroed(rows, given.real) if given.tokens is None else given.tokens.padded(rows)
    return rows.reshape(*rows.shape[:2], *x.shape[2:]).movedim((0, 1), axes)


def reshaped(x: Tensor, kept: int, sizes: tuple[int, ...]) -> Tensor:
    """A view that keeps the first axes."""
    return x.reshape(*x.shape[:kept], *sizes)


class Unpadding:
    """The values of tokens around the attentions of one mask.

    Args:
        mask: the node of the mask.
        attentions: the nodes of attention with it.
        is_fixed: (node, attention) -> whether the node cannot run elsewhere, or not as the attention does.
    """

    def __init__(self, mask: fx.Node, attentions: list[fx.Node], is_fixed: Callable[[fx.Node, fx.Node], bool]) -> None:
        self.mask, self.attentions, self._is_fixed = mask, attentions, is_fixed
        self.graph = mask.graph
        self.axes: dict[fx.Node, Axes] = {}
        self.sources: list[fx.Node] = []

    def trace(self) -> bool:
        """Find the values; False where they cannot be packed."""
        waiting = [(node, (-2, -3) if _is_joined(node) else (-4, -2)) for node in self.attentions]
        while waiting:
            node, axes = waiting.pop()
            if node in self.axes:
                if self.axes[node] != axes:
                    return False
                continue
            self.axes[node] = axes
            operands = self._operands(node, axes)
            if operands is None:
                self.sources.append(node)
            else:
                waiting.extend(operands.items())
        if any(node in self.sources for node in self.attentions) or not all(map(self._is_of_itself, self.attentions)):
            return False
        for node in self.graph.nodes:
            if node not in self.axes and node.op in ("call_function", "call_method"):
                self._extend(node)
        carried = [node for node in self.graph.nodes if node in self.axes and node not in self.sources]
        hoisted = _above(self.mask, carried[0])
        if any(node in carried or self._is_fixed(node, self.attentions[0]) for node in hoisted):
            return False
        tuples = (node for node in self.axes if isinstance(fake(node), (tuple, list)) or _is_pair(node))
        return all(user in self.axes for node in tuples for user in node.users)

    def _is_of_itself(self, attention: fx.Node) -> bool:
        """Whether queries, keys and values are those of the same tokens: made of the same values."""
        made_of = []
        for operand in attention.args[:3]:
            found, waiting = set[fx.Node](), [operand]
            while waiting:
                node: Any = waiting.pop()
                if node not in found:
                    found.add(node)
                    waiting.extend(() if node in self.sources else self._operands(node, self.axes[node]) or ())
            made_of.append(found.intersection(self.sources))
        return made_of[0] == made_of[1] == made_of[2]

    def _extend(self, node: fx.Node) -> None:
        """Take in what is made of the values, token by token."""
        for operand in node.all_input_nodes:
            if operand not in self.axes or (axes := _carried(node, operand, self.axes[operand])) is None:
                continue
            operands = self._operands(node, axes)
            if operands and all(self.axes.get(other, wanted) == wanted for other, wanted in operands.items()):
                self.axes[node] = axes
                for other, wanted in operands.items():
                    if other not in self.axes:
                        self.axes[other] = wanted
                        self.sources.append(other)
            return

    def _operands(self, node: fx.Node, axes: Axes) -> dict[fx.Node, Axes] | None:
        """The axes of the operands of a node that acts on each token alone and has these axes; None for others."""
        if node in self.attentions:
            q, k, v = node.args[:3]
            if _is_fused(node):
                return None if k in (q, v) else {q: axes, k: (-4, -1), v: axes}  # type: ignore[dict-item]
            return dict.fromkeys((q, k, v), axes)  # type: ignore[arg-type]
        if node.op not in ("call_function", "call_method") or self._is_fixed(node, self.attentions[0]):
            return None
        name, first = name_of(node), node.args[0] if node.args else None
        if name in POINTWISE or node.target in OURS_POINTWISE:
            return _aligned(node, axes, least=0)
        if name in BY_ROWS or node.target in OURS_BY_ROWS:
            return _aligned(node, axes, least=3) if -1 not in axes and _is_of_rows(node) else None
        if not isinstance(first, fx.Node):
            return None
        kept = _kept(node)
        if kept is None or (name in VIEWS and not all(isinstance(size, int) for size in _later(node, axes))):
            return None
        before = [kept[axis] for axis in axes if axis >= -len(kept)]
        return {first: (before[0], before[1])} if len(before) == 2 and None not in before else None  # type: ignore[dict-item]

    def rewrite(self, call: Callable[..., fx.Node]) -> None:
        """Pack the values.

        Args:
            call: (function, arguments) -> a new node, where the graph inserts.
        """
        carried = [node for node in self.graph.nodes if node in self.axes and node not in self.sources]
        first = carried[0]
        for node in _above(self.mask, first):
            first.prepend(node)
        source = next(node for node in self.sources if node in first.all_input_nodes)
        with self.graph.inserting_before(first):
            given = call(packing, (self._readable(call), source, self.axes[source]))
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        for node in self.sources:
            after = max(node, given, key=order.__getitem__)
            with self.graph.inserting_after(after):
                row = call(packed, (node, given, self.axes[node]))
            for user in list(node.users):
                if user in self.axes and user not in self.sources:
                    user.replace_input_with(node, row)
        for node in carried:
            self._adapt(node, given, call)
            outside = [user for user in node.users if user not in self.axes]
            outside += [user for user in node.users if user in self.sources]
            if outside:
                with self.graph.inserting_after(node):
                    whole = call(restored, (node, given, self.axes[node]))
                for user in outside:
                    user.replace_input_with(node, whole)

    def _readable(self, call: Callable[..., fx.Node]) -> fx.Node:
        joined = _is_joined(self.attentions[0])
        return call(padding_as_mask, (self.mask,)) if joined else self.mask

    def _adapt(self, node: fx.Node, given: fx.Node, call: Callable[..., fx.Node]) -> None:
        """Let a node compute as many tokens as it is given."""
        if node in self.attentions:
            if _is_joined(node):
                with self.graph.inserting_before(node):
                    node.kwargs = {**node.kwargs, "bounds": call(getattr, (given, "bounds"))}
            elif _is_fused(node):
                with self.graph.inserting_before(node):
                    node.args = (*node.args[:4], call(known, (self.mask, given)))
            else:
                node.args, node.target = (given, *node.args), attention
        elif name_of(node) in VIEWS:
            sizes = _later(node, self.axes[node])
            node.op, node.target, node.kwargs = "call_function", reshaped, {}
            node.args = (node.args[0], fake(node).dim() - len(sizes), sizes)


def _is_fused(node: fx.Node) -> bool:
    return isinstance(getattr(node.target, "__self__", None), Fused)


def _is_joined(node: fx.Node) -> bool:
    return node.target is multi_head_attention


def _later(node: fx.Node, axes: Axes) -> tuple[Any, ...]:
    """The sizes of the axes behind those of batches and tokens."""
    return tuple(fake(node).shape[fake(node).dim() + max(axes) + 1 :])


def _is_pair(node: fx.Node) -> bool:
    return node.target in (ops.add_layer_norm, ops.add_rms_norm, multi_head_attention)


def _is_of_rows(node: fx.Node) -> bool:
    """Whether softmax and norms of torch act on the last axis."""
    if (name := name_of(node)) not in ("softmax", "layer_norm", "rms_norm"):
        return True
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("normalized_shape"))
    return given in (-1, fake(node).dim() - 1) if name == "softmax" else len(given) == 1  # type: ignore[arg-type]


def _aligned(node: fx.Node, axes: Axes, least: int) -> dict[fx.Node, Axes] | None:
    """Operands with the tokens of a node at the same axes; others, of at least as many axes, are the same for all."""
    value = fake(node)
    found: dict[fx.Node, Axes] = {}
    for operand in node.all_input_nodes:
        if not is_tensor(operand) or fake(operand).dim() < least:
            continue
        shape = fake(operand).shape
        sizes = [shape[axis] if len(shape) >= -axis else 1 for axis in axes]
        if isinstance(value, Tensor) and all(map(is_same, sizes, (value.shape[axis] for axis in axes))):
            found[operand] = axes
        elif sizes != [1, 1]:
            return None
    return found or None


def _kept(node: fx.Node) -> list[int | None] | None:
    """The axis of the operand, counted from the last, for each axis of the result; None for axes that change."""
    name, operand = name_of(node), node.args[0]
    if not isinstance(operand, fx.Node):
        return None
    if name == "getitem" and (isinstance(fake(operand), (tuple, list)) or _is_pair(operand)):
        return list(range(-fake(node).dim(), 0)) if isinstance(fake(node), Tensor) else None
    if not is_tensor(operand):
        return None
    count = fake(operand).dim()
    every: list[int | None] = list(range(-count, 0))
    if name in VIEWS and isinstance(fake(node), Tensor) and fake(node).dtype is fake(operand).dtype:
        before, after = fake(operand).shape, fake(node).shape
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if not is_same(a, b)), None)
        same = min(len(before), len(after)) if same is None else same
        return [axis - count if axis < same else None for axis in range(len(after))]
    elif name == "transpose":
        first, second = (dim % count for dim in node.args[1:3])  # type: ignore[operator, union-attr]
        every[first], every[second] = every[second], every[first]
        return every
    elif name == "permute":
        dims: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return [dim % count - count for dim in dims]
    elif name in ("chunk", "split", "unbind", "select"):
        place = 1 if name in ("unbind", "select") else 2
        dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else 0)
        if isinstance(dim, int):
            every[dim % count] = None
            return every if place == 2 else [axis for axis in every if axis is not None]
    elif name == "getitem":
        return _indexed(node.args[1], every)
    return None


def _indexed(index: Any, every: list[int | None]) -> list[int | None] | None:
    """`_kept` of x[index], by numbers and slices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(entry, (int, slice)) and entry is not Ellipsis for entry in entries):
        return None
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (len(every) - len(entries) + 1)
    entries += [slice(None)] * (len(every) - len(entries))
    pairs = [(axis, entry) for axis, entry in zip(every, entries, strict=True) if isinstance(entry, slice)]
    return [axis if entry == slice(None) else None for axis, entry in pairs]


def _carried(node: fx.Node, operand: fx.Node, axes: Axes) -> Axes | None:
    """The axes of a node's result, of an operand's."""
    alike = name_of(node) in POINTWISE | BY_ROWS
    if alike or not node.args or operand is not node.args[0] or (kept := _kept(node)) is None:
        return axes
    found = [kept.index(axis) - len(kept) for axis in axes if axis in kept]
    return (found[0], found[1]) if len(found) == 2 else None


def _above(node: fx.Node, first: fx.Node) -> list[fx.Node]:
    """A node and what it is made of, as far as it comes after the first one."""
    order = {node: index for index, node in enumerate(node.graph.nodes)}
    found, waiting = set[fx.Node](), [node]
    while waiting:
        node = waiting.pop()
        if node not in found and order[node] > order[first]:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return sorted(found, key=order.__getitem__)


def maskings(graph: fx.Graph, is_fixed: Callable[[fx.Node, fx.Node], bool]) -> Iterator[Unpadding]:
    """The attentions of a graph by their masks, where they can be packed."""
    groups: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        mask = _mask(node)
        if isinstance(mask, fx.Node):
            groups.setdefault((mask, _is_joined(node)), []).append(node)
    for (mask, _), attentions in groups.items():
        found = Unpadding(mask, attentions, is_fixed)
        if found.trace():
            yield found


def _mask(node: fx.Node) -> Any:
    """The mask of an attention whose sequences can be packed."""
    if _is_joined(node):
        given = dict(zip(USED, node.args, strict=True))
        alone = given["attn_mask"] is None and not given["is_causal"]
        return given["key_padding_mask"] if alone else None
    if _is_fused(node):
        fused = node.target.__self__  # type: ignore[union-attr]
        simple = fused.fill <= LARGE and fused.heads is fused.windows is None and len(node.args) > 4
        return node.args[4] if simple and fake(node.args[2]).dim() == 4 else None
    if node.target is _calls.attention and not node.args[5]:
        return node.args[3]
    return None
