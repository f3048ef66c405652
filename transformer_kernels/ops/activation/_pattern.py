"""GELU in its spellings, and gates."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from transformer_kernels.ops import activation
from transformer_kernels.ops._pattern import FLOATING, Call, Either, Input, Match, Option, Pattern, Replacement, Term

X = Input("x")
CUBE = Call("cube", X) | (Call("square", X) * X)
C, A = math.sqrt(2.0 / math.pi), 0.044715


def _scaled(factor: float, x: Term) -> Call:
    return Call("mul", x, factor)


ANGLE = (
    _scaled(C, X + _scaled(A, CUBE))
    | (_scaled(C, X) * Call("add", _scaled(A, Call("square", X)), 1.0))
    | _scaled(C, X * Call("add", _scaled(A, Call("square", X)), 1.0))
    | Call("mul", X * Call("add", _scaled(A, Call("square", X)), 1.0), C)
)


def _half_of(bracket: Term) -> Either:
    """x / 2 times a bracket, in every order."""
    return (_scaled(0.5, X) * bracket) | _scaled(0.5, X * bracket) | (X * _scaled(0.5, bracket))


GELU_TANH = _half_of(Call("add", Call("tanh", ANGLE), 1.0)) | (X * Call("sigmoid", _scaled(2.0, ANGLE)))
GELU_ERF = _half_of(Call("add", Call("erf", _scaled(math.sqrt(0.5), X)), 1.0))
GELU_CALL = Call("gelu", X, Option("approximate"))
SILU = Call("silu", Input("gate")) | (Input("gate") * Call("sigmoid", Input("gate")))
SWIGLU = SILU * Input("up")
GEGLU = Call("gelu", Input("gate"), Option("approximate")) * Input("up")


def gelu(x: Tensor, approximate: str) -> Tensor:
    return activation.gelu(x, approximate=approximate)


def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return activation.geglu(gate, up, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return activation.swiglu(gate, up)


def _gelu(approximate: str | None) -> Any:
    def replace(match: Match) -> Replacement | str:
        kind = match.bound["approximate"] if approximate is None else approximate
        if not match.fake("x").dtype is match.dtype or match.dtype not in FLOATING:
            return "the dtypes differ"
        return Replacement(gelu, (match.bound["x"], kind), expression=("gelu", match.bound["x"], kind))

    return replace


def _gate(match: Match) -> str | None:
    gate, up = match.fake("gate"), match.fake("up")
    if not gate.dtype is up.dtype is match.dtype or match.dtype not in FLOATING:
        return "the dtypes differ"
    return None if str(gate.shape) == str(up.shape) else "a factor broadcasts"


def _swiglu(match: Match) -> Replacement | str:
    return _gate(match) or Replacement(swiglu, (match.bound["gate"], match.bound["up"]))


def _geglu(match: Match) -> Replacement | str:
    return _gate(match) or Replacement(geglu, tuple(match.bound[name] for name in ("gate", "up", "approximate")))


PATTERNS = (
    Pattern("gelu_tanh", GELU_TANH, _gelu("tanh")),
    Pattern("gelu", GELU_ERF, _gelu("none")),
    Pattern("geglu", GEGLU, _geglu),
    Pattern("gelu", GELU_CALL, _gelu(None)),
    Pattern("swiglu", SWIGLU, _swiglu),
)
