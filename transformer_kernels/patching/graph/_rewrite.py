"""One pass over a graph of torch calls, which searches for patterns and replaces the matches."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from transformer_kernels.ops._pattern import As, Call, Either, Pattern, Prepared, Replacement, Steps, Term
from transformer_kernels.ops.activation._pattern import PATTERNS as ACTIVATIONS
from transformer_kernels.ops.attention._pattern import PATTERNS as ATTENTIONS
from transformer_kernels.ops.loss._pattern import PATTERNS as LOSSES
from transformer_kernels.ops.norm._pattern import PATTERNS as NORMS
from transformer_kernels.ops.rotary._pattern import PATTERNS as ROTARY
from transformer_kernels.patching.graph._calls import PATTERNS as CALLS
from transformer_kernels.patching.graph._canonical import Canonical, Expr, fake, name_of
from transformer_kernels.patching.graph._checkpoint import checkpointed_parts
from transformer_kernels.patching.graph._constants import DETERMINISTIC, Constants, Stored
from transformer_kernels.patching.graph._encoder_layer import PATTERNS as ENCODER_LAYERS
from transformer_kernels.patching.graph._equal import forget_values, merge_equal
from transformer_kernels.patching.graph._match import TRANSPARENT, VIEWS, Found, Matcher, is_cast, shape_of
from transformer_kernels.patching.graph._multi_head import PATTERNS as MULTI_HEAD
from transformer_kernels.patching.graph._rules import OVERRIDES, RULES
from transformer_kernels.patching.graph._unpad import maskings
from transformer_kernels.patching.graph._writes import Writes, name_assignments, writes

PATTERNS: tuple[Pattern, ...] = (
    *ATTENTIONS, *MULTI_HEAD, *ENCODER_LAYERS, *ROTARY, *NORMS, *ACTIVATIONS, *LOSSES, *CALLS,
)  # fmt: skip

NAMED = {"sdpa": "attention", "mha": "attention"} | {
    name: name for name in ["softmax", "encoder_layer", "layer_norm", "rms_norm", "gelu", "silu", "cross_entropy"]
}
"""Operations that are reported if they are left to PyTorch."""

UNUSED = DETERMINISTIC | RULES.keys() - {"dropout"}
"""Operators without side effects, removed if their result is unused, such as averages of weights."""


@dataclass
class Outcome:
    """Matches in one graph: counts by operation, and reasons by (operation, name of the node)."""

    matched: dict[str, int] = field(default_factory=dict)
    left: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, part: Outcome) -> None:
        """Add the matches in a part of the graph."""
        for operation, count in part.matched.items():
            self.count(operation, count)
        self.left.update(part.left)

    def count(self, operation: str, by: int = 1) -> None:
        count = self.matched.pop(operation, 0) + by
        if count:
            self.matched[operation] = count


def roots(term: Term) -> frozenset[str]:
    """The canonical operations at which a term can match."""
    if isinstance(term, Either):
        return frozenset(name for part in term.terms for name in roots(part))
    if isinstance(term, As):
        return roots(term.term)
    if isinstance(term, Steps):
        return roots(term.base).union(*(roots(step) for step in term.steps.values()))
    return frozenset((term.name,)) if isinstance(term, Call) else frozenset()


def rewrite(graph_module: fx.GraphModule, trains: bool, backend: str | None = None, unpad: bool = False) -> Outcome:
    """Replace matches of the patterns in place; returns the matches.

    Args:
        graph_module: a graph of torch calls with Dynamo's fake tensors.
        trains: whether autograd records it.
        backend: computes every match, whatever its size; None for the fastest, PyTorch's own functions included.
        unpad: leave out padding.
    """
    if (reason := _transformed(graph_module.graph)) is not None:
        return Outcome(left={("the graph", ""): reason})
    parts = [rewrite(part, trains, backend, unpad) for part in checkpointed_parts(graph_module)]
    outcome = Rewriter(graph_module.graph, trains, backend).run(unpad)
    for part in parts:
        outcome.add(part)
    graph_module.graph.lint()
    graph_module.recompile()
    return outcome


class Rewriter:
    """The state of one pass over one graph."""

    def __init__(self, graph: fx.Graph, trains: bool, backend: str | None = None) -> None:
        self.graph, self.trains, self.backend, self.outcome = graph, trains, backend, Outcome()
        self.created: set[fx.Node] = set()
        forget_values(graph)
        name_assignments(graph, _regions(graph))
        self._erase([node for node in reversed(graph.nodes) if name_of(node) in UNUSED and not writes(node)])
        _drop_casts(graph)
        self.regions = _regions(graph)
        self.writes = Writes(graph)
        merge_equal(graph, self.writes, self.regions)
        self.constants = Constants(graph, self.writes)
        self.canonical = Canonical(self.constants.number, RULES, OVERRIDES)
        self.matcher = Matcher(self.canonical)
        self.prepared: dict[Any, fx.Node] = {}
        self.own: dict[fx.Node, tuple[str, str]] = {}

    def run(self, unpad: bool = False) -> Outcome:
        for pattern in PATTERNS:
            names = roots(pattern.term)
            for node in reversed(list(self.graph.nodes)):
                if not node._erased:
                    expression = self.canonical.of(node).op
                    if expression in names and self.own.get(node, ("",))[0] != pattern.operation:
                        self._try(pattern, node)
        if unpad:
            self._unpad()
        self.writes.restore(frozenset(self.created) if self.trains or unpad else frozenset())
        self._report()
        present = {node.name for node in self.graph.nodes}
        self.outcome.left = {key: reason for key, reason in self.outcome.left.items() if key[1] in present}
        return self.outcome

    def _unpad(self) -> None:
        for found in maskings(self.graph, self._is_fixed):
            found.rewrite(lambda function, args, root=found.mask: self._call(function, args, {}, root, None))
            self.outcome.count("without padding")

    def _is_fixed(self, node: fx.Node, root: fx.Node) -> bool:
        """Whether a node cannot run elsewhere, or not as `root` does."""
        known = _is_pure(node) or node in self.created or node.op == "get_attr"
        return not known or self.writes.touches(node) or self.regions.get(node) != self.regions.get(root)

    def _try(self, pattern: Pattern, root: fx.Node) -> None:
        reason = None
        for state in self.matcher.search(pattern.term, root):
            found = Found(root, state.bound, state.inner, self.trains, self.backend, self.writes.touches)
            reason = self._obstacle(pattern, found)
            if reason is None:
                replacement = pattern.replace(found)
                if isinstance(replacement, Replacement) and not self._may_round(found, replacement):
                    replacement = "a rounded copy of it is written to, returned, or made in another context"
                if isinstance(replacement, Replacement):
                    self._replace(pattern, found, replacement)
                    return
                reason = replacement
        if reason:
            self.outcome.left[(pattern.operation, root.name)] = reason

    def _obstacle(self, pattern: Pattern, found: Found) -> str | None:
        """Why the nodes of a match cannot be taken out of the graph."""
        inner = set(found.inner)
        shared = found.bound.get(pattern.shared)
        first = min(inner, key=self.writes.position)
        for node in inner:
            if self.regions.get(node) != self.regions.get(found.root):
                return "autocast or the gradient mode changes inside it"
            if self.writes.touches(node):
                return "a value inside it is written to in place"
            if (
                node in (found.root, shared)
                or self.constants.holds(node)
                or self._is_transparent(node, inner - {shared})
            ):
                continue
            if any(user not in inner for user in node.users):
                return f"the value {node.name} inside it is used elsewhere too"
        for leaf in _nodes(found.bound):
            if leaf not in inner and self.writes.between(leaf, first, found.root):
                return f"its input {leaf.name} is written to in place"
            if self.trains and self.writes.after(leaf, found.root):
                return f"its input {leaf.name}, which is kept for the backward pass, is written to later"
        return None

    def _is_transparent(self, node: fx.Node, inner: set[Any]) -> bool:
        """Whether a node is a cast or a copy of an input of the match, which may be used elsewhere too."""
        while node in inner and (expression := self.canonical.of(node)).op in TRANSPARENT:
            node = expression.args[0]
        return node not in inner

    def _replace(self, pattern: Pattern, found: Found, replacement: Replacement) -> None:
        root, shared = found.root, found.bound.get(pattern.shared)
        place = root
        if isinstance(shared, fx.Node):
            place = shared
            latest = max(
                (self.writes.position(value) for value in _nodes([replacement.args, replacement.options])), default=-1
            )
            if latest > self.writes.position(shared) and not self._moves(replacement, shared):
                self.outcome.left[(pattern.operation, root.name)] = "its parameters are computed after the sum"
                return
        with self.graph.inserting_before(place):
            args = tuple(self._argument(value, place) for value in replacement.args)
            options = {name: self._argument(value, place) for name, value in replacement.options.items()}
            if self.backend is not None:
                options["backend"] = self.backend
            value = fake(root) if replacement.dtype is None else fake(root).to(replacement.dtype)
            new = self._call(replacement.function, args, options, place, value)
            result = new
            if replacement.rounded is not None:
                result = self._rounded(found, replacement.rounded, new, place)
            elif isinstance(shared, fx.Node):
                result = self._call(operator.getitem, (new, 0), {}, place, fake(root))
            if isinstance(shared, fx.Node):
                second = self._call(operator.getitem, (new, 1), {}, place, fake(shared))
                shared.replace_all_uses_with(second)
                self.canonical.replace(shared, second, Expr("opaque", ()))
            if replacement.permuted is not None:
                result = self._call(torch.permute, (result, replacement.permuted), {}, place, fake(root))
        root.replace_all_uses_with(result)
        expression = Expr("opaque", ())
        if replacement.expression is not None:
            name, *values = replacement.expression
            expression, self.own[result] = Expr(name, tuple(values)), (name, pattern.operation)
        self.canonical.replace(root, result, expression)
        self._erase([root, *found.inner])
        self.outcome.count(pattern.operation)
        for node in dict.fromkeys(found.inner):
            if node in self.own:  # a part that was an operation of its own
                self.outcome.count(self.own[node][1], -1)
        self.outcome.left.pop((pattern.operation, root.name), None)

    def _may_round(self, found: Found, replacement: Replacement) -> bool:
        """Whether all users that round the result can read one rounded tensor."""
        dtype, readers = replacement.rounded or replacement.dtype, list[fx.Node]()
        waiting = [] if dtype is None else found.roundings(dtype)
        while waiting:
            node = waiting.pop()
            if self.regions.get(node) != self.regions.get(found.root):
                return False  # a cast without a gradient is another value
            if name_of(node) in VIEWS:
                waiting += node.users
            else:
                readers.append(node)
        copies = [node for node in readers if is_cast(node)]
        return len(readers) < 2 or not any(self.writes.touches(node) or self.writes.escapes(node) for node in copies)

    def _rounded(self, found: Found, dtype: torch.dtype, new: fx.Node, place: fx.Node) -> fx.Node:
        """The first result of `new`; the users of the match that round it receive the third one."""
        root = found.root
        narrow = self._call(operator.getitem, (new, 2), {}, place, fake(root).to(dtype))
        for user in found.roundings(dtype):
            if is_cast(user):
                user.replace_all_uses_with(narrow)
                self.canonical.replace(user, narrow, Expr("opaque", ()))
                self.graph.erase_node(user)
            else:
                user.replace_input_with(root, narrow)
                self._narrow_view(user, dtype)
        self.canonical.forget_users(narrow)
        return self._call(operator.getitem, (new, 0), {}, place, fake(root)) if root.users else narrow

    def _narrow_view(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Change the dtype of a view, and of views of it."""
        if name_of(node) in VIEWS:
            node.meta["example_value"] = fake(node).to(dtype)
            self.canonical.forget_users(node)
            for user in node.users:
                self._narrow_view(user, dtype)

    def _moves(self, replacement: Replacement, place: fx.Node) -> bool:
        """Move the nodes that compute the arguments before `place`; False if they depend on it or may not move."""
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        late: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> bool:
            if node in late or order[node] < order[place]:
                return True
            same = name_of(node) in DETERMINISTIC and self.regions.get(node) == self.regions.get(place)
            if node is place or not same or self.writes.touches(node) or not all(map(visit, node.all_input_nodes)):
                return False
            late[node] = None
            return True

        if not all(map(visit, _nodes([replacement.args, replacement.options]))):
            return False
        for node in late:
            place.prepend(node)
            self.writes.place(node, place)
        return True

    def _call(
        self, function: Any, args: tuple[Any, ...], options: dict[str, Any], place: fx.Node, value: Any
    ) -> fx.Node:
        name = getattr(function, "__name__", None) or type(function).__name__.lower()
        target = function if hasattr(function, "__name__") else function.__call__
        node = self.graph.create_node("call_function", target, args, options, name)
        node.meta["example_value"] = value
        self.created.add(node)
        self.writes.place(node, place)
        self.regions[node] = self.regions.get(place, 0)
        return node

    def _argument(self, value: Any, place: fx.Node) -> Any:
        """An argument as a node: expressions become operators again."""
        if isinstance(value, Prepared):
            return self._prepare(value, place)
        if not isinstance(value, Expr):
            return value
        arguments = tuple(self._argument(operand, place) for operand in value.args)
        return self._call(_operator(value), arguments, {}, place, shape_of(value))

    def _prepare(self, prepared: Prepared, place: fx.Node) -> fx.Node:
        known = (prepared.function, prepared.values)
        nodes = list(_nodes(prepared.values))
        if any(self.writes.touches(node) for node in nodes):
            return self._call(
                prepared.function, tuple(self._argument(value, place) for value in prepared.values), {}, place, None
            )
        if known not in self.prepared or self.prepared[known]._erased:
            if all(self.constants.holds(node) for node in nodes):
                node = self._store(prepared, nodes)
            else:
                after = max(nodes, key=self.writes.position)
                with self.graph.inserting_after(after):
                    anchor = self.graph.call_function(operator.pos, (0,))
                with self.graph.inserting_before(anchor):
                    args = tuple(self._argument(value, after) for value in prepared.values)
                    node = self._call(prepared.function, args, {}, after, None)
                self.graph.erase_node(anchor)
            self.prepared[known] = node
        return self.prepared[known]

    def _store(self, prepared: Prepared, nodes: list[fx.Node]) -> fx.Node:
        leaves = self.constants.leaves(*nodes)
        part = self.constants.function(nodes, leaves)
        function = Stored(part, Finish(prepared, nodes))
        first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        with self.graph.inserting_before(first):
            return self._call(function, tuple(leaves), {}, first, None)

    def _erase(self, nodes: list[fx.Node]) -> None:
        """Remove nodes that nothing uses any more, and what only they used."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node._erased or not self._is_unused(node):
                continue
            waiting.extend(node.all_input_nodes)
            self.graph.erase_node(node)
        # a node may have become unused after it was looked at
        again = [node for node in nodes if not node._erased and self._is_unused(node)]
        if again:
            self._erase(again)

    def _is_unused(self, node: fx.Node) -> bool:
        """Whether the graph computes the same without a node; a replacement may be part of another one."""
        return not node.users and (_is_pure(node) or node in self.created)

    def _report(self) -> None:
        """Name what stays PyTorch's."""
        for node in self.graph.nodes:
            if node.op in ("call_function", "call_method") and node not in self.created:
                what = NAMED.get(self.canonical.of(node).op)
                if what is not None:
                    self.outcome.left.setdefault((what, node.name), "it is not part of a pattern that is recognised")


class Finish:
    """A prepared function applied to the values of its nodes."""

    def __init__(self, prepared: Prepared, nodes: list[fx.Node]) -> None:
        self._function = prepared.function
        self._values = tuple(_slotted(value, nodes) for value in prepared.values)

    def __call__(self, *values: Any) -> Any:
        return self._function(*(_evaluated(value, values) for value in self._values))


@dataclass(frozen=True)
class _Slot:
    index: int


def _slotted(value: Any, nodes: list[fx.Node]) -> Any:
    """A value whose nodes are numbered."""
    if isinstance(value, Expr):
        return Expr(value.op, tuple(_slotted(argument, nodes) for argument in value.args))
    return _Slot(nodes.index(value)) if isinstance(value, fx.Node) else value


def _evaluated(value: Any, values: tuple[Any, ...]) -> Any:
    if isinstance(value, _Slot):
        return values[value.index]
    if isinstance(value, Expr):
        return _operator(value)(_evaluated(value.args[0], values), *value.args[1:])
    return value


def _operator(value: Expr) -> Any:
    """torch's function of a deferred expression."""
    return getattr(torch, {"not": "logical_not"}.get(value.op, value.op))


def _nodes(value: Any) -> Iterator[fx.Node]:
    """All nodes in a nest of bindings, expressions and arguments."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _nodes(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def _drop_casts(graph: fx.Graph) -> None:
    """Remove casts to the dtype that a tensor has, which return the tensor itself."""
    for node in list(graph.nodes):
        if not is_cast(node) or fake(node).dtype is not fake(node.args[0]).dtype:
            continue
        others = [*node.args[1:], *node.kwargs.values()]
        if not any(isinstance(value, (bool, torch.memory_format)) for value in others):  # no copy is asked for
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    name = name_of(node)
    return node.op in ("call_function", "call_method") and name is not None and not name.endswith("_")


def _transformed(graph: fx.Graph) -> str | None:
    """Why a graph as a whole is left alone."""
    names = [str(getattr(node.target, "__name__", "")) for node in graph.nodes if node.op == "call_function"]
    if torch._C._are_functorch_transforms_active() or any("increment_nesting" in name for name in names):
        return "it contains a transform of torch.func"
    return None


def _regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The nodes between two changes of autocast or of the gradient mode have one number."""
    found, number = dict[fx.Node, int](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and ("autocast" in name or "grad_enabled" in name or "inference" in name):
            number += 1
        found[node] = number
    return found
