"""GELU in Triton: the fitted tail of the normal distribution against the formula in float32."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.operations import backward, prepared
from tests.support.parity import backend_fixture

OP = "gelu"
backend = backend_fixture("triton")


def exact(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.double() * torch.erfc(-x.double() / math.sqrt(2.0))


def formula(x: torch.Tensor) -> torch.Tensor:
    """x (1 + erf(x / sqrt(2))) / 2 in float32, with an exact erf: the same on every host."""
    return 0.5 * x * (1.0 + torch.erf((x * math.sqrt(0.5)).double()).float())


def test_exact_gelu_is_closer_than_its_formula(backend: str, device: torch.device) -> None:
    from transformer_kernels.ops.activation import _triton as activation

    x = torch.linspace(-14.0, 14.0, 60001, device=device)
    y = activation.forward(prepared(OP, x))
    error = (y.double() - exact(x)).abs()
    straight = (formula(x).double() - exact(x)).abs()
    assert error.max() <= straight.max() and error.square().mean() <= straight.square().mean()
    assert error[x.abs() < 2.0].max() < 2.5e-7
    tail = (x < -1.0) & (x > -9.0)
    assert (error[tail] / exact(x[tail]).abs()).max() < 5e-6


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_extremes(backend: str, device: torch.device, approximate: str) -> None:
    from transformer_kernels.ops.activation import _triton as activation

    x = torch.tensor([0.0, -0.0, 100.0, -100.0, 6e4, -6e4, 1e-30, torch.nan], device=device)
    call = prepared(OP, x, approximate=approximate)
    y = activation.forward(call)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate=approximate), equal_nan=True)
    dx, _, _ = backward(activation, call, None, torch.ones_like(x))
    torch.testing.assert_close(dx[:7], torch.tensor([0.5, 0.5, 1, 0, 1, 0, 0.5], device=device))
    assert torch.isnan(dx[7])
    infinite = prepared(OP, torch.full((1,), torch.inf, device=device), approximate=approximate)
    assert activation.forward(infinite).item() == torch.inf


@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 4096])
def test_counts_around_a_program(backend: str, dtype: torch.dtype, device: torch.device, count: int) -> None:
    from transformer_kernels.ops.activation import _triton as activation

    x = torch.linspace(-4.0, 4.0, count, device=device).to(dtype)
    y = activation.forward(prepared(OP, x))
    torch.testing.assert_close(y.double(), exact(x), atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
