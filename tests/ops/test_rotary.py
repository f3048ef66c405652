"""Rotary positions in every backend."""

import pytest
import torch

import transformer_kernels as tk
from python_ref import ops as reference
from tests.support.arguments import normal
from tests.support.parity import check_parity
from transformer_kernels.ops.rotary import _torch

OP = "rotary"


def make(dtype, device, positions, width, rotated, kv_heads=2):
    batch, length = (2, len(positions)) if positions.dim() == 1 else positions.shape
    cos, sin = reference.rotary_table(positions.to(device), rotated)
    return {
        "q": normal(batch, 4, length, width, dtype=dtype, device=device, seed=1),
        "k": normal(batch, kv_heads, length, width, dtype=dtype, device=device, seed=2),
        "cos": cos,
        "sin": sin,
    }


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("width", "rotated"), [(64, 64), (64, 32), (2, 2), (7, 6), (24, 2), (128, 128), (80, 20)])
def test_matches_reference(backend, dtype, device, width, rotated, interleaved):
    tensors = make(dtype, device, torch.arange(9), width, rotated)
    if interleaved:
        tensors |= {name: tensors[name].to(dtype) for name in ("cos", "sin")}
    check_parity(OP, backend, tensors, {"interleaved": interleaved})


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_each_sequence_has_its_own_positions(backend, device, interleaved):
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 1000]])
    tensors = make(torch.float32, device, positions, 32, 32, kv_heads=1)
    check_parity(OP, backend, tensors, {"interleaved": interleaved})


def test_heads_of_a_packed_projection_are_read_where_they_are(backend, device):
    packed = normal(2, 5, 8, 32, dtype=torch.float32, device=device).detach()
    tensors = make(torch.float32, device, torch.arange(5), 32, 32)
    views = {"q": packed[:, :, :4].transpose(1, 2), "k": packed[:, :, 4:6].transpose(1, 2)}
    check_parity(OP, backend, {**tensors, **{name: view.requires_grad_() for name, view in views.items()}})
    assert tk.rotary(**{**tensors, **views}, backend=backend)[0].is_contiguous()


def test_queries_alone_are_rotated_by_the_backend(backend, dtype, device, monkeypatch):
    """With keys of no heads, as in a graph, which rotates each tensor by itself."""
    if backend != "torch":
        monkeypatch.delattr(_torch.Kernels, "rotate")
    results = []
    for kv_heads in (2, 0):
        tensors = make(dtype, device, torch.arange(9), 64, 64, kv_heads)
        q, k = tk.rotary(**tensors, backend=backend)
        q.square().sum().backward()
        results.append((q, tensors["q"].grad))
        assert k.shape == tensors["k"].shape
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_only_the_keys_have_a_gradient(backend, device):
    tensors = make(torch.float32, device, torch.arange(5), 16, 16)
    _, k = tk.rotary(**tensors, backend=backend)
    k.square().sum().backward()
    torch.testing.assert_close(tensors["k"].grad, 2 * tensors["k"].detach())  # a rotation keeps lengths
    assert tensors["q"].grad is None or not tensors["q"].grad.any()
