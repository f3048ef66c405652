"""Norms as they are written by hand, and as calls of torch.nn.functional."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import norm
from transformer_kernels.ops._dropout import MIN_DROPPED
from transformer_kernels.ops._pattern import (
    SMALL,
    As,
    Call,
    Input,
    Match,
    Number,
    Option,
    Pattern,
    Prepared,
    Replacement,
    is_faster,
    maybe,
    result_dtype,
)  # fmt: skip
from transformer_kernels.ops.norm._by_std import std_norm

X, WEIGHT, BIAS = Input("x"), Input("weight", dims=1), Input("bias", dims=1)
MEAN = Call("mean", X)
CENTRED = X - MEAN
MEAN_SQUARE = Call("mean", Call("square", X))
VARIANCE = (
    Call("var", X, 0)
    | Call("square", Call("std", X, 0))
    | Call("mean", Call("square", CENTRED))
    | (MEAN_SQUARE - Call("square", MEAN))
)
EPS = Number("eps", least=1e-30, symbolic=True)

INVERSE = Call("rsqrt", VARIANCE + EPS)
LAYER_NORM = maybe(lambda y: y + BIAS, maybe(lambda y: y * WEIGHT, CENTRED * INVERSE) | (CENTRED * WEIGHT) * INVERSE)
LAYER_NORM_CALL = Call("layer_norm", X, Option("weight"), Option("bias"), Option("eps"))
INVERSE_RMS = Call("rsqrt", MEAN_SQUARE + EPS)
RMS_NORM = maybe(lambda y: y * WEIGHT, X * INVERSE_RMS) | (X * WEIGHT) * INVERSE_RMS
RMS_NORM_CALL = Call("rms_norm", X, Option("weight"), Option("eps"))
STANDARD = CENTRED / (Call("std", X, Option("correction")) + EPS)
STD_NORM = maybe(
    lambda y: y + BIAS,
    maybe(lambda y: y * WEIGHT, STANDARD) | (CENTRED * WEIGHT) / (Call("std", X, Option("correction")) + EPS),
)

DROPPED = Call("dropout", Input("branch"), Number("p", symbolic=True))
STREAM = As("summed", (DROPPED + Input("residual")) | (Input("branch") + Input("residual")))
ADD_LAYER_NORM = Call("layer_norm", STREAM, Option("weight"), Option("bias"), Option("eps"))
ADD_RMS_NORM = Call("rms_norm", STREAM, Option("weight"), Option("eps"))


def layer_norm_as(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype, backend: str | None = None
) -> Tensor:
    return norm.layer_norm(x.to(dtype), weight, bias, eps=eps, backend=backend)


def rms_norm_as(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, backend: str | None = None) -> Tensor:
    return norm.rms_norm(x.to(dtype), weight, eps=eps, backend=backend)


class Ones(NamedTuple):
    """The weight (D,) of a norm without one."""

    width: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self) -> Tensor:
        return torch.ones(self.width, dtype=self.dtype, device=self.device)


def _weight(match: Match, x: str = "x") -> Any:
    rows, weight = match.fake(x), match.bound.get("weight")
    return Prepared(Ones(_columns(match, x), rows.dtype, rows.device), ()) if weight is None else weight


def _columns(match: Match, x: str = "x") -> Any:
    """The number of columns: that of the weight if there is one, since that of the rows may be an equal symbol."""
    return match.fake(x if match.bound.get("weight") is None else "weight").shape[-1]


def _unfit(match: Match, *names: str) -> str | None:
    """Why the vectors do not fit the rows."""
    x = match.fake("x")
    for name in names:
        vector = match.bound.get(name)
        if vector is None:
            continue
        shape = match.fake(name).shape
        if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] != x.shape[-1]:
            return f"{name} is not one number per column"
        if match.fake(name).dtype not in (x.dtype, torch.float32):
            return "the dtypes differ"
    return None


def _wanted(match: Match, *names: str) -> torch.dtype | str:
    """The dtype to compute in, or why the norm is left alone."""
    if (reason := _unfit(match, *names)) is not None:
        return reason
    if not isinstance(_columns(match), int):
        return "the number of its columns is a symbol"
    dtype = result_dtype(match, "x")
    if dtype is None:
        return "its dtype has no kernel"
    return dtype if dtype is match.dtype else "its result has a narrower dtype than its input"


def _layer_norm(match: Match) -> Replacement | str:
    bound = match.bound
    if isinstance(dtype := _wanted(match, "weight", "bias"), str):
        return dtype
    x, weight, bias, eps = values = (bound["x"], bound.get("weight"), bound.get("bias"), bound["eps"])
    if dtype is not match.fake("x").dtype:
        return Replacement(layer_norm_as, (x, _weight(match), bias, eps, dtype))
    expression = ("layer_norm", *values)
    if is_faster(match, "layer_norm", match.fake("x")):
        return Replacement(norm.layer_norm, (x, _weight(match), bias), {"eps": eps}, expression)
    return Replacement(torch.layer_norm, (x, [_columns(match)], weight, bias, eps), {}, expression)


def _layer_norm_call(match: Match) -> Replacement | str:
    return _layer_norm(match) if is_faster(match, "layer_norm", match.fake("x")) else SMALL


def _rms_norm_call(match: Match) -> Replacement | str:
    return _rms_norm(match) if is_faster(match, "rms_norm", match.fake("x")) else SMALL


def _rms_norm(match: Match) -> Replacement | str:
    bound = match.bound
    if isinstance(dtype := _wanted(match, "weight"), str):
        return dtype
    x, eps = bound["x"], bound["eps"]
    if dtype is not match.fake("x").dtype:
        return Replacement(rms_norm_as, (x, _weight(match), eps, dtype))
    return Replacement(norm.rms_norm, (x, _weight(match)), {"eps": eps}, ("rms_norm", x, bound.get("weight"), eps))


def _std_norm(match: Match) -> Replacement | str:
    bound = match.bound
    if (reason := _unfit(match, "weight", "bias")) is not None:
        return reason
    if match.fake("x").dtype is not match.dtype or match.dtype not in (torch.float32, torch.float64):
        return "a norm by the standard deviation is computed in float32 only"
    if not isinstance(match.fake("x").shape[-1], int) or match.fake("x").shape[-1] < 2:
        return "its rows have one column"
    values = (bound["x"], bound.get("weight"), bound.get("bias"), bound["eps"], bound["correction"])
    return Replacement(std_norm, values)


def _residual(match: Match, name: str) -> str | None:
    bound, branch, residual, summed = match.bound, match.fake("branch"), match.fake("residual"), match.fake("summed")
    if not branch.dtype is residual.dtype is summed.dtype is match.dtype or not match.has_kernel(match.dtype):
        return "the dtypes differ"
    if not all(str(x.shape) == str(summed.shape) for x in (branch, residual)):
        return "a summand broadcasts"
    if not isinstance(_columns(match, "summed"), int):
        return "the number of its columns is a symbol"
    dropped = "p" in bound and match.size(*summed.shape) >= MIN_DROPPED
    return None if dropped or is_faster(match, name, summed) else SMALL


def _add_layer_norm(match: Match) -> Replacement | str:
    if (reason := _residual(match, "add_layer_norm")) is not None:
        return reason
    return _added(match, norm.add_layer_norm, match.bound["bias"])


def _add_rms_norm(match: Match) -> Replacement | str:
    if (reason := _residual(match, "add_rms_norm")) is not None:
        return reason
    return _added(match, norm.add_rms_norm)


def _added(match: Match, function: Any, *bias: Any) -> Replacement:
    bound = match.bound
    options = {"eps": bound["eps"], "dropout_p": bound.get("p", 0.0)}
    return Replacement(function, (bound["branch"], bound["residual"], _weight(match, "summed"), *bias), options)


PATTERNS: tuple[Any, ...] = (
    Pattern("layer_norm", LAYER_NORM, _layer_norm),
    Pattern("layer_norm", LAYER_NORM_CALL, _layer_norm_call),
    Pattern("rms_norm", RMS_NORM, _rms_norm),
    Pattern("rms_norm", RMS_NORM_CALL, _rms_norm_call),
    Pattern("std_norm", STD_NORM, _std_norm),
    Pattern("add_layer_norm", ADD_LAYER_NORM, _add_layer_norm, shared="summed"),
    Pattern("add_rms_norm", ADD_RMS_NORM, _add_rms_norm, shared="summed"),
)
