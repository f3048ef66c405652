"""Terms: patterns of an operation's computation, searched for in a graph of torch calls.

A pattern is an expression over canonical operations ("mul", "softmax", "masked_fill", ...), written with Python's
operators. It is defined next to the operation that replaces it, in `ops/<family>/_pattern.py`; `patching/graph` does
the search. Sums and products match in either order. Casts between floating dtypes and operators that return their input
(`contiguous`, dropout in evaluation mode) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from transformer_kernels.ops._crossovers import prefers_torch

FLOATING = (torch.float32, torch.float16, torch.bfloat16)


class Term:
    """A part of a description."""

    def __add__(self, other: Any) -> Call:
        return Call("add", self, other)

    def __sub__(self, other: Any) -> Call:
        return Call("sub", self, other)

    def __mul__(self, other: Any) -> Call:
        return Call("mul", self, other)

    def __truediv__(self, other: Any) -> Call:
        return Call("div", self, other)

    def __or__(self, other: Term) -> Either:
        return Either(*getattr(self, "terms", (self,)), *getattr(other, "terms", (other,)))


class Call(Term):
    """A canonical operation of terms; numbers among the arguments must be equal."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments


class Input(Term):
    """Any tensor, bound to a name; wherever the name occurs again, the same tensor.

    Args:
        name: of the binding.
        dims: the number of axes; any unless given.
    """

    def __init__(self, name: str, dims: int | None = None) -> None:
        self.name, self.dims = name, dims


class Number(Term):
    """A number that is known when the graph is compiled, bound to a name.

    Args:
        name: of the binding.
        least: which it is not below.
        symbolic: it may also be a node for a Python float that is known when the graph runs.
    """

    def __init__(self, name: str, least: float | None = None, symbolic: bool = False) -> None:
        self.name, self.least, self.symbolic = name, least, symbolic


class Option(Term):
    """A value of any kind (a number, a symbol, None, a tensor), bound to a name."""

    def __init__(self, name: str) -> None:
        self.name = name


class As(Term):
    """A term whose value is bound to a name."""

    def __init__(self, name: str, term: Term) -> None:
        self.name, self.term = name, term


class Either(Term):
    """The first of several terms that matches."""

    def __init__(self, *terms: Term) -> None:
        self.terms = terms


class Steps(Term):
    """Any sequence of steps above a base, bound as a list of (step, its bindings), outermost first.

    Args:
        name: of the binding.
        base: the operand of the innermost step.
        steps: a term of HOLE by the name of the step.
    """

    def __init__(self, name: str, base: Term, steps: dict[str, Term]) -> None:
        self.name, self.base, self.steps = name, base, steps


class _Hole(Term):
    pass


HOLE = _Hole()
"""The operand of a step."""


def maybe(wrap: Callable[[Term], Term], inner: Term) -> Either:
    """wrap(inner) or inner."""
    return wrap(inner) | inner


class Match(Protocol):
    """A place in a graph that a term describes."""

    root: Any
    bound: dict[str, Any]
    trains: bool
    """Whether autograd records the graph."""
    is_auto: bool
    """Whether the fastest is wanted, and not a named backend."""

    def has_kernel(self, *dtypes: torch.dtype) -> bool:
        """Whether the backend computes in all of these dtypes."""

    def fake(self, name: str) -> Any:
        """The tensor without values that is bound to a name."""

    def shape(self, value: Any) -> Any:
        """The tensor without values of a bound value, or None."""

    def size(self, *sizes: Any) -> int:
        """The product of sizes, of the call that is compiled where they are symbols."""

    def roundings(self, dtype: torch.dtype) -> list[Any]:
        """The users of the result that round it to `dtype`: casts, and operators whose operands autocast casts."""

    def uncast(self, value: Any) -> Any:
        """The input of the cast that computes this value, if only the dtype differs; else the value."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""


class Prepared(NamedTuple):
    """An argument that is computed from masks once for all calls that share them, and stored where they are constant.

    Args:
        function: hashable; from the tensors to the argument.
        values: nodes.
    """

    function: Any
    values: tuple[Any, ...]


class Expr(NamedTuple):
    """A canonical operation; its arguments are nodes, further expressions and constants."""

    op: str
    args: tuple[Any, ...]
    via: tuple[Any, ...] = ()
    """Nodes between it and its arguments."""


class Replacement(NamedTuple):
    """The call that replaces a match.

    Args:
        function: a function of this package or torch's.
        args, options: of the call; nodes in place of tensors.
        expression: the result as a canonical operation, for later patterns.
        permuted: the order of axes in which the result is returned, or None.
        rounded: the dtype of a third result, the first one rounded, for the users that round it; or None.
        dtype: of the result, where all users round it, or None.
    """

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 - never written
    expression: tuple[Any, ...] | None = None
    permuted: tuple[int, ...] | None = None
    rounded: torch.dtype | None = None
    dtype: torch.dtype | None = None


class Pattern(NamedTuple):
    """A description and its replacement.

    Args:
        operation: that replaces it, as the report names it.
        term: the description.
        replace: match -> the replacement, or why it is left alone, which the report names unless it is "".
        shared: the bound inner value that is the second result of the function, "" where there is none.
    """

    operation: str
    term: Term
    replace: Callable[[Any], Replacement | str]
    shared: str = ""


SMALL = "below the size from which our kernel is the faster one"


def is_faster(match: Any, name: str, like: Any) -> bool:
    """Whether the kernel of a row of the table of crossovers is faster than PyTorch's, for the size of `like`."""
    if not match.is_auto or not like.is_cpu:
        return True
    return not prefers_torch(name, match.size(*like.shape), like.dtype.itemsize, recorded=match.trains)


def result_dtype(match: Match, name: str) -> torch.dtype | None:
    """The dtype in which an operation of the input `name` computes so that its result loses nothing; None: none."""
    given, wanted = match.fake(name).dtype, match.dtype
    return torch.promote_types(given, wanted) if match.has_kernel(given, wanted) else None
