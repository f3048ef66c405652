"""varlen_attn of torch in `accelerate`, on the CPU, where PyTorch has none: against each sequence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import transformer_kernels as tk
from transformer_kernels import BackendUnavailable
from transformer_kernels.backends import cpu

try:
    cpu.load()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

STARTS, OTHER_STARTS = torch.tensor([0, 7, 7, 40]).int(), torch.tensor([0, 9, 12, 60]).int()


def made(tokens, heads):
    return torch.randn(tokens, heads, 16, generator=torch.Generator().manual_seed(tokens + heads))


def by_sequence(q, k, v, starts, key_starts, window):
    """Each sequence by PyTorch in float64; causality and windows are aligned to its last key."""
    parts = []
    spans = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
    for (first, end), (first_key, end_key) in spans:
        keys = torch.arange(end_key - first_key)
        queries = torch.arange(end - first)[:, None] + len(keys) - (end - first)
        left, right = (1000 if reach < 0 else reach for reach in window)
        mask = (keys >= queries - left) & (keys <= queries + right)
        rows = [x.transpose(0, 1)[None] for x in (q[first:end], k[first_key:end_key], v[first_key:end_key])]
        parts.append(scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 2)], ids=str)
@pytest.mark.parametrize("packing", ["alike", "apart"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_outputs_and_gradients(window, packing, heads):
    key_starts = STARTS if packing == "alike" else OTHER_STARTS
    tensors = [made(40, heads[0]), made(int(key_starts[-1]), heads[1]), made(int(key_starts[-1]), heads[1])]
    ours, exact = [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]
    with tk.accelerate() as block:
        out = varlen.varlen_attn(*ours, STARTS, key_starts, 40, 60, window_size=window, enable_gqa=heads[0] != heads[1])
    wanted = by_sequence(*exact, STARTS, key_starts, window)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=1e-5)
    gradients = torch.autograd.grad(out, ours, cotangent), torch.autograd.grad(wanted, exact, cotangent.double())
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)
    assert [tuple(row) for row in block.report().rows] == [("attention", "cpu", None, 1)]


def test_outside_a_block_it_is_pytorchs():
    q = made(40, 2)
    with tk.accelerate():
        assert varlen.varlen_attn(q, q, q, STARTS, STARTS, 40, 40).shape == q.shape
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(q, q, q, STARTS, STARTS, 40, 40)


def test_what_has_no_counterpart_is_left_with_its_reason():
    q = made(40, 2)
    used = torch.tensor([7, 0, 20]).int()
    with tk.accelerate() as block, pytest.raises(NotImplementedError):
        varlen.varlen_attn(q, q, q, STARTS, STARTS, 40, 40, seqused_k=used)
    assert "used in part" in str(block.report())
