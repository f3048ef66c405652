"""RMSNorm in every backend, alone and after a residual addition."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import rows
from tests.support.parity import check_parity

OP = "rms_norm"
SHAPES = [(1,), (7, 1), (5, 17), (33, 59), (4, 128), (3, 5, 256), (9, 768), (4, 1000), (301, 40), (2, 4097)]
make, make_add = rows("weight"), rows("weight", like_x=("residual",))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference_over_shapes(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, *shape), {"eps": 1e-3})


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5, 17), (3, 5, 256), (301, 40), (2, 4097)], ids=str)
def test_addition_matches_reference(backend, dtype, device, shape, dropout_p):
    check_parity("add_rms_norm", backend, make_add(dtype, device, *shape), {"dropout_p": dropout_p}, seed=5)


def test_float32_weight(backend, dtype, device):
    check_parity(OP, backend, make(dtype, device, 133, 96, parameters_in=torch.float32))
    check_parity("add_rms_norm", backend, make_add(dtype, device, 33, 96, parameters_in=torch.float32))


def test_a_row_of_zeros_gives_zeros_and_finite_gradients(backend, device):
    x = torch.zeros(2, 24, device=device, requires_grad=True)
    y = tk.rms_norm(x, torch.ones(24, device=device), backend=backend)
    y.sum().backward()
    assert not y.any() and torch.isfinite(x.grad).all()
