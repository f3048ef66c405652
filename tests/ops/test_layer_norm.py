"""LayerNorm in every backend."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import rows
from tests.support.parity import check_parity

OP = "layer_norm"
make = rows("weight", "bias")


@pytest.mark.parametrize("width", [1, 3, 17, 127, 128, 129, 256, 768, 1000, 1024, 1025, 2047, 4097])
def test_matches_reference_over_widths(backend, dtype, device, width):
    check_parity(OP, backend, make(dtype, device, 5, width))


@pytest.mark.slow
@pytest.mark.parametrize("width", [8192, 16384, 65536, 70001])
def test_matches_reference_over_wide_rows(backend, dtype, device, width):
    check_parity(OP, backend, make(dtype, device, 3, width))


@pytest.mark.parametrize("shape", [(128,), (1, 128), (37, 768), (3, 2, 5, 64), (300, 32)], ids=str)
def test_matches_reference_over_shapes(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, *shape))


def test_without_bias(backend, dtype, device):
    tensors = make(dtype, device, 37, 256)
    tensors["bias"] = None
    check_parity(OP, backend, tensors)


def test_float32_parameters(backend, dtype, device):
    own, wide = (make(dtype, device, 37, 256, parameters_in=each) for each in (dtype, torch.float32))
    for names in (("weight", "bias"), ("weight",), ("bias",)):
        check_parity(OP, backend, own | {name: wide[name] for name in names})


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1.0])
def test_eps(backend, dtype, device, eps):
    check_parity(OP, backend, make(dtype, device, 9, 64), {"eps": eps})


def test_a_constant_row_gives_the_bias(backend, dtype, device):
    tensors = make(dtype, device, 4, 96)
    with torch.no_grad():
        tensors["x"].fill_(3.0)
    y = tk.layer_norm(**tensors, backend=backend)
    torch.testing.assert_close(y, tensors["bias"].expand_as(y), atol=1e-6, rtol=0)


def test_a_large_mean(backend, device):
    tensors = make(torch.float32, device, 16, 512)
    with torch.no_grad():
        tensors["x"].add_(1e6)
    exact = torch.nn.functional.layer_norm(tensors["x"].double(), (512,))
    y = tk.layer_norm(tensors["x"], torch.ones_like(tensors["weight"]), backend=backend)
    # The mean is accurate to half an ulp, 1/32, against a deviation of 1. PyTorch's kernel rounds x * rstd and
    # mean * rstd separately, two more ulp.
    torch.testing.assert_close(y.double(), exact, atol=0.2 if backend == "torch" else 0.05, rtol=0)


def test_denormals(backend, device):
    tensors = make(torch.float32, device, 4, 64)
    with torch.no_grad():
        tensors["x"].mul_(1e-40)
    y = tk.layer_norm(**tensors, backend=backend)
    torch.testing.assert_close(y, tensors["bias"].expand_as(y), atol=1e-6, rtol=0)
