"""LayerNorm kernels in Triton: two passes at narrow widths, the persistent loop, a mean of a million."""

import pytest
import torch

from tests.support.arguments import normal
from tests.support.operations import forward_of, prepared
from tests.support.parity import backend_fixture, check_parity
from tests.support.triton_tables import process_in_blocks
from transformer_kernels.backends.triton_tiles import RowTile

OP = "layer_norm"
backend = backend_fixture("triton")


@pytest.fixture
def _walked(backend, monkeypatch, unplanned):
    """Rows of more than 64 columns are processed in blocks of 64, and their columns summed in blocks of 32."""
    from transformer_kernels.ops.norm import _triton as norm

    process_in_blocks(monkeypatch, norm)
    monkeypatch.setattr(norm, "COLUMN_TILE", RowTile(rows=4, columns=32, num_warps=4, programs=5))


def make(rows, width, dtype, device, shift=0.0):
    x = (normal(rows, width, dtype=torch.float32, device=device).detach() + shift).to(dtype).requires_grad_()
    parameters = {name: normal(width, dtype=dtype, device=device, seed=i) for i, name in enumerate(("weight", "bias"))}
    return {"x": x, **parameters}


@pytest.mark.usefixtures("_walked")
@pytest.mark.parametrize("shift", [0.0, 1000.0])
@pytest.mark.parametrize("width", [65, 128, 129, 200])
@pytest.mark.parametrize(("op", "bias"), [("layer_norm", True), ("layer_norm", False), ("rms_norm", False)])
def test_two_passes_match_the_reference(op, bias, backend, dtype, device, width, shift):
    tensors = make(29, width, dtype, device, shift)
    if not bias:
        del tensors["bias"]
    check_parity(op, backend, tensors)


@pytest.mark.parametrize(("rows", "width"), [(700, 17), (301, 128), (50, 600)])
def test_each_program_walks_over_several_tiles(backend, dtype, device, rows, width):
    check_parity(OP, backend, make(rows, width, dtype, device))


@pytest.mark.parametrize("width", [200, 9000])
def test_a_mean_of_a_million_keeps_its_digits(backend, device, width):
    """A row's first element is subtracted before summing, so only the rounding of x remains."""
    from transformer_kernels.ops.norm import _triton as norm

    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).add(1e6).to(device)
    y, _, mean, _ = forward_of(norm.Kernels, prepared(OP, x, torch.ones(width, device=device)))
    want = torch.nn.functional.layer_norm(x.double(), (width,))
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(mean.double(), x.double().mean(-1), atol=0.04, rtol=0)


@pytest.mark.parametrize("outlier", [0, 130])
def test_an_outlier_in_the_first_column_costs_nothing(backend, device, outlier):
    tensors = make(5, 131, torch.float32, device)
    with torch.no_grad():
        tensors["x"][:, outlier] = 3e4
    check_parity(OP, backend, tensors)
