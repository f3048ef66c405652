"""RMSNorm in every backend, alone and after a residual addition."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "rms_norm"
SHAPES = [(1,), (7, 1), (5, 17), (33, 59), (4, 128), (3, 5, 256), (9, 768), (4, 1000), (301, 40), (2, 4097)]


def make(dtype, device, *shape, parameters=None):
    return {
        "x": normal(*shape, dtype=dtype, device=device, seed=1),
        "weight": normal(shape[-1], dtype=parameters or dtype, device=device, seed=2),
    }


def make_add(dtype, device, *shape, parameters=None):
    return {
        **make(dtype, device, *shape, parameters=parameters),
        "residual": normal(*shape, dtype=dtype, device=device, seed=3),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference_over_shapes(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, *shape), {"eps": 1e-3})


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5, 17), (3, 5, 256), (301, 40), (2, 4097)], ids=str)
def test_addition_matches_reference(backend, dtype, device, shape, dropout_p):
    check_parity("add_rms_norm", backend, make_add(dtype, device, *shape), {"dropout_p": dropout_p}, seed=5)


def test_float32_weight(backend, dtype, device):
    check_parity(OP, backend, make(dtype, device, 133, 96, parameters=torch.float32))
    check_parity("add_rms_norm", backend, make_add(dtype, device, 33, 96, parameters=torch.float32))


def test_a_row_of_zeros_gives_zeros_and_finite_gradients(backend, device):
    x = torch.zeros(2, 24, device=device, requires_grad=True)
    y = tk.rms_norm(x, torch.ones(24, device=device), backend=backend)
    y.sum().backward()
    assert not y.any() and torch.isfinite(x.grad).all()


X, W = torch.ones(3, 6), torch.ones(6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tk.rms_norm([1.0], W), TypeError, "rms_norm: x must be a tensor; got list"),
        (lambda: tk.rms_norm(X.long(), W), TypeError, "rms_norm: x must have one of the dtypes float32"),
        (lambda: tk.rms_norm(torch.tensor(1.0), W), ValueError, "rms_norm: x must have at least one dimension"),
        (lambda: tk.rms_norm(X, W[:3]), ValueError, r"rms_norm: weight must have shape \(6,\); got \(3,\)"),
        (lambda: tk.rms_norm(X, W, eps=0.0), ValueError, "rms_norm: eps must be positive; got 0.0"),
        (lambda: tk.rms_norm(X, W.to("meta")), RuntimeError, "rms_norm: all tensors must be on one device"),
        (lambda: tk.add_rms_norm(X, X[:2], W), ValueError, r"residual must have the shape of x \(3, 6\); got \(2, 6\)"),
        (lambda: tk.add_rms_norm(X, X.half(), W), TypeError, "add_rms_norm: x and residual must have one dtype; got"),
        (lambda: tk.add_rms_norm(X, X, W, dropout_p=1.5), ValueError, r"dropout_p must be in \[0, 1\]; got 1.5"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
