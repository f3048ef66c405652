"""One example of each operation: the smoke cases of its kernels, and what generic tests, gates and benchmarks call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Any]
Make = Callable[[int, int, torch.dtype, torch.device], Tensors]
CPU = torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """A standard normal leaf that requires grad, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def rows_and_parameters(*parameters: str, like_x: tuple[str, ...] = ()) -> Callable[..., Tensors]:
    """Makes x (..., N), others of its shape, and parameters (N,), which may have a dtype of their own."""

    def make(
        dtype: torch.dtype, device: torch.device, *shape: int, parameters_in: torch.dtype | None = None
    ) -> Tensors:
        shapes = {**dict.fromkeys(("x", *like_x), shape), **dict.fromkeys(parameters, shape[-1:])}
        dtypes = dict.fromkeys(parameters, parameters_in or dtype)
        return {
            name: normal(*shape, dtype=dtypes.get(name, dtype), device=device, seed=seed)
            for seed, (name, shape) in enumerate(shapes.items(), start=1)
        }

    return make


@dataclass(frozen=True)
class Example:
    """A call with `rows` rows of `columns`; for attention, sequences of `rows` tokens in heads of `columns`.

    `tensors` creates the tensor arguments, `options` are the others, `view` names the tensor that tests replace by one
    with other strides, a storage offset or no elements.
    """

    tensors: Make
    options: dict[str, Any] = field(default_factory=dict)
    view: str = "x"

    def make(
        self, rows: int = 12, columns: int = 64, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> Tensors:
        """The tensors, leaves that require gradients if differentiable."""
        return self.tensors(rows, columns, dtype, device)


def _rows(*parameters: str, like_x: tuple[str, ...] = ()) -> Make:
    """x (rows, columns), others of its shape, and parameters (columns,)."""
    make = rows_and_parameters(*parameters, like_x=like_x)
    return lambda rows, columns, dtype, device: make(dtype, device, rows, columns)


def _targets(rows: int, classes: int, device: torch.device) -> Tensor:
    """A class for each row, one of them ignored."""
    targets = torch.arange(rows, device=device) * 7 % classes
    return targets.masked_fill(torch.arange(rows, device=device) == 1, -100)


def _logits(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    logits = normal(rows, columns, dtype=dtype, device=device, seed=1)
    return {"logits": logits, "targets": _targets(rows, columns, device)}


def _head(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    classes = 17
    return {
        "x": normal(rows, columns, dtype=dtype, device=device, seed=1),
        "weight": normal(classes, columns, dtype=dtype, device=device, seed=2),
        "targets": _targets(rows, classes, device),
        "bias": normal(classes, dtype=dtype, device=device, seed=3),
    }


def _layer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        "x": normal(rows, columns, dtype=dtype, device=device, seed=1),
        "weight": normal(19, columns, dtype=dtype, device=device, seed=2),
        "bias": normal(19, dtype=dtype, device=device, seed=3),
    }


def _tables(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Two sequences, each of half the rows."""
    length = rows // 2
    return {
        "tokens": (torch.arange(2 * length, device=device) * 5 % 11).view(2, length),
        "weight": normal(11, columns, dtype=dtype, device=device, seed=1),
        "positions": normal(length + 3, columns, dtype=dtype, device=device, seed=2),
        "norm_weight": normal(columns, dtype=dtype, device=device, seed=3),
        "norm_bias": normal(columns, dtype=dtype, device=device, seed=4),
    }


def _heads(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        name: normal(2, heads, rows, columns, dtype=dtype, device=device, seed=i)
        for i, (name, heads) in enumerate((("q", 4), ("k", 2), ("v", 2)))
    }


def _packed(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {"qkv": normal(2, rows, 8, columns, dtype=dtype, device=device, seed=1)}


def _gate_and_up(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        name: normal(rows, columns, dtype=dtype, device=device, seed=i)
        for i, name in enumerate(("gate", "up"), start=1)
    }


def _queries_and_keys(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    heads = _heads(rows, columns, dtype, device)
    return {"q": heads["q"], "k": heads["k"]}


def _rotated(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """The first half of the columns is rotated."""
    positions = torch.arange(2 * rows, device=device, dtype=torch.float64).view(2, rows, 1)
    rotated = max(2, columns // 4 * 2)
    angles = positions / 10000.0 ** (torch.arange(0, rotated, 2, device=device) / rotated)
    wide = torch.promote_types(dtype, torch.float32)
    tables = {"cos": angles.cos().to(wide), "sin": angles.sin().to(wide)}
    return {**_queries_and_keys(rows, columns, dtype, device), **tables}


EXAMPLES: dict[str, Example] = {
    "attention": Example(_heads, {"causal": True, "dropout_p": 0.2}, view="q"),
    "packed_attention": Example(_packed, {"heads": 4, "causal": True, "dropout_p": 0.2}, view="qkv"),
    "softmax": Example(_rows(), {"causal": True, "scale": 0.5}),
    "layer_norm": Example(_rows("weight", "bias")),
    "add_layer_norm": Example(_rows("weight", "bias", like_x=("residual",)), {"dropout_p": 0.3}),
    "gelu": Example(_rows()),
    "bias_gelu": Example(_rows("bias"), {"approximate": "tanh"}),
    "bias_relu": Example(_rows("bias")),
    "linear": Example(_layer, {"activation": "gelu"}),
    "cross_entropy": Example(_logits, {"label_smoothing": 0.1}, view="logits"),
    "linear_cross_entropy": Example(_head, {"label_smoothing": 0.1}),
    "embedding": Example(_tables, {"scale": 1.5, "dropout_p": 0.2}, view="weight"),
    "rms_norm": Example(_rows("weight")),
    "add_rms_norm": Example(_rows("weight", like_x=("residual",)), {"dropout_p": 0.3}),
    "swiglu": Example(_gate_and_up, view="gate"),
    "geglu": Example(_gate_and_up, {"approximate": "tanh"}, view="gate"),
    "rotary": Example(_rotated, view="q"),
    "attention_weights": Example(_queries_and_keys, {"causal": True, "window": 5}, view="q"),
}
