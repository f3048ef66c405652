"""Packed sequences: attention within each of several concatenated sequences."""

import itertools

import pytest
import torch

import transformer_kernels as tk
from tests.support.parity import check_parity
from transformer_kernels import UnsupportedByBackend

OP = "attention"
HEADS, WIDTH = 4, 32
STARTS = {
    "one": [0, 70],
    "several": [0, 33, 34, 98, 130],
    "with empty ones": [0, 0, 40, 40, 71, 71],
    "with filler behind": [0, 17, 81],
    "aligned": [0, 64, 128, 192],
    "none": [0],
}
TOKENS = {"with filler behind": 100, "none": 5}


@pytest.fixture(params=STARTS)
def packing(request, device):
    starts = STARTS[request.param]
    return torch.tensor(starts, dtype=torch.int32, device=device), TOKENS.get(request.param, starts[-1])


@pytest.fixture(autouse=True)
def supported(backend, dtype, device):
    tensors = make(4, dtype, device)
    try:
        tk.attention(**tensors, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32, device=device), backend=backend)
    except UnsupportedByBackend as error:
        pytest.skip(str(error))


def make(tokens, dtype, device, kv_heads=HEADS):
    generator = torch.Generator().manual_seed(tokens)
    sizes = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    return {
        name: torch.randn(1, heads, tokens, WIDTH, generator=generator).to(device, dtype).requires_grad_()
        for name, heads in sizes.items()
    }


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_matches_reference(backend, dtype, device, packing, causal):
    cu_seqlens, tokens = packing
    tensors = make(tokens, dtype, device)
    check_parity("attention", backend, tensors, {"cu_seqlens": cu_seqlens, "causal": causal, "return_lse": True})


@pytest.mark.parametrize("use", list(itertools.product([False, True], repeat=4)), ids=str)
def test_matches_reference_with_all_masks_together(backend, dtype, device, use):
    causal, padded, biased, windowed = use
    cu_seqlens = torch.tensor([0, 30, 31, 75, 90], dtype=torch.int32, device=device)
    tensors = make(96, dtype, device, kv_heads=2)
    if padded:
        tensors["key_padding_mask"] = (torch.arange(96, device=device) % 5 != 3)[None]
    if biased:
        shape = (1, HEADS, 1 if causal else 96, 1 if windowed else 96)
        tensors["attn_bias"] = torch.randn(shape).to(device, dtype).requires_grad_()
    options = {"cu_seqlens": cu_seqlens, "causal": causal, "window": 9 if windowed else None, "return_lse": True}
    check_parity("attention", backend, tensors, options)


@pytest.mark.parametrize("dropout_p", [0.1, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_dropout_is_the_reference_mask(backend, dtype, device, packing, dropout_p):
    cu_seqlens, tokens = packing
    tensors = make(tokens, dtype, device)
    check_parity("attention", backend, tensors, {"cu_seqlens": cu_seqlens, "dropout_p": dropout_p}, seed=5)


def test_nothing_crosses_a_border(backend, dtype, device):
    tensors = make(100, dtype, device)
    cu_seqlens = torch.tensor([0, 37, 81], dtype=torch.int32, device=device)
    with torch.no_grad():
        for name in "kv":
            tensors[name][:, :, 37:] = float("nan")
    out = tk.attention(**tensors, cu_seqlens=cu_seqlens, backend=backend)
    assert torch.isfinite(out[:, :, :37]).all() and torch.isnan(out[:, :, 37:81]).all()
    assert (out[:, :, 81:] == 0).all()


def test_nothing_behind_the_last_sequence_gets_out(backend, dtype, device):
    tensors = make(90, dtype, device)
    with torch.no_grad():
        for name in "kv":
            tensors[name][:, :, 70:] = float("nan")
    cu_seqlens = torch.tensor([0, 33, 70], dtype=torch.int32, device=device)
    check_parity("attention", backend, tensors, {"cu_seqlens": cu_seqlens})
    out = tk.attention(**tensors, cu_seqlens=cu_seqlens, backend=backend)
    out.backward(torch.ones_like(out))
    assert torch.isfinite(out).all() and all(torch.isfinite(tensors[name].grad).all() for name in "qkv")


def test_same_bits_again(backend, dtype, device):
    def once():
        tensors = make(150, dtype, device)
        cu_seqlens = torch.tensor([0, 20, 149], dtype=torch.int32, device=device)
        torch.manual_seed(1)
        out = tk.attention(**tensors, cu_seqlens=cu_seqlens, dropout_p=0.3, backend=backend)
        out.sum().backward()
        return [out.detach(), *(tensors[name].grad for name in "qkv")]

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


def test_starts_that_numpy_changes_before_backward(backend):
    q, k, v = (torch.randn(1, 2, 8, 16).requires_grad_() for _ in range(3))
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    expected = tk.attention(q, k, v, cu_seqlens=cu_seqlens, backend=backend)
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    out = tk.attention(q, k, v, cu_seqlens=cu_seqlens, backend=backend)
    cu_seqlens.numpy()[:] = [-5, 2**30, 3]
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), wanted))
