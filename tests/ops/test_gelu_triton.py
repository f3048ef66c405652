"""GELU in Triton: the fitted tail of the normal distribution against the formula in float32."""

import math

import pytest
import torch

from tests.support.operations import forward_of, prepared
from tests.support.parity import backend_fixture

OP = "gelu"
backend = backend_fixture("triton")


def exact(x):
    return 0.5 * x.double() * torch.erfc(-x.double() / math.sqrt(2.0))


def formula(x):
    """x (1 + erf(x / sqrt(2))) / 2 in float32, with an exact erf: the same on every host."""
    return 0.5 * x * (1.0 + torch.erf((x * math.sqrt(0.5)).double()).float())


def test_exact_gelu_is_closer_than_its_formula(backend, device):
    from transformer_kernels.ops.activation import _triton as activation

    x = torch.linspace(-14.0, 14.0, 60001, device=device)
    y = forward_of(activation.Kernels, prepared(OP, x))
    error = (y.double() - exact(x)).abs()
    straight = (formula(x).double() - exact(x)).abs()
    assert error.max() <= straight.max() and error.square().mean() <= straight.square().mean()
    assert error[x.abs() < 2.0].max() < 2.5e-7
    tail = (x < -1.0) & (x > -9.0)
    assert (error[tail] / exact(x[tail]).abs()).max() < 5e-6


@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 4096])
def test_counts_around_a_program(backend, dtype, device, count):
    from transformer_kernels.ops.activation import _triton as activation

    x = torch.linspace(-4.0, 4.0, count, device=device).to(dtype)
    y = forward_of(activation.Kernels, prepared(OP, x))
    torch.testing.assert_close(y.double(), exact(x), atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
