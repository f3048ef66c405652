"""Attention on a packed projection in every backend: the same results as on three views, one packed gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from python_ref.ops import rotary_table
from tests.support.parity import check_parity

OP = "attention"


def make(dtype, device, heads=6, length=33, batch=2):
    generator = torch.Generator().manual_seed(heads + length)
    return {"qkv": torch.randn(batch, length, heads, 32, generator=generator).to(device, dtype).requires_grad_()}


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "scale": {"scale": 0.3},
    "dropout": {"causal": True, "dropout_p": 0.2},
}


@pytest.mark.parametrize(("call", "length"), [*((call, 33) for call in CALLS), ("full", 64), ("dropout", 130)])
def test_matches_reference(backend, dtype, device, call, length):
    tensors = make(dtype, device, length=length)
    check_parity("packed_attention", backend, tensors, {"heads": 2, **CALLS[call]}, seed=3)


def test_grouped_heads_with_padding(backend, dtype, device):
    tensors = make(dtype, device, heads=8)
    tensors["key_padding_mask"] = (torch.arange(33) < torch.tensor([[33], [20]])).to(device)
    check_parity("packed_attention", backend, tensors, {"heads": 4, "causal": True})


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("each_its_own", [False, True], ids=["positions", "positions_each"])
def test_rotated(backend, dtype, device, interleaved, each_its_own):
    """24 of 32 columns are rotated; `each_its_own`: positions of the second sequence have a stride of two."""
    tensors = make(dtype, device, heads=8)
    positions = torch.stack((torch.arange(33), torch.arange(40, 106, 2))) if each_its_own else torch.arange(33)
    tensors["cos"], tensors["sin"] = (table.to(device) for table in rotary_table(positions, 24))
    options = {"heads": 4, "causal": True, "interleaved": interleaved, "dropout_p": 0.2 if each_its_own else 0.0}
    check_parity("packed_attention", backend, tensors, options)


@pytest.mark.parametrize("rotated", [False, True], ids=["in place", "rotated"])
def test_options_of_scores(backend, device, rotated):
    tensors = make(torch.float32, device, heads=8)
    if rotated:
        tensors["cos"], tensors["sin"] = (table.to(device) for table in rotary_table(torch.arange(33), 24))
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device=device)
    bias = torch.randn(4, 33, 33, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    for masks, options in (
        ({"attn_bias": bias}, {"window": (3, 9), "softcap": 2.0}),
        ({"alibi_slopes": slopes}, {"causal": True, "dropout_p": 0.2}),
        ({"alibi_slopes": slopes}, {"softcap": 2.0}),
    ):
        check_parity("packed_attention", backend, {**tensors, **masks}, {"heads": 4, **options})


@pytest.mark.parametrize("length", [33, 1])
@pytest.mark.parametrize(("dropout_p", "rotated"), [(0.0, False), (0.3, False), (0.0, True)])
def test_is_attention_on_views(backend, dtype, device, dropout_p, rotated, length):
    """Bitwise. For a single position the gradients of q and k are rounding errors of terms that cancel, which have no
    budget: they are compared here only."""
    qkv = make(dtype, device, heads=8, length=length)["qkv"]
    assert qkv is not None
    cos, sin = (table.to(device) if rotated else None for table in rotary_table(torch.arange(length), 32))
    torch.manual_seed(0)
    interleaved = backend == "triton"  # loads pairs from halves adjacently, which changes the summation order of scores
    options: dict[str, Any] = {"causal": True, "dropout_p": dropout_p, "backend": backend}
    packed = tk.packed_attention(qkv, heads=4, cos=cos, sin=sin, interleaved=interleaved, **options)
    (gradient,) = torch.autograd.grad(packed, qkv, torch.ones_like(packed))
    torch.manual_seed(0)
    q, k, v = (part.transpose(1, 2) for part in qkv.split([4, 2, 2], dim=2))
    if cos is not None and sin is not None:
        q, k = tk.rotary(q, k, cos, sin, interleaved=interleaved, backend=backend)
    out = tk.attention(q, k, v, **options)
    (wanted,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert packed.is_contiguous() and packed.shape == (2, length, 128)
    assert torch.equal(packed, out.transpose(1, 2).flatten(2))
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("rotated", [False, True], ids=["in place", "rotated"])
def test_sinks(backend, dtype, device, rotated):
    tensors = make(dtype, device, heads=8)
    tensors["sinks"] = torch.tensor([0.5, -torch.inf, 3.0, -2.0], device=device).requires_grad_()
    if rotated:
        tensors["cos"], tensors["sin"] = (table.to(device) for table in rotary_table(torch.arange(33), 24))
    check_parity("packed_attention", backend, tensors, {"heads": 4, "causal": True, "window": 9, "dropout_p": 0.1})
