"""Rotary positions in every backend."""

import pytest
import torch

import transformer_kernels as tk
from python_ref import ops as reference
from tests.support.arguments import normal
from tests.support.parity import check_parity

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
    check_parity(OP, backend, make(dtype, device, torch.arange(9), width, rotated), {"interleaved": interleaved})


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


def test_only_the_keys_have_a_gradient(backend, device):
    tensors = make(torch.float32, device, torch.arange(5), 16, 16)
    _, k = tk.rotary(**tensors, backend=backend)
    k.square().sum().backward()
    torch.testing.assert_close(tensors["k"].grad, 2 * tensors["k"].detach())  # a rotation keeps lengths
    assert tensors["q"].grad is None or not tensors["q"].grad.any()


Q, K = torch.ones(2, 4, 5, 16), torch.ones(2, 2, 5, 16)
COS, SIN = reference.rotary_table(torch.arange(5), 16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Q[0], K, COS, SIN), ValueError, r"q must have 4 dimensions \(B, H, L, D\); got \(4, 5, 16\)"),
        ((Q, K.half(), COS, SIN), TypeError, "q and k must have one dtype; got torch.float32 and torch.float16"),
        ((Q, K[:, :, :4], COS, SIN), ValueError, "k must have the shape of q but for its heads"),
        ((Q, K, COS[:4], SIN[:4]), ValueError, r"cos must have shape \(L, R / 2\) .* L = 5 .*; got \(4, 8\)"),
        ((Q, K, COS.repeat(1, 2), SIN), ValueError, r"R at most 16; got \(5, 16\)"),
        ((Q, K, COS[:, :0], SIN[:, :0]), ValueError, r"R at most 16; got \(5, 0\)"),
        ((Q, K, COS, SIN[:, :4]), ValueError, "cos and sin must have one shape and dtype"),
        ((Q, K, COS.double(), SIN), TypeError, "cos must have the dtype of q"),
        ((Q, K, COS.clone().requires_grad_(), SIN), ValueError, "cos has no gradient; detach it"),
        ((Q, K, COS.to("meta"), SIN), RuntimeError, "all tensors must be on one device"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"rotary: .*{message}"):
        tk.rotary(*arguments)
