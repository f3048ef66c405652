"""Activations and their gates by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.handwritten import Family

C = math.sqrt(2.0 / math.pi)

TANH: dict[str, Callable[[Tensor], Tensor]] = {
    "pow(3)": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "x ** 3": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "x * x * x": lambda x: 0.5 * x * (1 + (C * (x + 0.044715 * x * x * x)).tanh()),
    "tensor": lambda x: (
        0.5
        * x
        * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / math.pi, dtype=x.dtype)) * (x + 0.044715 * torch.pow(x, 3))))
    ),
    "factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x))),
    "x last": lambda x: (1.0 + torch.tanh(C * (0.044715 * x.pow(3) + x))) * 0.5 * x,
    "half last": lambda x: x * (1.0 + torch.tanh(C * (x + 0.044715 * x.pow(3)))) * 0.5,
    "halved": lambda x: x / 2 * (torch.tanh(C * (x + 0.044715 * x.pow(3))) + 1),
    "F": lambda x: F.gelu(x, approximate="tanh"),
    "module": lambda x: nn.GELU(approximate="tanh")(x),
}
ERF: dict[str, Callable[[Tensor], Tensor]] = {
    "x * 0.5": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "0.5 * x": lambda x: 0.5 * x * (1 + torch.erf(x * (2.0**-0.5))),
    "0.5 inside": lambda x: x * (0.5 + 0.5 * torch.erf(x / math.sqrt(2.0))),
    "half of": lambda x: 0.5 * (x * (1.0 + (x / 2**0.5).erf())),
    "cdf": lambda x: x * (0.5 * (1.0 + torch.erf(x / 1.4142135623730951))),
    "F": F.gelu,
    "module": lambda x: nn.GELU()(x),
}
GELU_OF: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "y": lambda y, W, bias: y,
    "linear": lambda y, W, bias: F.linear(y, W, bias),
    "y + bias": lambda y, W, bias: y + bias,
    "product": lambda y, W, bias: y @ W,
}
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no": lambda a, gate: a,
    "a * gate": lambda a, gate: a * gate,
    "gate * a": lambda a, gate: gate * a,
    "torch.mul": lambda a, gate: torch.mul(a, gate),
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda o, x, a: o,
    "input returned": lambda o, x, a: (o, 2.0 * x),
    "activation returned": lambda o, x, a: (o, 2.0 * a),
    "input changed no_grad": lambda o, x, a: (o, x.add_(1.0)),
    "activation changed no_grad": lambda o, x, a: (o, a.mul_(2.0)),
}


def _activation(spellings: dict[str, Callable[[Tensor], Tensor]]) -> Callable[..., Callable[..., Any]]:
    def spelled(formula: str, of: str, gated: str, observed: str) -> Callable[..., Any]:
        def activation(y: Tensor, W: Tensor, bias: Tensor, gate: Tensor) -> Any:
            x = GELU_OF[of](y, W, bias)
            a = spellings[formula](x)
            return OBSERVED[observed](GATED[gated](a, gate), x, a)

        return activation

    return spelled


def _matched(*names: str) -> Callable[[dict[str, str]], frozenset[str]]:
    def matched(choices: dict[str, str]) -> frozenset[str]:
        if choices["observed"] not in ("nothing", "input returned"):
            return frozenset()
        return frozenset({names[-1] if choices["gated"] != "no" else names[0]})

    return matched


SILU: dict[str, Callable[[Tensor], Tensor]] = {
    "F": F.silu,
    "x * sigmoid": lambda x: x * torch.sigmoid(x),
    "sigmoid * x": lambda x: x.sigmoid() * x,
    "module": lambda x: nn.SiLU()(x),
}
QUICK: dict[str, Callable[[Tensor], Tensor]] = {
    "x * sigmoid(1.702 * x)": lambda x: x * torch.sigmoid(1.702 * x),
    "(x * 1.702).sigmoid() * x": lambda x: (x * 1.702).sigmoid() * x,
    "x / number": lambda x: torch.mul(x, F.sigmoid(x / 0.4)),
    "factor below one": lambda x: x * torch.sigmoid(0.3 * x),
}
OPTIONS = {"of": list(GELU_OF), "gated": list(GATED), "observed": list(OBSERVED)}
GELU_TANH = Family("gelu tanh", {"formula": list(TANH), **OPTIONS}, _activation(TANH), _matched("gelu", "geglu"))
GELU_ERF = Family("gelu erf", {"formula": list(ERF), **OPTIONS}, _activation(ERF), _matched("gelu", "geglu"))
QUICK_GELU = Family("quick gelu", {"formula": list(QUICK), **OPTIONS}, _activation(QUICK), _matched("quick", "quick"))
SWIGLU = Family(
    "swiglu",
    {"formula": list(SILU), **OPTIONS, "gated": [name for name in GATED if name != "no"]},
    _activation(SILU),
    _matched("swiglu"),
)
