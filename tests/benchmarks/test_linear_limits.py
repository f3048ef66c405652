"""The command that measures the limits of the CPU's linear kernels."""

from pathlib import Path

import pytest
import torch

from benchmarks import linear_limits
from transformer_kernels.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


def test_the_table_is_as_the_command_writes_it():
    from transformer_kernels.ops.linear import _cpu

    source = Path(str(_cpu.__file__)).read_text()
    assert linear_limits.rewritten(source, _cpu.LIMITS) == source


@pytest.mark.parametrize("products", linear_limits.PRODUCTS)
def test_both_sides_compute_the_same(products):
    for dtype in linear_limits.PRODUCTS[products]:
        ours, theirs = (call() for call in linear_limits.pair(dtype, products, 64, 48, 32))
        leaves = [
            [x for x in torch.utils._pytree.tree_leaves(each) if x is not None and x.numel()] for each in (ours, theirs)
        ]
        assert leaves[0]
        for mine, wanted in zip(*leaves, strict=True):
            torch.testing.assert_close(mine.float(), wanted.float(), rtol=3e-2, atol=3e-2 * wanted.abs().max().item())


def test_an_entry_ends_at_the_first_loss(monkeypatch):
    limit = {8: 16, 32: 16, 128: 16, 512: 20, 2048: 18}
    monkeypatch.setattr(linear_limits, "gain", lambda _, __, rows, exponent: 1.2 if exponent <= limit[rows] else 0.9)
    assert linear_limits.measured(torch.float32, "all") == ((0, 1 << 16), (512, 1 << 20))
