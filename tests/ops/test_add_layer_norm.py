"""Dropout, residual addition and LayerNorm in every backend."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import rows
from tests.support.parity import check_parity, dropout_boundary, require

OP = "add_layer_norm"
make = rows("weight", "bias", like_x=("residual",))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("width", [1, 3, 127, 128, 256, 768, 1000, 1025, 4097])
def test_matches_reference_over_widths(backend, dtype, device, width, dropout_p):
    check_parity(OP, backend, make(dtype, device, 5, width), {"dropout_p": dropout_p}, seed=11)


@pytest.mark.parametrize("width", [512, 513])
def test_results_stored_past_the_caches(width):
    # csrc/cpu/rows.h: of 8 MiB or more in float32, where rows are whole vectors.
    cpu = torch.device("cpu")
    require(OP, "cpu", cpu, torch.float32)
    check_parity(OP, "cpu", make(torch.float32, cpu, 4099, width), {"dropout_p": 0.1}, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16384, 65536, 70001])
def test_matches_reference_over_wide_rows(backend, dtype, device, width):
    check_parity(OP, backend, make(dtype, device, 3, width), {"dropout_p": 0.1})


def test_dropout_keeps_what_reaches_the_threshold(backend, device):
    for dropout_p in dropout_boundary(7, device):
        check_parity(OP, backend, make(torch.float32, device, 1, 8), {"dropout_p": dropout_p}, seed=7)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(128,), (37, 96), (3, 2, 5, 64), (300, 34)], ids=str)
def test_dropout_is_the_reference_mask(backend, dtype, device, shape, dropout_p):
    check_parity(OP, backend, make(dtype, device, *shape), {"dropout_p": dropout_p}, seed=5)


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_when_one_output_is_used(backend, dtype, device, used):
    gradients = []
    for function in (tk.add_layer_norm, None):
        tensors = make(torch.float64 if function is None else dtype, device, 9, 64)
        if function is None:
            rounded = make(dtype, device, 9, 64)
            tensors = {name: value.detach().double().requires_grad_() for name, value in rounded.items()}
            total = tensors["x"] + tensors["residual"]
            outputs = torch.nn.functional.layer_norm(total, (64,), tensors["weight"], tensors["bias"]), total
        else:
            outputs = function(**tensors, backend=backend)
        outputs[used].float().square().sum().backward()
        gradients.append([tensors["x"].grad.double(), tensors["residual"].grad.double()])
    tolerance = 20 * torch.finfo(dtype).eps
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
