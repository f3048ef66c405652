"""Softmax in every backend."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal, odd_along
from tests.support.parity import check_parity

OP = "softmax"


def make(dtype, device, *shape):
    return {"x": normal(*shape, dtype=dtype, device=device, seed=1)}


def keep(*shape, device, seed=0):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4).to(device)


@pytest.mark.parametrize("width", [1, 3, 17, 127, 128, 129, 256, 1000, 1024, 1025, 4097])
def test_matches_reference_over_widths(backend, dtype, device, width):
    check_parity(OP, backend, make(dtype, device, 5, width), {"scale": 1.7})


@pytest.mark.slow
@pytest.mark.parametrize("width", [16384, 65536, 70001, 131072])
def test_matches_reference_over_wide_rows(backend, dtype, device, width):
    tensors = make(dtype, device, 3, width)
    tensors["mask"] = keep(1, width, device=device)
    check_parity(OP, backend, tensors)


MASKS = [(40,), (30, 1), (30, 40), (3, 1, 1, 40), (1, 2, 30, 40), (3, 1, 30, 1), (3, 2, 30, 40)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(backend, dtype, device, shape, causal):
    tensors = make(dtype, device, 3, 2, 30, 40)
    tensors["mask"] = keep(*shape, device=device)
    check_parity(OP, backend, tensors, {"causal": causal, "scale": -0.5 if causal else 2.0})


@pytest.mark.parametrize("shape", [(17, 17), (4, 9, 33), (2, 33, 9), (2, 3, 1, 128), (2, 2, 2, 5, 7)], ids=str)
def test_causal(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, *shape), {"causal": True, "scale": -0.3})


@pytest.mark.parametrize("columns", [30, 129, 1030])
def test_a_mask_of_any_strides_equals_its_copy(backend, device, columns):
    x = make(torch.float16, device, 2, 3, 4, columns)["x"].detach()
    wide = keep(2, 1, 4, 2 * columns, device=device)
    views = [wide[..., ::2], wide[..., 1 : columns + 1], wide[:, :, :1, :columns], wide[..., :1]]
    views += [odd_along(keep(2, 3, 4, columns, device=device), axis) for axis in range(3)]
    for view in views:
        mask = view.expand(2, 3, 4, columns)
        ours, expected = (tk.softmax(x, mask=each, backend=backend) for each in (mask, mask.contiguous()))
        assert torch.equal(ours, expected), mask.stride()


def test_mask_over_more_than_four_axes(backend, dtype, device):
    tensors = make(dtype, device, 2, 3, 2, 5, 20)
    tensors["mask"] = keep(2, 1, 1, 1, 20, device=device)
    check_parity(OP, backend, tensors)


def test_rows_that_see_nothing(backend, dtype, device):
    tensors = make(dtype, device, 6, 50)
    mask = keep(6, 50, device=device)
    mask[2] = False
    y = tk.softmax(**tensors, mask=mask, backend=backend)
    assert (y[2] == 0).all()
    torch.testing.assert_close(y.float().sum(-1), mask.any(-1).float(), atol=4 * torch.finfo(dtype).eps, rtol=0)
    y.square().sum().backward()
    assert (tensors["x"].grad[2] == 0).all() and torch.isfinite(tensors["x"].grad).all()


def test_a_row_of_minus_infinity_is_nan_as_in_pytorch(backend, dtype, device):
    x = normal(4, 20, dtype=dtype, device=device).detach()
    x[1] = -torch.inf
    y = tk.softmax(x, backend=backend)
    assert torch.isnan(y[1]).all() and torch.isfinite(y[[0, 2, 3]]).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nothing_behind_the_mask_gets_out(backend, dtype, device, poison):
    tensors = make(dtype, device, 6, 50)
    mask = tensors["mask"] = keep(6, 50, device=device)
    with torch.no_grad():
        tensors["x"].masked_fill_(~mask, poison)
    y = tk.softmax(**tensors, backend=backend)
    want = torch.softmax(tensors["x"].detach().double().masked_fill(~mask, -torch.inf), -1)
    torch.testing.assert_close(y.double(), want, atol=2 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("shift", [-1e4, 300.0, 6e4])
def test_adding_a_constant_changes_nothing(backend, device, shift):
    x = torch.randint(-8, 8, (5, 100), generator=torch.Generator().manual_seed(0)).float().to(device)
    want = tk.softmax(x, backend=backend)
    torch.testing.assert_close(tk.softmax(x + shift, backend=backend), want, atol=1e-6, rtol=1e-5)


def test_large_float16_logits_stay_finite(backend, device):
    x = torch.tensor([[6e4, 5.9e4, -6e4, 0.0]], dtype=torch.float16, device=device)
    y = tk.softmax(x, scale=4.0, backend=backend)
    torch.testing.assert_close(y, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float16, device=device))


def test_a_mask_of_five_axes_and_no_columns(backend, device):
    x = torch.empty(2, 3, 2, 4, 0, device=device, requires_grad=True)
    mask = torch.ones(2, 1, 2, 4, 0, dtype=torch.bool, device=device)
    tk.softmax(x, mask=mask, backend=backend).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
