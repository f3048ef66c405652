"""One example of each operation: the smoke cases of its kernels, and what generic tests, gates and benchmarks call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Any]
Shapes = Callable[[int, int], dict[str, tuple[int, ...]]]
CPU = torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """A standard normal leaf that requires grad, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def _nothing(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {}


@dataclass(frozen=True)
class Example:
    """A call with `rows` rows of `columns`; for attention, sequences of `rows` tokens in heads of `columns`.

    `shapes` are those of the tensors that have gradients, `others` makes the other tensors, `options` are the other
    arguments, `view` names the tensor that tests replace by one with other strides, a storage offset or no elements.
    """

    shapes: Shapes
    options: dict[str, Any] = field(default_factory=dict)
    view: str = "x"
    others: Callable[[int, int, torch.dtype, torch.device], Tensors] = _nothing

    def make(
        self, rows: int = 12, columns: int = 64, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> Tensors:
        """The tensors, leaves that require gradients if differentiable."""
        tensors = {
            name: normal(*shape, dtype=dtype, device=device, seed=seed)
            for seed, (name, shape) in enumerate(self.shapes(rows, columns).items(), start=1)
        }
        return tensors | self.others(rows, columns, dtype, device)


def _rows(*parameters: str, like_x: tuple[str, ...] = ()) -> Shapes:
    """x (rows, columns), others of its shape, and parameters (columns,)."""
    return lambda rows, columns: {
        **dict.fromkeys(("x", *like_x), (rows, columns)),
        **dict.fromkeys(parameters, (columns,)),
    }


def _layer(outputs: int) -> Shapes:
    """The operands of a linear layer."""
    return lambda rows, columns: {"x": (rows, columns), "weight": (outputs, columns), "bias": (outputs,)}


def _heads(*names: str) -> Shapes:
    """Two sequences of these, with 4 heads of queries and 2 of keys and values."""
    return lambda rows, columns: {name: (2, 4 if name == "q" else 2, rows, columns) for name in names}


def _tables(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    tables = {"weight": (11, columns), "positions": (rows // 2 + 3, columns)}
    return {**tables, "norm_weight": (columns,), "norm_bias": (columns,)}


def _gate_and_up(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"gate": (rows, columns), "up": (rows, columns)}


def _tokens(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Two sequences, each of half the rows."""
    return {"tokens": (torch.arange(rows // 2 * 2, device=device) * 5 % 11).view(2, -1)}


def _targets(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """A class for each row, one of them ignored."""
    row = torch.arange(rows, device=device)
    return {"targets": (row * 7 % classes).masked_fill(row == 1, -100)}


def _angles(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """The first half of the columns is rotated."""
    positions = torch.arange(2 * rows, device=device, dtype=torch.float64).view(2, rows, 1)
    rotated = max(2, columns // 4 * 2)
    angles = positions / 10000.0 ** (torch.arange(0, rotated, 2, device=device) / rotated)
    wide = torch.promote_types(dtype, torch.float32)
    return {"cos": angles.cos().to(wide), "sin": angles.sin().to(wide)}


EXAMPLES: dict[str, Example] = {
    "attention": Example(_heads("q", "k", "v"), {"causal": True, "dropout_p": 0.2}, view="q"),
    "packed_attention": Example(
        lambda rows, columns: {"qkv": (2, rows, 8, columns)},
        {"heads": 4, "causal": True, "dropout_p": 0.2},
        view="qkv",
    ),
    "softmax": Example(_rows(), {"causal": True, "scale": 0.5}),
    "layer_norm": Example(_rows("weight", "bias")),
    "add_layer_norm": Example(_rows("weight", "bias", like_x=("residual",)), {"dropout_p": 0.3}),
    "gelu": Example(_rows()),
    "bias_gelu": Example(_rows("bias"), {"approximate": "tanh"}),
    "bias_relu": Example(_rows("bias")),
    "linear": Example(_layer(19), {"activation": "gelu"}),
    "cross_entropy": Example(
        lambda rows, columns: {"logits": (rows, columns)}, {"label_smoothing": 0.1}, view="logits", others=_targets
    ),
    "linear_cross_entropy": Example(
        _layer(17), {"label_smoothing": 0.1}, others=lambda rows, _, *made: _targets(rows, 17, *made)
    ),
    "embedding": Example(_tables, {"scale": 1.5, "dropout_p": 0.2}, view="weight", others=_tokens),
    "rms_norm": Example(_rows("weight")),
    "add_rms_norm": Example(_rows("weight", like_x=("residual",)), {"dropout_p": 0.3}),
    "swiglu": Example(_gate_and_up, view="gate"),
    "geglu": Example(_gate_and_up, {"approximate": "tanh"}, view="gate"),
    "rotary": Example(_heads("q", "k"), view="q", others=_angles),
    "attention_weights": Example(_heads("q", "k"), {"causal": True, "window": 5}, view="q"),
}
