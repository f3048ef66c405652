"""GELU in every backend."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "gelu"
APPROXIMATIONS = ("none", "tanh")


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1000,), (3, 129), (17, 1024), (5000,)], ids=str)
def test_matches_reference_over_shapes(backend, dtype, device, shape, approximate):
    tensors = {"x": normal(*shape, dtype=dtype, device=device)}
    check_parity(OP, backend, tensors, {"approximate": approximate})


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_the_whole_range(backend, dtype, device, approximate):
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, -0.0, 1e-30, 100.0, -100.0])])
    tensors = {"x": x.to(dtype).to(device).requires_grad_()}
    check_parity(OP, backend, tensors, {"approximate": approximate})


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_limits(backend, dtype, device, approximate):
    x = torch.tensor([float("inf"), float("nan"), torch.finfo(dtype).max], dtype=dtype, device=device)
    y = tk.gelu(x, approximate=approximate, backend=backend)
    if backend == "torch":  # PyTorch's kernel for the CPU gives NaN for an infinity
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate=approximate), equal_nan=True)
        return
    assert y[0] == float("inf") and torch.isnan(y[1]) and y[2] == x[2]
