"""Bias and GELU in every backend."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "bias_gelu"
APPROXIMATIONS = ("none", "tanh")


def make(dtype: torch.dtype, device: torch.device, *shape: int, parameters: torch.dtype | None = None) -> dict:
    return {
        "x": normal(*shape, dtype=dtype, device=device, seed=1),
        "bias": normal(shape[-1], dtype=parameters or dtype, device=device, seed=2),
    }


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize(
    "shape", [(1,), (7, 1), (5, 3), (33, 127), (4, 1024), (3, 5, 512), (301, 40), (2, 4097)], ids=str
)
def test_matches_reference_over_shapes(
    backend: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], approximate: str
) -> None:
    check_parity(OP, backend, make(dtype, device, *shape), {"approximate": approximate})


def test_float32_bias(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    check_parity(OP, backend, make(dtype, device, 33, 96, parameters=torch.float32))


def test_only_the_wanted_gradients(backend: str, device: torch.device) -> None:
    tensors = make(torch.float32, device, 12, 64)
    tensors["bias"].requires_grad_(False)
    check_parity(OP, backend, tensors)


def test_same_bits_again(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    def once() -> list[torch.Tensor]:
        tensors = make(dtype, device, 301, 96)
        y = tk.bias_gelu(**tensors, backend=backend)
        y.backward(torch.ones_like(y) * 0.37)
        return [y.detach(), tensors["x"].grad, tensors["bias"].grad]

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "misaligned"])
def test_any_layout(backend: str, dtype: torch.dtype, device: torch.device, kind: str) -> None:
    tensors = make(dtype, device, 12, 64)
    views = {
        "transposed": lambda: normal(64, 12, dtype=dtype, device=device).detach().T,
        "sliced": lambda: normal(12, 100, dtype=dtype, device=device).detach()[:, 7:71],
        "expanded": lambda: normal(1, 64, dtype=dtype, device=device).detach().expand(12, 64),
        "misaligned": lambda: normal(12 * 64 + 1, dtype=dtype, device=device).detach()[1:].view(12, 64),
    }
    tensors["x"] = views[kind]().requires_grad_()
    check_parity(OP, backend, tensors)


def test_empty(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    tensors = make(dtype, device, 0, 8)
    y = tk.bias_gelu(**tensors, backend=backend)
    y.sum().backward()
    assert y.shape == (0, 8) and (tensors["bias"].grad == 0).all()


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gradcheck_in_float64(device: torch.device, approximate: str) -> None:
    tensors = make(torch.float64, device, 3, 5)
    function = lambda x, bias: tk.bias_gelu(x, bias, approximate=approximate, backend="torch")  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(tensors.values()))
