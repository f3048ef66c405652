"""Rotary positions as they are written by hand: by halves of the columns, or by pairs next to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops._pattern import SMALL, Call, Input, Match, Pattern, Prepared, Replacement, Term
from transformer_kernels.ops.rotary import pairs, rotary

X, COS, SIN = Input("x"), Input("cos"), Input("sin")


def _half(index: int) -> Call:
    return Call("half", X, index)


def _alternate(index: int) -> Call:
    return Call("alternate", X, index)


def _negative(term: Term) -> Call:
    return Call("mul", term, -1.0)


WHOLE = (X * COS) + (Call("cat_last", _negative(_half(1)), _half(0)) * SIN)
WHOLE_PAIRS = (X * COS) + (Call("pairs", _negative(_alternate(1)), _alternate(0)) * SIN)
"""cos and sin have all columns, those of one pair equal."""


def _first(a: Term, b: Term) -> Term:
    return (a * COS) - (b * SIN)


def _second(a: Term, b: Term) -> Term:
    return (b * COS) + (a * SIN)


HALVES = Call("cat_last", _first(_half(0), _half(1)), _second(_half(0), _half(1)))
BACKWARDS = Call("cat_last", (_half(0) * COS) + (_half(1) * SIN), _negative(_half(0) * SIN) + (_half(1) * COS)) | Call(
    "cat_last", (_half(0) * COS) + (_half(1) * SIN), (_half(1) * COS) - (_half(0) * SIN)
)
"""By the negative angle."""

PAIRS = Call("pairs", _first(_alternate(0), _alternate(1)), _second(_alternate(0), _alternate(1)))

PHASE = Input("phase")
COMPLEX = Call("real_pairs", Call("as_complex", X) * PHASE)
COMPLEX_HALVES = Call("real_halves", Call("as_complex_halves", X) * PHASE)

MIN_ELEMENTS = 1 << 14
"""Elements from which one pass is faster than several of PyTorch's."""


class Tables(NamedTuple):
    """cos and sin of a graph as tables (L, R / 2) or (B, L, R / 2); None where the two columns of a pair differ or
    are not read, as in a recorded step.

    Args:
        axis: of the positions, in tables that are laid out as x.
        whole: they have all columns.
        interleaved: the columns of a pair are next to each other.
        sign: of the angle.
    """

    axis: int
    whole: bool
    interleaved: bool
    sign: float

    def __call__(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        tables = [self._table(tensor) for tensor in (cos, sin)]
        if self.whole:
            columns = [pairs(table, table.shape[-1] // 2, self.interleaved) for table in tables]
            if is_traced(cos) or not all(torch.equal(*both) for both in columns):
                return None
            tables = [first for first, _ in columns]
        wide = torch.promote_types(tables[0].dtype, torch.float32)  # exact; x may have any dtype
        cos, sin = (table.to(wide).contiguous() for table in tables)
        return cos, sin if self.sign > 0 else -sin

    def _table(self, table: Tensor) -> Tensor:
        """(L, columns) or (B, L, columns)."""
        table = table[(None,) * (4 - table.dim())]
        table = table.select(3 - self.axis, 0)  # the axis of the heads
        return table[0] if table.shape[0] == 1 else table


class Phases(NamedTuple):
    """`Tables` of complex numbers cos + i sin."""

    axis: int

    def __call__(self, phase: Tensor) -> tuple[Tensor, Tensor] | None:
        return Tables(self.axis, False, True, 1.0)(phase.real, phase.imag)


class Rotate(NamedTuple):
    """One rotation of the graph."""

    axis: int
    interleaved: bool
    whole: bool
    sign: float
    dtype: torch.dtype

    def __call__(
        self, x: Tensor, cos: Any, sin: Any, tables: tuple[Tensor, Tensor] | None, backend: str | None = None
    ) -> Tensor:
        if x.dim() == 3:  # one head
            return self(x.unsqueeze(1), cos, sin, tables, backend).squeeze(1)
        if tables is None:
            first, second = pairs(x, x.shape[-1] // 2, self.interleaved)
            both = (-second, first)
            swapped = torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
            return (x * cos + swapped * sin).to(self.dtype)
        x = x if x.dtype is self.dtype else x.to(self.dtype)
        heads = x if self.axis == 2 else x.transpose(1, 2)
        out = rotary(heads, heads[:, :0], *tables, interleaved=self.interleaved, backend=backend)[0]
        return out if self.axis == 2 else out.transpose(1, 2)


def _replace(whole: bool, interleaved: bool, sign: float = 1.0) -> Any:
    def replace(match: Match) -> Replacement | str:
        bound, x, cos, sin = match.bound, match.fake("x"), match.fake("cos"), match.fake("sin")
        if x.dim() not in (3, 4) or not match.has_kernel(x.dtype, match.dtype) or str(cos.shape) != str(sin.shape):
            return "its input is not (B, H, L, D) or (B, L, D) of a dtype with a kernel"
        if torch.promote_types(x.dtype, match.dtype) is not match.dtype or cos.requires_grad or sin.requires_grad:
            return "its dtype is narrower than the input's, or its table has a gradient"
        if str(cos.shape[-1] * (1 if whole else 2)) != str(x.shape[-1]):
            return "its table does not have the columns of the input"
        axis = _axis_or_reason(match, x, cos)
        if isinstance(axis, str):
            return axis
        rounded = x.dtype is not match.dtype and len(match.roundings(x.dtype)) == len(match.root.users)
        dtype = x.dtype if rounded else match.dtype
        rotate = Rotate(axis, interleaved, whole, sign, dtype)
        tables = Prepared(Tables(axis, whole, interleaved, sign), (bound["cos"], bound["sin"]))
        return Replacement(rotate, (bound["x"], bound["cos"], bound["sin"], tables), dtype=dtype)

    return replace


def _by_phase(interleaved: bool) -> Any:
    def replace(match: Match) -> Replacement | str:
        x, phase = match.fake("x"), match.fake("phase")
        if x.dim() != 4 or not match.has_kernel(x.dtype) or x.dtype is not match.dtype or phase.requires_grad:
            return "its input is not (B, H, L, D) of a dtype with a kernel, or its table has a gradient"
        if not phase.is_complex() or str(phase.shape[-1] * 2) != str(x.shape[-1]):
            return "its table does not have the columns of the input"
        axis = _axis_or_reason(match, x, phase)
        if isinstance(axis, str):
            return axis
        values = (match.bound["x"], None, None, Prepared(Phases(axis), (match.bound["phase"],)))
        return Replacement(Rotate(axis, interleaved, False, 1.0, match.dtype), values)

    return replace


def _axis_or_reason(match: Match, x: Any, table: Any) -> int | str:
    """The axis of positions in x, or why it is left to PyTorch."""
    axis = _axis(x, table)
    if axis is None:
        return "its table does not broadcast over heads alone"
    is_small = match.is_auto and match.size(*x.shape) < MIN_ELEMENTS // (2 if match.trains else 1)
    return SMALL if is_small else axis


def _axis(x: Any, table: Any) -> int | None:
    """The axis of positions in x (B, H, L, D) or (B, L, H, D), seen from a table that broadcasts to it."""
    shape = (*(1,) * (4 - table.dim()), *table.shape)
    if x.dim() == 3:
        return 2 if str(shape[:-1]) == str((1, 1, x.shape[1])) and str(x.shape[1]) != "1" else None
    for axis, heads in ((2, 1), (1, 2)):
        positions = str(shape[axis]) == str(x.shape[axis]) and shape[heads] == 1 and str(x.shape[axis]) != "1"
        if positions and str(shape[0]) in ("1", str(x.shape[0])):
            return axis
    return None


PATTERNS = (
    Pattern("rotary", WHOLE, _replace(True, False)),
    Pattern("rotary", WHOLE_PAIRS, _replace(True, True)),
    Pattern("rotary", HALVES, _replace(False, False)),
    Pattern("rotary", BACKWARDS, _replace(False, False, -1.0)),
    Pattern("rotary", PAIRS, _replace(False, True)),
    Pattern("rotary", COMPLEX, _by_phase(True)),
    Pattern("rotary", COMPLEX_HALVES, _by_phase(False)),
)
