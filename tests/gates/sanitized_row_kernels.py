"""Every row kernel in every layout on small inputs, emulated or compiled for the CPU; run by test_sanitizers.py.

Results are compared with the torch backend with a loose tolerance; the parity suite has the budgets.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.operations import EXAMPLES, row_operations
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends import dispatch

# (rows, columns): a row per warp, per block and in a loop, with vectors and without
SHAPES = [(9, 40), (6, 37), (5, 264), (3, 1000), (3, 131), (2, 1032), (2, 1027), (1, 4104), (1, 8200)]

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "softmax": [{"causal": False}],
    "gelu": [{"approximate": "tanh"}],
    "bias_gelu": [{"approximate": "none"}],
    "cross_entropy": [{"label_smoothing": 0.0}],
    "swiglu": [{"gate": torch.linspace(-3.0, 3.0, 60).view(3, 20).requires_grad_(), "up": None}],
    "geglu": [{"approximate": "none"}],
    "rotary": [{"interleaved": True}],
    "embedding": [{"norm_weight": None, "norm_bias": None, "position_ids": torch.tensor([[1, 0], [2, 2]])}],
}
"""Additional calls of an operation, as changes to its example."""


def results(op, backend, tensors, options):
    """Outputs and gradients."""
    leaves = {
        name: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for name, x in tensors.items()
    }
    torch.manual_seed(5)
    outputs = getattr(tk, op)(**leaves, **options, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.full_like(output, 0.6) for output in outputs])
    grads = [x.grad for x in leaves.values() if isinstance(x, Tensor) and x.grad is not None]
    return [*(output.detach() for output in outputs), *grads]


def check(backend, op, rows, columns, dtype, changes):
    rows = 4 if "position_ids" in changes else rows + rows % 2 if op == "embedding" else rows
    arguments = {**EXAMPLES[op].make(rows, columns, dtype), **EXAMPLES[op].options, **changes}
    options = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if op == "cross_entropy" and rows < 2:
        tensors["targets"] = tensors["targets"].clamp(min=0)  # the mean of no rows is NaN
    for ours, theirs in zip(*(results(op, backend, tensors, options) for backend in (backend, "torch")), strict=True):
        name = f"{backend} {op} {(rows, columns)} {dtype} {changes}"
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05, msg=lambda m, name=name: f"{name}: {m}")


def check_logits_in_place(backend, rows, columns, dtype):
    """The gradient overwrites rows of logits with gaps between them."""
    from transformer_kernels.ops.loss import _torch
    from transformer_kernels.ops.loss._calls import RowLoss

    kernels = dispatch.family("transformer_kernels.ops.loss", backend)

    logits = EXAMPLES["cross_entropy"].make(rows, columns, dtype)["logits"].detach()
    gapped, copy = logits.clone()[:, : columns - 1], logits[:, : columns - 1].clone()
    targets = torch.arange(rows) % (columns - 1)
    ours, theirs = (
        (module.row_losses(x, targets, RowLoss(-100, 0.1), in_place=True), x)
        for module, x in ((kernels, gapped), (_torch.Kernels, copy))
    )
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def check_all(backend, dtype):
    for rows, columns in SHAPES:
        check_logits_in_place(backend, rows, columns, dtype)
        for op in row_operations(backend):
            for changes in ({}, *VARIANTS.get(op, [])):
                check(backend, op, rows, columns, dtype, changes)


def main():
    torch.set_num_threads(1)
    module = _extension.load()
    for number, (kind, dtype) in enumerate([("lowest_first", torch.float16), ("random", torch.float32)]):
        module.set_schedule(kind, number)
        check_all("cuda", dtype)
    print("row kernels ran", module.counters())


if __name__ == "__main__":
    sys.exit(main())
