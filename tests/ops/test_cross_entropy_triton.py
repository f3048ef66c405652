"""Cross-entropy kernels in Triton: two passes at narrow widths, gaps between rows, and every table."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.test_cross_entropy import make
from tests.support.arguments import normal
from tests.support.operations import backward, prepared
from tests.support.parity import backend_fixture, check_parity
from tests.support.triton_tables import process_in_blocks
from transformer_kernels.ops.loss._calls import RowLoss

OP = "cross_entropy"
backend = backend_fixture("triton")


@pytest.fixture
def _walked(backend, monkeypatch, unplanned):
    """Rows of more than 64 columns are processed in blocks of 64."""
    from transformer_kernels.ops.loss import _triton as cross_entropy

    process_in_blocks(monkeypatch, cross_entropy, "FORWARD")


@pytest.mark.usefixtures("_walked")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [65, 128, 129, 200])
def test_two_passes_match_the_reference(backend, dtype, device, classes, smoothing):
    check_parity(OP, backend, make(dtype, device, 7, classes), {"label_smoothing": smoothing})


def losses_in_place(logits, targets):
    from transformer_kernels.ops.loss import _triton as cross_entropy

    return cross_entropy.Kernels.row_losses(logits, targets, RowLoss(-100, 0.0), in_place=True)


@pytest.mark.parametrize("walked", [False, True], ids=["in registers", "walked"])
@pytest.mark.parametrize("classes", [65, 201])
def test_what_lies_between_rows_is_not_looked_at_and_becomes_zero(backend, device, classes, walked, request):
    if walked:
        request.getfixturevalue("_walked")
    buffer = torch.full((5, -(-classes // 8) * 8), torch.nan, dtype=torch.float16, device=device)
    logits = buffer[:, :classes].copy_(normal(5, classes, dtype=torch.float16, device=device).detach())
    leaf = logits.float().requires_grad_()
    targets = torch.arange(5, device=device)
    expected = F.cross_entropy(leaf, targets, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses_in_place(logits, targets), expected.detach())
    torch.testing.assert_close(logits.float(), leaf.grad, atol=1e-3, rtol=1e-3)
    assert (buffer[:, classes:] == 0).all()


@pytest.mark.parametrize("stray", [-7, 65, 2**30, 2**40])
@pytest.mark.parametrize("walked", [False, True], ids=["in registers", "walked"])
def test_a_target_that_is_no_class_makes_its_row_nan_and_reads_nothing(backend, device, stray, walked, request):
    if walked:
        request.getfixturevalue("_walked")
    logits = normal(4, 65, dtype=torch.float32, device=device).detach()
    losses = losses_in_place(logits, torch.tensor([0, stray, 64, -100], device=device))
    assert torch.isnan(losses).tolist() == [False, True, False, False] and losses[3] == 0.0
    assert torch.isnan(logits).all(-1).tolist() == [False, True, False, False] and (logits[3] == 0).all()


@pytest.mark.parametrize("rows", [1, 4096, 4097])
@pytest.mark.parametrize("limit", [1 << 16, 64], ids=["one program", "by PyTorch"])
def test_the_sum_of_losses(backend, device, rows, limit, monkeypatch):
    from transformer_kernels.ops.loss import _triton as cross_entropy

    monkeypatch.setattr("transformer_kernels.ops.loss._calls.MAX_SUMMED", limit)
    losses = torch.rand(rows, device=device)
    targets = torch.arange(rows, device=device) % 3
    total, none = cross_entropy.Kernels.reduced(losses, targets, 1, "sum")
    mean, count = cross_entropy.Kernels.reduced(losses, targets, 1, "mean")
    assert none is None and count.item() == (targets != 1).sum().item()
    torch.testing.assert_close(total, losses.sum())
    torch.testing.assert_close(mean, losses.sum() / count)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_the_table_of_every_capability(backend, device, capability, monkeypatch, unplanned):
    monkeypatch.setattr("transformer_kernels.backends.triton.INTERPRETED_CAPABILITY", capability)
    for classes in (2, 300, 2500):
        check_parity(OP, backend, make(torch.float16, device, 5, classes))


@pytest.mark.big
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    from transformer_kernels.ops.loss import _triton as cross_entropy

    classes = 1000
    rows = 2**31 // classes + 7
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device=device)
    logits[-1] = torch.linspace(-3, 3, classes).to(logits)
    targets = torch.full((rows,), 7, device=device)
    expected = F.cross_entropy(logits[-1:].float(), targets[-1:])
    call = prepared(OP, logits, targets, reduction="none")
    result = cross_entropy.Kernels(call).forward(call)
    torch.testing.assert_close(result.loss[-1], expected)
    ones = torch.ones(rows, device=device)
    (dlogits,) = backward(cross_entropy.Kernels, call, result, ones)
    p = torch.softmax(logits[-1].float(), -1)
    p[7] -= 1.0
    torch.testing.assert_close(dlogits[-1].float(), p, atol=1e-4, rtol=2e-2)
