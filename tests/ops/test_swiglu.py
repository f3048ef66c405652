"""Gated activations in every backend, from two tensors and from one packed projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "swiglu"
GATED: list[tuple[str, dict[str, Any]]] = [
    ("swiglu", {}),
    ("geglu", {"approximate": "none"}),
    ("geglu", {"approximate": "tanh"}),
]
PER_ACTIVATION = pytest.mark.parametrize(("op", "options"), GATED, ids=["swiglu", "geglu", "geglu-tanh"])
SHAPES = [(1,), (7, 1), (5, 17), (3, 5, 256), (4, 1000), (301, 40), (2, 4097)]


@PER_ACTIVATION
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_tensors_match_reference(backend, dtype, device, shape, op, options):
    tensors = {name: normal(*shape, dtype=dtype, device=device, seed=i) for i, name in enumerate(("gate", "up"))}
    check_parity(op, backend, tensors, options)


@PER_ACTIVATION
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_projection_matches_reference(backend, dtype, device, shape, op, options):
    gate = normal(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
    check_parity(op, backend, {"gate": gate}, options)


@PER_ACTIVATION
def test_far_from_zero_nothing_overflows(backend, dtype, device, op, options):
    gate = torch.tensor([[-300.0, -30.0, 0.0, 30.0, 300.0]], dtype=dtype, device=device, requires_grad=True)
    up = torch.full_like(gate, 2.0).requires_grad_()
    y = getattr(tk, op)(gate, up, **options, backend=backend)
    y.sum().backward()
    torch.testing.assert_close(y.detach()[0, [0, 2, 3, 4]].float().cpu(), torch.tensor([0.0, 0.0, 60.0, 600.0]))
    torch.testing.assert_close(gate.grad[0, [0, 4]].float().cpu(), torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(up.grad[0, 3:].float().cpu(), torch.tensor([30.0, 300.0]))
