"""Norms by the length of a row, over the channels of images, and calls whose result is scaled afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.handwritten import D, Family, H, L
from tests.support.handwritten.norms import EPS

UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize(dim=2)": lambda x: F.normalize(x, p=2.0, dim=2),
    "normalize(eps)": lambda x: F.normalize(x, dim=-1, eps=1e-11),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12),
    "torch.norm": lambda x: x / torch.norm(x, dim=-1, keepdim=True).clamp_min(1e-12),
    "vector_norm": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12),
    "root mean square": lambda x: x / (torch.norm(x, dim=-1, keepdim=True) * D**-0.5).clamp(min=1e-12),
}
GAINS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "u * scale * weight": lambda u, weight, scalar: u * D**0.5 * weight,
    "weight * u * scale": lambda u, weight, scalar: weight * u * D**0.5,
    "u * weight": lambda u, weight, scalar: u * weight,
    "u * (weight + 1) * scale": lambda u, weight, scalar: u * (weight + 1.0) * D**0.5,
    "u * scale": lambda u, weight, scalar: u * D**0.5,
    "of one number": lambda u, weight, scalar: u * 3.0 * scalar.view(1),
    "of a number without axes": lambda u, weight, scalar: u * 3.0 * scalar,
    "of rows": lambda u, weight, scalar: u * D**0.5 * weight.view(D, 1),
    "of all": lambda u, weight, scalar: u * D**0.5 * weight.outer(weight),
}
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x,
    "rows of zeros": lambda x: x * (torch.arange(L) % 3 > 0).to(x.dtype)[:, None],
    "short rows": lambda x: x * 1e-9,
    "rows near eps": lambda x: x * 1e-12,
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, x, n: o,
    "normalised returned": lambda o, x, n: (o, n),
    "input returned": lambda o, x, n: (o, 1.0 * x),
    "input changed afterwards no_grad": lambda o, x, n: (o, x.mul_(2.0)),
    "normalised changed no_grad": lambda o, x, n: (o, n.mul_(2.0)),
}


def spelled_length_norm(unit: str, gain: str, given: str, observed: str) -> Callable[..., Any]:
    def length_norm(x: Tensor, weight: Tensor, temperature: Tensor) -> Any:
        x = GIVEN[given](x)
        u = UNITS[unit](x)
        return OBSERVED[observed](GAINS[gain](u, weight, temperature), x, u)

    return length_norm


LENGTH_NORM = Family(
    "length_norm",
    {"unit": list(UNITS), "gain": list(GAINS), "given": list(GIVEN), "observed": list(OBSERVED)},
    spelled_length_norm,
    lambda choices: frozenset({"length_norm"} if choices["observed"] in ("nothing", "input returned") else ()),
)

MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean(1)": lambda x: x.mean(1, keepdim=True),
    "torch.mean": lambda x: torch.mean(x, dim=1, keepdim=True),
    "mean(-3)": lambda x: x.mean(-3, keepdim=True),
    "mean([1])": lambda x: x.mean([1], keepdim=True),
}
VARIANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow(2)": lambda x, mean: (x - mean).pow(2).mean(1, keepdim=True),
    "var": lambda x, mean: torch.var(x, dim=1, unbiased=False, keepdim=True),
    "std squared": lambda x, mean: x.std(1, correction=0, keepdim=True) ** 2,
}
CHANNEL_GAINS: dict[str, Callable[..., Tensor]] = {
    "weight[:, None, None]": lambda n, weight, bias: weight[:, None, None] * n + bias[:, None, None],
    "view": lambda n, weight, bias: n * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1),
    "weight only": lambda n, weight, bias: n * weight.reshape(-1, 1, 1),
    "nothing": lambda n, weight, bias: n,
    "bias only": lambda n, weight, bias: n + bias[:, None, None],
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda q: q.transpose(1, 2).contiguous(),
    "channels last": lambda q: q.transpose(1, 2).contiguous(memory_format=torch.channels_last),
    "transposed": lambda q: q.transpose(1, 2),
}


def spelled_channel_norm(mean: str, variance: str, gain: str, layout: str, observed: str) -> Callable[..., Any]:
    def channel_norm(q: Tensor, weight: Tensor, bias: Tensor) -> Any:
        x = LAYOUTS[layout](q)
        average = MEANS[mean](x)
        n = (x - average) / torch.sqrt(VARIANCES[variance](x, average) + EPS)
        o = CHANNEL_GAINS[gain](n, weight, bias)
        return OBSERVED[observed](o.view(o.shape[0], -1) if layout == "contiguous" else o, x, n)

    return channel_norm


CHANNEL_NORM = Family(
    "channel_norm",
    {
        "mean": list(MEANS),
        "variance": list(VARIANCES),
        "gain": list(CHANNEL_GAINS),
        "layout": list(LAYOUTS),
        "observed": list(OBSERVED),
    },
    spelled_channel_norm,
    lambda choices: frozenset({"norm"} if choices["observed"] in ("nothing", "input returned") else ()),
)

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (D,), eps=EPS),
    "rms_norm": lambda x: F.rms_norm(x, (D,), eps=EPS),
}
CALL_GAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "n * weight": lambda n, weight: n * weight,
    "weight * n": lambda n, weight: weight * n,
    "n * (1 + weight)": lambda n, weight: n * (1.0 + weight),
}


def spelled_scaled_norm(call: str, gain: str, observed: str) -> Callable[..., Any]:
    def scaled_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        n = CALLS[call](x)
        o = CALL_GAINS[gain](n, weight)
        return OBSERVED[observed](o + bias if call == "layer_norm" else o, x, n)

    return scaled_norm


SCALED_NORM = Family(
    "scaled_norm",
    {"call": list(CALLS), "gain": list(CALL_GAINS), "observed": list(OBSERVED)},
    spelled_scaled_norm,
    lambda choices: frozenset({"norm"} if choices["observed"] in ("nothing", "input returned") else ()),
)
for_length, for_channels, for_scaled = LENGTH_NORM.trap, CHANNEL_NORM.trap, SCALED_NORM.trap


@for_length
def length_over_rows(x, weight):
    return F.normalize(x, dim=1) * D**0.5 * weight


@for_length
def length_of_all(x, weight):
    return x / x.norm().clamp(min=1e-12) * D**0.5 * weight


@for_length
def sum_of_magnitudes(x, weight):
    return F.normalize(x, p=1.0, dim=-1) * D**0.5 * weight


@for_length
def clamped_above(x, weight):
    return x / x.norm(dim=-1, keepdim=True).clamp(max=2.0) * weight


@for_length
def clamped_on_both_sides(x, weight):
    return x / x.norm(dim=-1, keepdim=True).clamp(1e-12, 2.0) * weight


@for_length
def eps_is_large(x, weight):
    return F.normalize(x, dim=-1, eps=0.5) * D**0.5 * weight


@for_length
def eps_is_zero(x, weight):
    return F.normalize(x, dim=-1, eps=0.0) * D**0.5 * weight


@for_length
def length_of_another(x, y, weight):
    return x / y.norm(dim=-1, keepdim=True).clamp(min=1e-12) * weight


@for_length
def weight_adds_an_axis(x, W):
    return F.normalize(x, dim=-1) * D**0.5 * torch.stack((W, W), 0)[:, None]


@for_length
def multiplied_by_the_length(x, weight):
    return x * x.norm(dim=-1, keepdim=True).clamp(min=1e-12) * weight


@for_channels
def weight_of_columns(q, weight, bias):
    x = q.transpose(1, 2)
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + EPS) * weight + bias


@for_channels
def weight_of_rows(q, weight, bias):
    x = q.transpose(1, 2)
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(x.var(1, False, keepdim=True) + EPS) * weight[:2, None] + bias[0]


@for_channels
def mean_of_channels_variance_of_columns(q, weight, bias):
    x = q.transpose(1, 2)
    return (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(-1, False, keepdim=True) + EPS) * weight[:, None, None]


@for_channels
def unbiased_variance_of_channels(q, weight):
    x = q.transpose(1, 2)
    return (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True) + EPS) * weight[:, None, None]


@for_channels
def mean_of_two_axes(q, weight):
    x = q.transpose(1, 2)
    mean = x.mean((1, 2), keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean((1, 2), keepdim=True) + EPS) * weight[:, None, None]


@for_channels
def statistics_without_their_axis(k, weight):
    x = k[0].transpose(0, 1)[None, :, :1].expand(L, L, 1, D)  # (8, 8, 1, 8): also broadcasts without keepdim
    return (x - x.mean(1)[:, None]) / torch.sqrt(x.var(1, False)[:, None] + EPS) * weight[:, None, None]


@for_scaled
def norm_has_a_weight(x, weight, bias):
    return F.layer_norm(x, (D,), bias) * weight


@for_scaled
def norm_has_a_bias(x, weight, bias):
    return F.layer_norm(x, (D,), None, bias) * weight


@for_scaled
def rms_norm_has_a_weight(x, weight, bias):
    return F.rms_norm(x, (D,), bias) * weight


@for_scaled
def weight_of_positions(x, columns, bias):
    return F.layer_norm(x, (D,)) * columns + bias


@for_scaled
def bias_before_the_weight(x, weight, bias):
    return (F.layer_norm(x, (D,)) + bias) * weight


@for_scaled
def weight_is_the_input(x, y):
    return F.layer_norm(x, (D,)) * y


@for_scaled
def normalised_over_two_axes(x, W):
    return F.layer_norm(x, (L, D)) * W


assert D == L and H == 2, "the wrong axis must have the right size"
