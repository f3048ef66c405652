"""The same bits at every instruction set: of each operation by default, and of whole runs in reproducible mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import DTYPES, dtype_id
from transformer_kernels.backends import cpu
from transformer_kernels.verification.examples import EXAMPLES

if cpu.unavailable(torch.device("cpu")) is not None:
    pytest.skip("the CPU kernels are not built", allow_module_level=True)

KERNELS = cpu.load()
FUSING = [level for level in KERNELS.instruction_sets if level in ("avx2", "avx512")]
"""The levels with a fused multiply-add and no products of bfloat16 with an order of their own."""

SHAPES = [(6, 5), (10, 37), (150, 128), (67, 90), (4, 515), (33, 64)]

OPTIONS = {
    "layer_norm": {},
    "rms_norm": {},
    "add_layer_norm": {"dropout_p": 0.3},
    "cross_entropy": {"label_smoothing": 0.1, "softcap": 20.0, "z_loss": 0.01},
    "attention": {"causal": True, "window": 20, "softcap": 9.0, "dropout_p": 0.2},
}
"""Options beside those of an operation's example."""


def hashable(*tensors):
    return [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in tensors]


def results(op, options, shape, dtype):
    """The bits of an operation's outputs and gradients."""
    tensors = EXAMPLES[op].make(*shape, dtype)
    if op == "cross_entropy":
        tensors["targets"] = tensors["targets"].clamp(max=shape[1] - 1)
    torch.manual_seed(3)
    outputs = getattr(tk, op)(**tensors, **options, backend="cpu")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(4)
    torch.autograd.backward(outputs, [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs])
    return hashable(*outputs, *(x.grad for x in tensors.values() if isinstance(x, Tensor) and x.grad is not None))


def at_each_level(levels, make):
    """make() at each of these instruction sets."""
    used, found = KERNELS.instruction_set(), []
    try:
        for level in levels:
            KERNELS.use(level)
            found.append(make())
    finally:
        KERNELS.use(used)
    return found


needs_two = pytest.mark.skipif(len(FUSING) < 2, reason="needs the levels avx2 and avx512")


@needs_two
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("varied", [False, True], ids=["example", "varied"])
@pytest.mark.parametrize("op", EXAMPLES)
def test_instruction_sets_compute_the_same_bits(op, varied, dtype):
    """By default: sums have one order, whatever the width of a register."""
    if varied and op not in OPTIONS:
        pytest.skip("no other options")
    options = {**EXAMPLES[op].options, **(OPTIONS[op] if varied else {})}
    for rows, columns in SHAPES:
        shape = (rows + rows % 2, columns + columns % 2)  # pairs of columns and two sequences
        first, *others = at_each_level(FUSING, lambda shape=shape: results(op, options, shape, dtype))
        for other in others:
            assert all(map(torch.equal, first, other)), shape
