"""Rows with large scores only: a bias of -1e4 to the lowest float32, or products near 1,024.

Scores are multiples of 1/4, so that all backends round them equally: the oracle is float64 on the rounded scores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from python_ref import ops
from tests.support.parity import backend_fixture

backend = backend_fixture(*tk.BACKENDS, op="attention")

SCALE = 0.25
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Limit of the relative error of a result or gradient in the Euclidean norm."""


def quarters(*shape, seed):
    """-1, 0 and 1 at random."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def make(queries, keys, near, level, biased_rows):
    """q, k, v and a bias, `level` in its first rows and small in the others; products are close to `near`."""
    q, k, v = quarters(1, 2, queries, 16, seed=1), quarters(1, 1, keys, 16, seed=2), quarters(1, 1, keys, 16, seed=3)
    if near:
        q[..., 0], k[..., 0] = 16.0, near / SCALE / 16.0
    bias = quarters(1, 2, queries, keys, seed=4)
    bias[:, :, :biased_rows] = level
    return {"q": q, "k": k, "v": v, "attn_bias": bias}


def oracle(tensors, dout, dlse):
    """out, lse, dq, dk, dv and dbias in float64 from scores rounded to float32."""
    q, k, v, bias = (x.double().requires_grad_() for x in tensors.values())
    exact = SCALE * (q @ k.transpose(-2, -1)) + bias
    rounded = (SCALE * (tensors["q"] @ tensors["k"].transpose(-2, -1)) + tensors["attn_bias"]).double()
    scores = exact + (rounded - exact).detach()
    top = scores.amax(-1, keepdim=True).detach()
    lse = (top + (scores - top).exp().sum(-1, keepdim=True).log()).squeeze(
        -1
    )  # logsumexp's gradient would be wrong too
    out = scores.softmax(-1) @ v
    gradients = torch.autograd.grad((out, lse), (q, k, v, bias), (dout.double(), dlse.double()))
    return [out.detach(), lse.detach(), *gradients]


CASES: dict[str, tuple[float, float]] = {
    "-1e4": (0.0, -1e4),
    "-1e6": (0.0, -1e6),
    "-1e9": (0.0, -1e9),
    "least": (0.0, torch.finfo(torch.float32).min),
    "products": (1024.0, 0.0),
}


@pytest.mark.parametrize("shape", [(4, 65), (20, 33), (70, 150), (1, 700)], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_rounded_scores(backend, case, dtype, shape, device):
    if case == "products" and backend == "torch" and dtype is torch.bfloat16:
        pytest.skip("its products are rounded to bfloat16, as eager PyTorch's are")
    limit = LIMITS[dtype]
    if case == "-1e6" and backend == "triton" and dtype is torch.bfloat16:
        limit = 5e-2  # in base 2 scores near 1e6 are rounded to 1/8
    tensors = make(*shape, *CASES[case], biased_rows=max(1, shape[0] // 3))
    dout = quarters(1, 2, shape[0], 16, seed=5)
    dlse = quarters(1, 2, shape[0], seed=6)
    want = oracle(tensors, dout, dlse)
    options: dict[str, Any] = {"scale": SCALE, "return_lse": True, "backend": backend}
    for wanted in (("q", "k", "v", "attn_bias"), ("q", "k", "v")):
        given = {
            name: x.to(device, torch.float32 if name == "attn_bias" else dtype).requires_grad_(name in wanted)
            for name, x in tensors.items()
        }
        out, lse = tk.attention(**given, **options)
        requested = [given[name] for name in wanted]
        gradients = torch.autograd.grad((out, lse), requested, (dout.to(out), dlse.to(lse)))
        names = ("out", "lse", *(f"d{name}" for name in wanted))
        for name, got, exact in zip(names, (out, lse, *gradients), want, strict=False):
            if name == "lse" and backend == "triton" and case == "least" and dtype is not torch.float32:
                continue  # in base 2 the least score is -2.4e38
            error = ((got.cpu().double() - exact).norm() / exact.norm()).item()
            assert error <= limit, f"{name}: relative error {error:.1e}"


def test_gradients_without_that_of_lse(backend, device):
    """PyTorch's fused kernels support such calls."""
    for case, (near, level) in CASES.items():
        tensors = make(4, 65, near, level, biased_rows=1)
        dout = quarters(1, 2, 4, 16, seed=5)
        _, _, *want = oracle(tensors, dout, torch.zeros(1, 2, 4))
        given = {name: x.to(device).requires_grad_(name != "attn_bias") for name, x in tensors.items()}
        out = tk.attention(**given, scale=SCALE, backend=backend)
        gradients = torch.autograd.grad(out, [given[name] for name in "qkv"], dout.to(out))
        for name, got, exact in zip(("dq", "dk", "dv"), gradients, want, strict=False):
            error = ((got.cpu().double() - exact).norm() / exact.norm()).item()
            assert error <= (3e-5 if near else 1e-5), f"{case} {name}: relative error {error:.1e}"


@pytest.mark.parametrize("shape", [(16,), (1, 16), (16, 16)], ids=str)
def test_float64_with_a_float32_bias(device, shape):
    """PyTorch's fused kernel reads the mask as float64."""
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(shape, device=device)
    got = tk.attention(q, k, v, attn_bias=bias, backend="torch")
    want = ops.attention(q, k, v, attn_bias=bias.double())
    torch.testing.assert_close(got, want)
    for ours, exact in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)), strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("queries", [1, 2, 9])
@pytest.mark.parametrize("keys", [5, 1500])
def test_a_scale_of_zero_and_padding_everywhere(backend, device, queries, keys):
    """Weights of the real keys are equal; a fully masked query gives 0, not NaN."""
    q, k, v = (torch.randn(2, 2, length, 8, device=device, requires_grad=True) for length in (queries, keys, keys))
    real = torch.zeros(2, keys, dtype=torch.bool, device=device)
    real[1, 2:5] = True
    out, lse = tk.attention(q, k, v, key_padding_mask=real, scale=0.0, return_lse=True, backend=backend)
    mean = v[1, :, 2:5].mean(dim=1, keepdim=True).expand(2, queries, 8)
    torch.testing.assert_close(out, torch.stack((torch.zeros_like(mean), mean)))
    assert (lse[0] == -torch.inf).all() and (lse[1] - torch.tensor(3.0).log().item()).abs().max() < 1e-6
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all() and not gradient[0].any()
