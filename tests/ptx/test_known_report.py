"""The wgmma that read what `cp.async` wrote without `fence.proxy.async` (tests/support/ptx/README.md), on a GPU."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.parity import require

REPEATS = 1000


def repeated(device, dtype, width, length, repeats):
    """Attention and its gradients again and again; returns how many repeats differ from the first in any bit."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, 4, length, width, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def results():
        out = tk.attention(*leaves, causal=True, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    first = results()
    return sum(not all(map(torch.equal, first, results())) for _ in range(repeats))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_repeats_of_attention_are_equal_bit_for_bit(dtype, width, device):
    """A product that reads a tile before the copy is visible to it would differ from time to time."""
    require("attention", "triton", device, dtype)
    assert repeated(device, dtype, width, 1024, REPEATS) == 0
