"""Bias and ReLU in every backend."""

import math

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import rows
from tests.support.parity import check_parity

OP = "bias_relu"
make = rows("bias")


@pytest.mark.parametrize(
    "shape",
    [(1,), (7, 1), (5, 17), (33, 59), (4, 128), (3, 5, 256), (9, 768), (4, 1000), (301, 40), (4096, 17), (2, 4097)],
    ids=str,
)
def test_matches_reference_over_shapes(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, *shape))


def test_float32_bias(backend, dtype, device):
    check_parity(OP, backend, make(dtype, device, 133, 96, parameters_in=torch.float32))


def test_the_sum_is_not_rounded_before_its_sign_is_taken(backend, device):
    """A float32 bias that rounds to -x in float16."""
    x = torch.ones(2, 3, dtype=torch.float16, device=device, requires_grad=True)
    bias = torch.tensor([-1.0 + 1e-5, -1.0, -1.0 - 1e-5], device=device)
    y = tk.bias_relu(x, bias, backend=backend)
    y.backward(torch.ones_like(y))
    assert x.grad.tolist() == [[1.0, 0.0, 0.0]] * 2


def test_silent_units_give_zero_and_nan_passes(backend, dtype, device):
    x = torch.tensor([[-2.0, 0.0, 1.0, math.nan]], dtype=dtype, device=device, requires_grad=True)
    y = tk.bias_relu(x, torch.zeros(4, dtype=dtype, device=device), backend=backend)
    y.backward(torch.full_like(y, math.inf))
    torch.testing.assert_close(y.detach(), torch.relu(x.detach()), equal_nan=True)
    assert x.grad[0, :2].tolist() == [0.0, 0.0] and x.grad[0, 2] == math.inf


def test_the_inputs_are_not_needed_for_the_gradient(backend, device):
    tensors = make(torch.float32, device, 12, 64)
    y = tk.bias_relu(**tensors, backend=backend)
    with torch.no_grad():
        tensors["x"].zero_()
        tensors["bias"].zero_()
    y.sum().backward()
    assert torch.equal(tensors["x"].grad, (y > 0).float())
