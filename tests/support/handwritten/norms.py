"""LayerNorm and RMSNorm by hand, with the residual before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.handwritten import Family, wide

EPS = 1e-5

MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean(-1, keepdim)": lambda x: x.mean(-1, keepdim=True),
    "mean(dim=2)": lambda x: x.mean(dim=2, keepdim=True),
    "torch.mean": lambda x: torch.mean(x, -1, True),
    "mean([-1])": lambda x: x.mean([-1], keepdim=True),
    "mean((-1,))": lambda x: x.mean((-1,), keepdim=True),
    "sum /": lambda x: x.sum(-1, keepdim=True) / x.shape[-1],
    "unsqueeze": lambda x: x.mean(-1).unsqueeze(-1),
    "[..., None]": lambda x: x.mean(-1)[..., None],
}
VARIANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "var(unbiased=False)": lambda x, mean: x.var(-1, unbiased=False, keepdim=True),
    "var(correction=0)": lambda x, mean: torch.var(x, dim=-1, correction=0, keepdim=True),
    "pow(2)": lambda x, mean: (x - mean).pow(2).mean(-1, keepdim=True),
    "** 2": lambda x, mean: ((x - mean) ** 2).mean(-1, keepdim=True),
    "square": lambda x, mean: torch.square(x - mean).mean(dim=-1, keepdim=True),
    "product": lambda x, mean: ((x - mean) * (x - mean)).mean(-1, keepdim=True),
    "std squared": lambda x, mean: x.std(-1, keepdim=True, unbiased=False) ** 2,
    "var_mean": lambda x, mean: torch.var_mean(x, -1, keepdim=True, unbiased=False)[0],
    "mean of squares": lambda x, mean: (x * x).mean(-1, keepdim=True) - mean * mean,
}
NORMALISED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "/ torch.sqrt": lambda x, mean, var: (x - mean) / torch.sqrt(var + EPS),
    "/ method": lambda x, mean, var: (x - mean) / (var + EPS).sqrt(),
    "* rsqrt": lambda x, mean, var: (x - mean) * torch.rsqrt(var + EPS),
    "rsqrt *": lambda x, mean, var: (var + EPS).rsqrt() * (x - mean),
    "** 0.5": lambda x, mean, var: (x - mean) / (var + EPS) ** 0.5,
    "** -0.5": lambda x, mean, var: (x - mean) * (EPS + var) ** -0.5,
    "torch.div": lambda x, mean, var: torch.div(torch.sub(x, mean), torch.sqrt(torch.add(var, EPS))),
    "1 /": lambda x, mean, var: (x - mean) * (1.0 / torch.sqrt(var + EPS)),
}
SCALED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weight * n + bias": lambda n, weight, bias: weight * n + bias,
    "n * weight + bias": lambda n, weight, bias: n * weight + bias,
    "bias + n * weight": lambda n, weight, bias: bias + n * weight,
    "torch.addcmul": lambda n, weight, bias: torch.addcmul(bias, n, weight),
    "(1 + weight)": lambda n, weight, bias: n * (1.0 + weight) + bias,
    "in place": lambda n, weight, bias: n.mul(weight).add_(bias),
    "weight only": lambda n, weight, bias: n * weight,
    "nothing": lambda n, weight, bias: n,
}
BEFORE_ROOT: dict[str, Callable[..., Tensor]] = {
    "weight * (x - mean) / root": lambda centred, root, weight, bias: weight * centred / root + bias,
    "(x - mean) * weight / root": lambda centred, root, weight, bias: centred * weight / root + bias,
    "weight * (x - mean) * rsqrt": lambda centred, root, weight, bias: weight * centred * (1.0 / root) + bias,
}
RESIDUAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no": lambda x, residual: x,
    "x + residual": lambda x, residual: x + residual,
    "residual + dropout(x)": lambda x, residual: residual + F.dropout(x, 0.1, training=False),
    "residual + dropout 0": lambda x, residual: residual + F.dropout(x, 0.0, training=True),
    "in place": lambda x, residual: x.clone().add_(residual),
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, x, mean, var, n: o,
    "statistics returned": lambda o, x, mean, var, n: (o, mean, var),
    "normalised returned": lambda o, x, mean, var, n: (o, n),
    "input returned": lambda o, x, mean, var, n: (o, 1.0 * x),
    "input changed afterwards no_grad": lambda o, x, mean, var, n: (o, x.mul_(2.0)),
    "normalised changed no_grad": lambda o, x, mean, var, n: (o, n.mul_(2.0)),
}


def spelled_layer_norm(
    mean: str, variance: str, normalised: str, scaled: str, residual: str, observed: str
) -> Callable[..., Any]:
    def layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        x = added(x, residual)
        average = MEANS[mean](x)
        var = VARIANCES[variance](x, average)
        if scaled in BEFORE_ROOT:
            return BEFORE_ROOT[scaled](x - average, torch.sqrt(var + EPS), weight, bias)
        n = NORMALISED[normalised](x, average, var)
        return OBSERVED[observed](SCALED[scaled](n, weight, bias), x, average, var, n)

    added = RESIDUAL[residual]
    return layer_norm


LAYER_NORM = Family(
    "layer_norm",
    {
        "mean": list(MEANS),
        "variance": list(VARIANCES),
        "normalised": list(NORMALISED),
        "scaled": [*SCALED, *BEFORE_ROOT],
        "residual": list(RESIDUAL),
        "observed": list(OBSERVED),
    },
    spelled_layer_norm,
    lambda choices: frozenset(
        {"norm"}
        if choices["observed"] in ("nothing", "input returned") and choices["variance"] != "mean of squares"
        else ()
    ),
)

SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "pow(2)": lambda x: x.pow(2),
    "** 2": lambda x: x**2,
    "x * x": lambda x: x * x,
    "square": torch.square,
    "torch.pow": lambda x: torch.pow(x, 2.0),
}
RMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "* rsqrt": lambda x, squares: x * torch.rsqrt(squares.mean(-1, keepdim=True) + EPS),
    "rsqrt *": lambda x, squares: (squares.mean(-1, keepdim=True) + EPS).rsqrt() * x,
    "/ sqrt": lambda x, squares: x / torch.sqrt(squares.mean(-1, keepdim=True) + EPS),
    "** -0.5": lambda x, squares: x * (squares.mean(dim=-1, keepdim=True) + EPS) ** -0.5,
    "sum": lambda x, squares: x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + EPS),
    "unsqueeze": lambda x, squares: x * torch.rsqrt(torch.mean(squares, 2).unsqueeze(-1) + EPS),
}
RMS_SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "n * weight": lambda n, weight: n * weight,
    "weight * n": lambda n, weight: weight * n,
    "(1 + weight)": lambda n, weight: n * (1 + weight),
    "mul": lambda n, weight: torch.mul(weight, n),
    "nothing": lambda n, weight: n,
}
RMS_BEFORE_ROOT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weight * x / root": lambda x, root, weight: weight * x / root,
    "x * weight / root": lambda x, root, weight: x * weight / root,
}
CAST: dict[str, Callable[[Tensor], Tensor]] = {"no": lambda x: x, "float": wide}
RMS_OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, x, n: o,
    "normalised returned": lambda o, x, n: (o, n),
    "input returned": lambda o, x, n: (o, 1.0 * x),
    "input changed afterwards no_grad": lambda o, x, n: (o, x.mul_(2.0)),
}


def spelled_rms_norm(
    squares: str, rms: str, scaled: str, cast: str, residual: str, observed: str
) -> Callable[..., Any]:
    def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        x = added(x, residual)
        y = CAST[cast](x)
        if scaled in RMS_BEFORE_ROOT:
            root = torch.sqrt(SQUARES[squares](y).mean(-1, keepdim=True) + EPS)
            return RMS_BEFORE_ROOT[scaled](y, root, weight).type_as(x)
        n = RMS[rms](y, SQUARES[squares](y)).type_as(x)
        return RMS_OBSERVED[observed](RMS_SCALED[scaled](n, weight), x, n)

    added = RESIDUAL[residual]
    return rms_norm


RMS_NORM = Family(
    "rms_norm",
    {
        "squares": list(SQUARES),
        "rms": list(RMS),
        "scaled": [*RMS_SCALED, *RMS_BEFORE_ROOT],
        "cast": list(CAST),
        "residual": list(RESIDUAL),
        "observed": list(RMS_OBSERVED),
    },
    spelled_rms_norm,
    lambda choices: frozenset({"norm"} if choices["observed"] in ("nothing", "input returned") else ()),
)
