"""Bias and GELU in every backend."""

import pytest
import torch

from tests.support.arguments import rows
from tests.support.parity import check_parity

OP = "bias_gelu"
APPROXIMATIONS = ("none", "tanh")
make = rows("bias")


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize(
    "shape", [(1,), (7, 1), (5, 3), (33, 127), (4, 1024), (3, 5, 512), (301, 40), (2, 4097)], ids=str
)
def test_matches_reference_over_shapes(backend, dtype, device, shape, approximate):
    check_parity(OP, backend, make(dtype, device, *shape), {"approximate": approximate})


def test_float32_bias(backend, dtype, device):
    check_parity(OP, backend, make(dtype, device, 33, 96, parameters_in=torch.float32))
