"""Norms as they are written by hand, and as calls of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable
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
    Term,
    is_faster,
    maybe,
    result_dtype,
)  # fmt: skip
from transformer_kernels.ops.norm._by_length import LEAST, MIN_ELEMENTS, MIN_ELEMENTS_IN_TRAINING, length_norm
from transformer_kernels.ops.norm._by_std import std_norm
from transformer_kernels.ops.norm._channels import channel_norm
from transformer_kernels.ops.norm._rounded import NARROW, RoundedNorm, is_rounded_here

X, WEIGHT, BIAS = Input("x"), Input("weight", dims=1), Input("bias", dims=1)
ANY_WEIGHT, ANY_BIAS = Input("weight"), Input("bias")
CENTRED = X - Call("mean", X)
MEAN_SQUARE = Call("mean", Call("square", X))
EPS = Number("eps", least=1e-30, symbolic=True)


def _layer_norm_of(axis: str, weight: Term, bias: Term) -> Term:
    """LayerNorm of statistics over an axis: "" is the last one."""
    mean, squares = Call(f"mean{axis}", X), Call(f"mean{axis}", Call("square", X))
    centred = X - mean
    variance = (
        Call(f"var{axis}", X, 0)
        | Call("square", Call(f"std{axis}", X, 0))
        | Call(f"mean{axis}", Call("square", centred))
        | (squares - Call("square", mean))
    )
    inverse = Call("rsqrt", variance + EPS)
    return maybe(lambda y: y + bias, maybe(lambda y: y * weight, centred * inverse) | (centred * weight) * inverse)


LAYER_NORM = _layer_norm_of("", WEIGHT, BIAS)
CHANNEL_NORM = _layer_norm_of("_channels", ANY_WEIGHT, ANY_BIAS)
LAYER_NORM_CALL = Call("layer_norm", X, Option("weight"), Option("bias"), Option("eps"))
SCALED_LAYER_NORM = maybe(
    lambda y: y + BIAS, Call("layer_norm", X, Option("own"), Option("own_bias"), Option("eps")) * WEIGHT
)
INVERSE_RMS = Call("rsqrt", MEAN_SQUARE + EPS)
RMS_NORM = maybe(lambda y: y * WEIGHT, X * INVERSE_RMS) | (X * WEIGHT) * INVERSE_RMS
RMS_NORM_CALL = Call("rms_norm", X, Option("weight"), Option("eps"))
SCALED_RMS_NORM = Call("rms_norm", X, Option("own"), Option("eps")) * WEIGHT
LENGTH = Call("length", X)
UNIT = (
    Call("unit", X, Number("least"))
    | X / Call("clamp_min", LENGTH, Number("least"))
    | X / Call("clamp_min", Call("mul", LENGTH, Number("by", least=1e-30)), Number("least"))
)
LENGTH_NORM = Call("mul", maybe(lambda y: y * ANY_WEIGHT, UNIT), Number("scale")) | (UNIT * ANY_WEIGHT)
STANDARD = CENTRED / (Call("std", X, Option("correction")) + EPS)
STD_NORM = maybe(
    lambda y: y + BIAS,
    maybe(lambda y: y * WEIGHT, STANDARD) | (CENTRED * WEIGHT) / (Call("std", X, Option("correction")) + EPS),
)

MIN_ROUNDED = 1 << 16
"""Elements from which a norm that rounds its result is faster than a norm and casts, in training of LayerNorm."""

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


def _unfit(match: Match, *names: str, x: str = "x") -> str | None:
    """Why the vectors do not fit the rows."""
    rows = match.fake(x)
    for name in names:
        vector = match.bound.get(name)
        if vector is None:
            continue
        shape = match.fake(name).shape
        if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] != rows.shape[-1]:
            return f"{name} is not one number per column"
        if match.fake(name).dtype not in (rows.dtype, torch.float32):
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


def _scaled(replace: Callable[[Match], Replacement | str]) -> Callable[[Match], Replacement | str]:
    """A norm without parameters, whose result is scaled afterwards."""

    def scaled(match: Match) -> Replacement | str:
        if match.bound["own"] is not None or match.bound.get("own_bias") is not None:
            return "it has parameters of its own"
        return replace(match)

    return scaled


def _channel_norm(match: Match) -> Replacement | str:
    bound, x = match.bound, match.fake("x")
    for name in ("weight", "bias"):
        if name not in bound:
            continue
        vector = match.fake(name)
        shape = (1,) * (x.dim() - vector.dim()) + tuple(vector.shape)
        if str(shape) != str((1, x.shape[1], *(1,) * (x.dim() - 2))):
            return f"{name} is not one number per channel"
        if vector.dtype is not x.dtype:
            return "the dtypes differ"
    if not isinstance(x.shape[1], int) or x.dtype is not match.dtype or not match.has_kernel(x.dtype):
        return "the number of its channels is a symbol, or its dtype has no kernel"
    native = not is_faster(match, "layer_norm", x)
    return Replacement(channel_norm, (bound["x"], bound.get("weight"), bound.get("bias"), bound["eps"], native))


def _length_norm(match: Match) -> Replacement | str:
    bound, x = match.bound, match.fake("x")
    if x.dtype is not match.dtype or x.dtype not in (torch.float32, torch.float64) or not match.has_kernel(x.dtype):
        return "a norm by the length is computed in float32 only"
    columns, by = x.shape[-1], bound.get("by", 1.0)
    eps, scale = bound["least"] / by, bound.get("scale", 1.0) / by
    if not x.is_cpu or not isinstance(columns, int) or eps * eps < LEAST * columns:
        return "its lengths are not read on this device, or its eps is too small"
    if match.is_auto and match.size(*x.shape) < (MIN_ELEMENTS_IN_TRAINING if match.trains else MIN_ELEMENTS):
        return SMALL
    weight = match.shape(bound.get("weight"))
    if weight is not None:
        if weight.dtype is not x.dtype or weight.dim() > x.dim():
            return "the dtypes differ, or its weight has more axes"
        pairs = zip(reversed(weight.shape), reversed(x.shape), strict=False)
        if not all(str(size) in ("1", str(full)) for size, full in pairs):
            return "its weight does not broadcast"
    ones = Prepared(Ones(columns, x.dtype, x.device), ())
    return Replacement(length_norm, (bound["x"], bound.get("weight"), ones, scale, eps))


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


def _rounded(centred: bool) -> Callable[[Match], Replacement | str]:
    """A norm in float32 whose result autocast rounds for products, and the addition before it."""

    def replace(match: Match) -> Replacement | str:
        bound, name = match.bound, "summed" if "summed" in match.bound else "x"
        rows, roundings = match.fake(name), match.roundings(NARROW)
        if not roundings or not rows.dtype is match.dtype is torch.float32 or not is_rounded_here(rows):
            return ""
        if (reason := _unfit(match, "weight", "bias", x=name)) is not None:
            return reason
        vectors = [match.shape(bound.get(vector)) for vector in ("weight", "bias")]
        if any(vector is not None and vector.dtype is not torch.float32 for vector in vectors):
            return "the dtypes differ"
        if not isinstance(_columns(match, name), int):
            return "the number of its columns is a symbol"
        branch, residual, p = bound.get("branch", bound.get("x")), bound.get("residual"), bound.get("p", 0.0)
        if residual is not None:
            if match.shape(branch).dtype not in (NARROW, torch.float32):
                return "the dtypes differ"
            if match.shape(residual).dtype is not torch.float32:
                return "the dtypes differ"
            if not all(str(match.shape(x).shape) == str(rows.shape) for x in (branch, residual)):
                return "a summand broadcasts"
        least = MIN_DROPPED if "p" in bound or (match.trains and not centred) else MIN_ROUNDED
        if match.is_auto and match.size(*rows.shape) < least:
            return SMALL
        kind = RoundedNorm(centred, wide=len(roundings) < len(match.root.users))
        source = branch if residual is not None else match.uncast(branch)
        if not kind.wide and source is not branch and match.shape(source).dtype is NARROW:
            function: Any = norm.layer_norm if centred else norm.rms_norm
            parameters = (_weight(match), bound.get("bias"))[: 1 + centred]
            return Replacement(function, (source, *parameters), {"eps": bound["eps"]}, dtype=NARROW)
        values = (branch, residual, _weight(match, name), bound.get("bias"), bound["eps"], p)
        return Replacement(kind, values, rounded=NARROW)

    return replace


PATTERNS: tuple[Any, ...] = (
    Pattern("layer_norm", LAYER_NORM, _layer_norm),
    Pattern("layer_norm", SCALED_LAYER_NORM, _scaled(_layer_norm)),
    Pattern("layer_norm", CHANNEL_NORM, _channel_norm),
    Pattern("layer_norm", LAYER_NORM_CALL, _layer_norm_call),
    Pattern("rms_norm", RMS_NORM, _rms_norm),
    Pattern("rms_norm", SCALED_RMS_NORM, _scaled(_rms_norm)),
    Pattern("length_norm", LENGTH_NORM, _length_norm),
    Pattern("rms_norm", RMS_NORM_CALL, _rms_norm_call),
    Pattern("std_norm", STD_NORM, _std_norm),
    Pattern("add_layer_norm", ADD_LAYER_NORM, _add_layer_norm, shared="summed"),
    Pattern("add_rms_norm", ADD_RMS_NORM, _add_rms_norm, shared="summed"),
    Pattern("rounded_norm", ADD_LAYER_NORM, _rounded(True), shared="summed"),
    Pattern("rounded_norm", ADD_RMS_NORM, _rounded(False), shared="summed"),
    Pattern("rounded_norm", LAYER_NORM_CALL, _rounded(True)),
    Pattern("rounded_norm", RMS_NORM_CALL, _rounded(False)),
)
