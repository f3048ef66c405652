"""One example of each operation, used by generic tests, gates and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import transformer_kernels as tk
from python_ref import ops as reference
from tests.support import arguments
from tests.support.arguments import normal
from transformer_kernels.backends import dispatch

Tensors = dict[str, Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Example:
    """A call with `rows` rows of `columns`; for attention, sequences of `rows` tokens in heads of `columns`.

    `tensors` creates the tensor arguments, `options` are the others, `view` names the tensor that tests replace by one
    with other strides, a storage offset or no elements.
    """

    tensors: Callable[[int, int, torch.dtype, torch.device], Tensors]
    options: dict[str, Any] = field(default_factory=dict)
    view: str = "x"

    def make(self, rows=12, columns=64, dtype=torch.float32, device=CPU):
        """The tensors, leaves that require gradients if differentiable."""
        return self.tensors(rows, columns, dtype, device)


def _rows(*parameters, like_x=()):
    """x (rows, columns), others of its shape, and parameters (columns,)."""
    make = arguments.rows(*parameters, like_x=like_x)
    return lambda rows, columns, dtype, device: make(dtype, device, rows, columns)


def _targets(rows, classes, device):
    """A class for each row, one of them ignored."""
    targets = torch.arange(rows, device=device) * 7 % classes
    return targets.masked_fill(torch.arange(rows, device=device) == 1, -100)


def _logits(rows, columns, dtype, device):
    logits = normal(rows, columns, dtype=dtype, device=device, seed=1)
    return {"logits": logits, "targets": _targets(rows, columns, device)}


def _head(rows, columns, dtype, device):
    classes = 17
    return {
        "x": normal(rows, columns, dtype=dtype, device=device, seed=1),
        "weight": normal(classes, columns, dtype=dtype, device=device, seed=2),
        "targets": _targets(rows, classes, device),
        "bias": normal(classes, dtype=dtype, device=device, seed=3),
    }


def _layer(rows, columns, dtype, device):
    return {
        "x": normal(rows, columns, dtype=dtype, device=device, seed=1),
        "weight": normal(19, columns, dtype=dtype, device=device, seed=2),
        "bias": normal(19, dtype=dtype, device=device, seed=3),
    }


def _tables(rows, columns, dtype, device):
    """Two sequences, each of half the rows."""
    length = rows // 2
    return {
        "tokens": (torch.arange(2 * length, device=device) * 5 % 11).view(2, length),
        "weight": normal(11, columns, dtype=dtype, device=device, seed=1),
        "positions": normal(length + 3, columns, dtype=dtype, device=device, seed=2),
        "norm_weight": normal(columns, dtype=dtype, device=device, seed=3),
        "norm_bias": normal(columns, dtype=dtype, device=device, seed=4),
    }


def _heads(rows, columns, dtype, device):
    return {
        name: normal(2, heads, rows, columns, dtype=dtype, device=device, seed=i)
        for i, (name, heads) in enumerate((("q", 4), ("k", 2), ("v", 2)))
    }


def _packed(rows, columns, dtype, device):
    return {"qkv": normal(2, rows, 8, columns, dtype=dtype, device=device, seed=1)}


def _gate_and_up(rows, columns, dtype, device):
    return {
        name: normal(rows, columns, dtype=dtype, device=device, seed=i)
        for i, name in enumerate(("gate", "up"), start=1)
    }


def _queries_and_keys(rows, columns, dtype, device):
    heads = _heads(rows, columns, dtype, device)
    return {"q": heads["q"], "k": heads["k"]}


def _rotated(rows, columns, dtype, device):
    """The first half of the columns is rotated."""
    positions = torch.arange(2 * rows, device=device).view(2, rows)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = reference.rotary_table(positions, max(2, columns // 4 * 2), dtype=wide)
    return {**_queries_and_keys(rows, columns, dtype, device), "cos": cos, "sin": sin}


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


ROW_OPERATIONS = [op for op in EXAMPLES if "attention" not in op and op not in ("linear_cross_entropy",)]
"""Operations with their own row kernels."""


def row_operations(backend):
    """The row operations that the backend supports: all with an example except attention."""
    return [op for op in ROW_OPERATIONS if dispatch.family(dispatch.OPERATIONS[op].folder, backend) is not None]


def function(op, backend=None):
    """The public operation with the options of its example, as a function of the example's tensors."""
    options = EXAMPLES[op].options
    return lambda **tensors: getattr(tk, op)(**tensors, **options, backend=backend)


def prepared(op, *arguments, **options):
    """The validated call of an operation, from the arguments of its public function."""
    return dispatch.OPERATIONS[op].prepare(*arguments, **options)


def backward(module, call, result, *grads, wanted=None):
    """A backend's backward for a call and its forward result; all gradients are required unless `wanted` is given."""
    operation = next(each for each in dispatch.OPERATIONS.values() if each.call is type(call))
    return module.backward(call, result, grads, wanted or (True,) * len(operation.differentiable))


def dispatched(monkeypatch):
    """The operations whose calls are validated and dispatched from here on, one name for each such call."""
    names = []
    select = dispatch.select

    def counted(operation, backend, call):
        names.append(operation.name)
        return select(operation, backend, call)

    monkeypatch.setattr(dispatch, "select", counted)
    return names


@contextmanager
def without_plans(kept=dict):
    """Within this context calls are not planned as before it, nor after it as within; `kept` makes the new plans."""
    with ExitStack() as stack:
        for operation in dispatch.OPERATIONS.values():
            for plans in ("plans", "calls"):
                stack.enter_context(mock.patch.object(operation, plans, kept()))
        yield
