"""GELU in its spellings, and gates. In a canonical product, numbers are merged into one and come last."""

from __future__ import annotations

import math
from typing import Any

import torch

from transformer_kernels.ops import activation
from transformer_kernels.ops._pattern import (
    SMALL,
    Call,
    Either,
    Input,
    Match,
    Number,
    Option,
    Pattern,
    Replacement,
    Term,
    is_faster,
)  # fmt: skip
from transformer_kernels.ops.activation._quick import quick_gelu

MIN_ELEMENTS = 1 << 18
"""Elements from which blocks are faster than whole operators."""

X = Input("x")
CUBE = Call("cube", X) | (Call("square", X) * X)
C, A = math.sqrt(2.0 / math.pi), 0.044715


def _angle(factor: float) -> Either:
    """factor * (x + 0.044715 x^3); numbers come last in a product."""
    inside = (X + Call("mul", CUBE, A)) | (X * Call("add", Call("mul", Call("square", X), A), 1.0))
    return Call("mul", inside, factor) | Call("mul", Call("mul", inside, C), factor / C)


def _half_of(function: Term) -> Either:
    """x / 2 * (1 + function)."""
    halved = Call("add", Call("mul", function, 0.5), 0.5)
    return Call("mul", X * Call("add", function, 1.0), 0.5) | (X * halved)


GELU_TANH = _half_of(Call("tanh", _angle(C))) | (X * Call("sigmoid", _angle(2.0 * C)))
GELU_ERF = _half_of(Call("erf", Call("mul", X, math.sqrt(0.5))))
GELU_CALL = Call("gelu", X, Option("approximate"))
QUICK_GELU = X * Call("sigmoid", Call("mul", X, Number("factor", least=1e-3)))
SILU = Call("silu", Input("gate")) | (Input("gate") * Call("sigmoid", Input("gate")))
SWIGLU = SILU * Input("up")
GEGLU = Call("gelu", Input("gate"), Option("approximate")) * Input("up")


def _gelu(approximate: str | None) -> Any:
    def replace(match: Match) -> Replacement | str:
        kind = match.bound["approximate"] if approximate is None else approximate
        if match.fake("x").dtype is not match.dtype or not match.has_kernel(match.dtype):
            return "the dtypes differ"
        function: Any = activation.gelu
        if not is_faster(match, "gelu_tanh" if kind == "tanh" else "gelu", match.fake("x")):
            if approximate is None:
                return SMALL
            function = torch.nn.functional.gelu
        x = match.bound["x"]
        return Replacement(function, (x,), {"approximate": kind}, ("gelu", x, kind))

    return replace


def _quick_gelu(match: Match) -> Replacement | str:
    x = match.fake("x")
    if x.dtype is not match.dtype or x.dtype not in (torch.float32, torch.float64) or not match.has_kernel(x.dtype):
        return "it is computed in float32 only"
    if match.is_auto and (not x.is_cpu or match.size(*x.shape) < MIN_ELEMENTS):
        return SMALL
    return Replacement(quick_gelu, (match.bound["x"], match.bound["factor"]))


def _gate(match: Match) -> str | None:
    gate, up = match.fake("gate"), match.fake("up")
    if not gate.dtype is up.dtype is match.dtype or not match.has_kernel(match.dtype):
        return "the dtypes differ"
    return None if str(gate.shape) == str(up.shape) else "a factor broadcasts"


def _swiglu(match: Match) -> Replacement | str:
    return _gate(match) or Replacement(activation.swiglu, (match.bound["gate"], match.bound["up"]))


def _geglu(match: Match) -> Replacement | str:
    bound = match.bound
    options = {"approximate": bound["approximate"]}
    return _gate(match) or Replacement(activation.geglu, (bound["gate"], bound["up"]), options)


PATTERNS = (
    Pattern("gelu_tanh", GELU_TANH, _gelu("tanh")),
    Pattern("gelu", GELU_ERF, _gelu("none")),
    Pattern("geglu", GEGLU, _geglu),
    Pattern("gelu", GELU_CALL, _gelu(None)),
    Pattern("quick_gelu", QUICK_GELU, _quick_gelu),
    Pattern("swiglu", SWIGLU, _swiglu),
)
