"""Search for a term of `ops/_pattern.py` in a graph: all ways in which it matches a node, with their bindings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from transformer_kernels.ops._pattern import FLOATING, HOLE, As, Call, Either, Input, Number, Option, Steps, Term
from transformer_kernels.patching.graph._canonical import Canonical, Expr, fake, hint, is_tensor, name_of, number

COMMUTATIVE = ("add", "mul")
DEFERRED = ("permute", "unsqueeze", "not", "mul", "div")
"""Expressions that a replacement may receive: they become nodes again."""

TRANSPARENT = ("id", "cast")
"""Operations that are looked through: casts between floating dtypes and the identity."""


PRODUCTS = ("linear", "matmul", "addmm", "baddbmm", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d")
"""Operators whose operands autocast rounds."""

VIEWS = ("view", "reshape", "flatten", "transpose", "permute", "contiguous")
CASTS = ("to", "type_as", "type", "bfloat16", "half")


@dataclass(frozen=True)
class State:
    """Bindings so far and the nodes inside the match."""

    bound: dict[str, Any] = field(default_factory=dict)
    inner: tuple[fx.Node, ...] = ()
    hole: Any = None
    consumer: torch.dtype | None = None
    """Of the operation whose arguments are matched."""

    def bind(self, name: str, value: Any) -> State | None:
        if name in self.bound:
            return self if self.bound[name] is value or _equal(self.bound[name], value) else None
        return replace(self, bound={**self.bound, name: value})

    def enter(self, value: Any) -> State:
        return replace(self, inner=(*self.inner, value)) if isinstance(value, fx.Node) else self

    def below(self, value: Any) -> State:
        """Inside an operation."""
        return replace(self, consumer=fake(value).dtype) if is_tensor(value) else self


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, (fx.Node, Expr)) and type(a) is type(b) and bool(a == b)


@dataclass
class Found:
    """A place in a graph that a term describes; see `ops._pattern.Match`."""

    root: fx.Node
    bound: dict[str, Any]
    inner: tuple[fx.Node, ...]
    trains: bool
    backend: str | None
    is_written: Callable[[fx.Node], bool]
    """Whether the memory of a node is written to in place somewhere."""

    @property
    def is_auto(self) -> bool:
        """Whether the fastest is wanted, and not a named backend."""
        return self.backend is None

    def has_kernel(self, *dtypes: torch.dtype) -> bool:
        """Whether the backend computes in all of these dtypes."""
        known = (*FLOATING, torch.float64) if self.backend == "torch" else FLOATING
        return all(dtype in known for dtype in dtypes)

    def fake(self, name: str) -> Any:
        return shape_of(self.bound[name])

    @property
    def dtype(self) -> torch.dtype:
        return fake(self.root).dtype  # type: ignore[no-any-return]

    def shape(self, value: Any) -> Any:
        return shape_of(value)

    def size(self, *sizes: Any) -> int:
        return math.prod(hint(size) for size in sizes)

    def roundings(self, dtype: torch.dtype) -> list[fx.Node]:
        """The users of the result that round it to `dtype`: casts, operators whose operands autocast casts, views."""
        return [] if self.dtype is dtype else [user for user in self.root.users if rounds_input(user, dtype)]

    def uncast(self, value: Any) -> Any:
        """The input of the cast that computes this value, if only the dtype differs; else the value."""
        if not isinstance(value, fx.Node) or not is_cast(value):
            return value
        given: Any = value.args[0]
        if self.is_written(value) or self.is_written(given):
            return value
        without_gradient = self.trains and fake(given).requires_grad != fake(value).requires_grad
        return value if without_gradient else given


def rounds_input(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node rounds its input in float32 to `dtype`, or is a view of it that all users round."""
    if name_of(node) in VIEWS and is_tensor(node):
        return bool(node.users) and all(rounds_input(user, dtype) for user in node.users)
    if getattr(node.target, "rounds_under_autocast", False):
        return fake(node)[0].dtype is dtype  # type: ignore[no-any-return]
    return is_tensor(node) and fake(node).dtype is dtype and (name_of(node) in PRODUCTS or is_cast(node))


def is_cast(node: fx.Node) -> bool:
    """Whether a node only changes the dtype of its input."""
    return name_of(node) in CASTS and is_tensor(node.args[0]) and fake(node.args[0]).device == fake(node).device


def shape_of(value: Any) -> Any:
    """The fake tensor of a node, or of a view or a negation of one; None for other expressions."""
    if isinstance(value, Expr):
        inner = shape_of(value.args[0]) if value.op in DEFERRED else None
        moved = inner is not None and value.op in ("permute", "unsqueeze")
        return getattr(inner, value.op)(value.args[1]) if moved else inner
    return fake(value) if is_tensor(value) else None


class Matcher:
    """Matches terms against the canonical expressions of one graph."""

    def __init__(self, canonical: Canonical) -> None:
        self.canonical = canonical

    def search(self, term: Term, root: fx.Node) -> Iterator[State]:
        yield from self._match(term, root, State())

    def _match(self, term: Term, value: Any, state: State) -> Iterator[State]:
        if isinstance(term, Either):
            for alternative in term.terms:
                yield from self._match(alternative, value, state)
        elif isinstance(term, As):
            while (expression := self.canonical.of(value)).op == "id":
                value, state = expression.args[0], state.enter(value)
            if (bound := state.bind(term.name, value)) is not None:
                yield from self._match(term.term, value, bound)
        elif isinstance(term, Input):
            yield from self._input(term, value, state)
        elif isinstance(term, Number):
            constant = self.canonical.number(value)
            if term.symbolic and isinstance(fake(value), torch.SymFloat):
                yield from _given(state.bind(term.name, value))
            elif constant is not None and (term.least is None or constant >= term.least):
                yield from _given(state.bind(term.name, constant))
        elif isinstance(term, Option):
            yield from _given(state.bind(term.name, value))
        elif term is HOLE:
            yield replace(state, hole=value)
        elif isinstance(term, Steps):
            yield from self._steps(term, value, state, ())
        elif isinstance(term, Call):
            yield from self._call(term, value, state)

    def _input(self, term: Input, value: Any, state: State) -> Iterator[State]:
        deferred = isinstance(value, Expr) and shape_of(value) is not None
        if not deferred and not is_tensor(value):
            return
        if term.dims is not None and (deferred or fake(value).dim() != term.dims):
            return
        for spelling in self._spellings(value, term.name in state.bound):
            yield from _given(state.bind(term.name, spelling))

    def _spellings(self, value: Any, bound: bool) -> list[Any]:
        """The value itself and, if it must equal a bound one, the inputs of the casts that produced it."""
        found = [value]
        while bound and (expression := self.canonical.of(value)).op in TRANSPARENT:
            if rounds(value, expression, None):
                break
            value = expression.args[0]
            found.append(value)
        return found

    def _call(self, term: Call, value: Any, state: State) -> Iterator[State]:
        expression = self.canonical.of(value)
        state = state.enter(value)
        while expression.op in TRANSPARENT:
            if rounds(value, expression, state.consumer):
                return
            value = expression.args[0]
            expression, state = self.canonical.of(value), state.enter(value)
        for skipped in expression.via:
            state = state.enter(skipped)
        if expression.op != term.name or len(expression.args) != len(term.arguments):
            return
        state = state.below(value)
        orders = [expression.args]
        if term.name in COMMUTATIVE:
            orders.append(expression.args[::-1])
        for order in orders:
            yield from self._arguments(term.arguments, order, state)

    def _arguments(self, terms: tuple[Any, ...], values: tuple[Any, ...], state: State) -> Iterator[State]:
        if not terms:
            yield state
            return
        first, value = terms[0], values[0]
        if isinstance(first, Term):
            matches = self._match(first, value, state)
        else:
            matches = iter((state,)) if _is(first, value) else iter(())
        for match in matches:
            yield from self._arguments(terms[1:], values[1:], match)

    def _steps(self, term: Steps, value: Any, state: State, taken: tuple[Any, ...]) -> Iterator[State]:
        for found in self._match(term.base, value, state):
            yield from _given(found.bind(term.name, taken))
        for name, step in term.steps.items():
            for found in self._match(step, value, replace(state, bound={}, hole=None)):
                if found.hole is not None and found.hole is not value:
                    within = replace(found, bound=state.bound, hole=None)
                    yield from self._steps(term, found.hole, within, (*taken, (name, found.bound)))


def rounds(value: Any, expression: Expr, consumer: torch.dtype | None) -> bool:
    """Whether a cast rounds to a dtype that is narrower than both its input and its consumer."""
    if expression.op != "cast":
        return False
    before, after = fake(expression.args[0]).dtype, fake(value).dtype
    narrows = torch.promote_types(before, after) is not after
    return narrows and (consumer is None or torch.promote_types(consumer, after) is not after)


def _given(state: State | None) -> Iterator[State]:
    if state is not None:
        yield state


def _is(expected: float, value: Any) -> bool:
    """Whether a value is the expected number up to rounding."""
    return number(value) is not None and abs(value - expected) <= 1e-6 * max(1.0, abs(expected))
