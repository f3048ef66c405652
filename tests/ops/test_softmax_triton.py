"""Softmax kernels in Triton: two passes at narrow widths with all masks, and offsets above 2^31."""

import pytest
import torch

from tests.support.arguments import DTYPES, dtype_id, normal
from tests.support.operations import backward, prepared
from tests.support.parity import backend_fixture, check_parity
from tests.support.triton_tables import process_in_blocks

OP = "softmax"
backend = backend_fixture("triton")


@pytest.fixture
def _walked(backend, monkeypatch, unplanned):
    """Rows of more than 64 columns are processed in blocks of 64."""
    from transformer_kernels.ops.softmax import _triton as softmax

    process_in_blocks(monkeypatch, softmax)


@pytest.mark.usefixtures("_walked")
@pytest.mark.parametrize("width", [65, 128, 129, 200])
def test_two_passes_match_the_reference(backend, dtype, device, width):
    check_parity(OP, backend, {"x": normal(7, width, dtype=dtype, device=device)}, {"scale": -1.3})


@pytest.mark.usefixtures("_walked")
@pytest.mark.parametrize("mask", [None, (3, 1, 1, 200), (1, 2, 5, 200), (3, 2, 1, 1)], ids=str)
def test_two_passes_with_mask_and_diagonal(backend, device, mask):
    tensors = {"x": normal(3, 2, 5, 200, dtype=torch.float32, device=device)}
    if mask is not None:
        tensors["mask"] = torch.rand(mask, generator=torch.Generator().manual_seed(0)).to(device) > 0.3
    check_parity(OP, backend, tensors, {"causal": True})


@pytest.mark.usefixtures("_walked")
def test_two_passes_where_the_first_queries_see_nothing(backend, device):
    check_parity(OP, backend, {"x": normal(80, 70, dtype=torch.float32, device=device)}, {"causal": True})


@pytest.mark.usefixtures("_walked")
def test_two_passes_hide_what_is_masked(backend, device):
    import transformer_kernels as tk

    x = normal(4, 200, dtype=torch.float32, device=device).detach()
    mask = torch.ones(4, 200, dtype=torch.bool, device=device)
    mask[0], mask[1, 64:128] = False, False
    x.masked_fill_(~mask, torch.nan)
    y = tk.softmax(x, mask=mask, backend=backend)
    assert (y[~mask] == 0).all()
    torch.testing.assert_close(y.sum(-1), torch.tensor([0.0, 1, 1, 1], device=device))
    assert torch.isnan(tk.softmax(torch.full((1, 200), -torch.inf, device=device), backend=backend)).all()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_the_table_of_every_capability(backend, device, capability, monkeypatch, unplanned):
    monkeypatch.setattr("transformer_kernels.backends.triton.INTERPRETED_CAPABILITY", capability)
    for width in (20, 300, 2500):
        check_parity(OP, backend, {"x": normal(5, width, dtype=torch.float16, device=device)})


@pytest.mark.big
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_more_than_two_to_the_31_elements(device, dtype):
    from transformer_kernels.ops.softmax import _triton as softmax

    width = 1000
    rows = 2**31 // width + 7
    x = torch.zeros(rows, width, dtype=dtype, device=device)
    x[-1] = torch.linspace(-3, 3, width).to(x)
    call = prepared(OP, x)
    y = softmax.Kernels(call).forward(call)
    torch.testing.assert_close(y[-1], torch.softmax(x[-1].float(), -1).to(dtype))
    (dx,) = backward(softmax.Kernels, call, y, x)
    want = torch.ops.aten._softmax_backward_data(x[-1:].float(), y[-1:].float(), -1, torch.float32)
    torch.testing.assert_close(dx[-1:], want.to(dtype), atol=1e-4, rtol=2e-2)
