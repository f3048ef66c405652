"""GELU in every backend."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "gelu"
APPROXIMATIONS = ("none", "tanh")


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1000,), (3, 129), (17, 1024), (5000,)], ids=str)
def test_matches_reference_over_shapes(
    backend: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], approximate: str
) -> None:
    tensors = {"x": normal(*shape, dtype=dtype, device=device)}
    check_parity(OP, backend, tensors, {"approximate": approximate})


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_the_whole_range(backend: str, dtype: torch.dtype, device: torch.device, approximate: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, -0.0, 1e-30, 100.0, -100.0])])
    tensors = {"x": x.to(dtype).to(device).requires_grad_()}
    check_parity(OP, backend, tensors, {"approximate": approximate})


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_limits(backend: str, dtype: torch.dtype, device: torch.device, approximate: str) -> None:
    x = torch.tensor([float("inf"), float("nan"), torch.finfo(dtype).max], dtype=dtype, device=device)
    y = tk.gelu(x, approximate=approximate, backend=backend)
    if backend == "torch":  # PyTorch's kernel for the CPU gives NaN for an infinity
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate=approximate), equal_nan=True)
        return
    assert y[0] == float("inf") and torch.isnan(y[1]) and y[2] == x[2]


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "misaligned"])
def test_any_layout(backend: str, dtype: torch.dtype, device: torch.device, kind: str) -> None:
    views = {
        "transposed": lambda: normal(64, 12, dtype=dtype, device=device).detach().T,
        "sliced": lambda: normal(12, 100, dtype=dtype, device=device).detach()[:, 7:71],
        "expanded": lambda: normal(1, 64, dtype=dtype, device=device).detach().expand(12, 64),
        "misaligned": lambda: normal(12 * 64 + 1, dtype=dtype, device=device).detach()[1:],
    }
    check_parity(OP, backend, {"x": views[kind]().requires_grad_()})


def test_empty(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    x = normal(0, 8, dtype=dtype, device=device)
    y = tk.gelu(x, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 8)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gradcheck_in_float64(device: torch.device, approximate: str) -> None:
    x = normal(11, dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(lambda x: tk.gelu(x, approximate=approximate, backend="torch"), (x,))
