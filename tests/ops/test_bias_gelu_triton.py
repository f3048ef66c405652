"""bias_gelu in Triton: dbias summed by persistent programs, in one order."""

import pytest
import torch

from tests.support.arguments import normal
from tests.support.operations import backward, prepared
from tests.support.parity import backend_fixture, check_parity

OP = "bias_gelu"
backend = backend_fixture("triton")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("rows", "width"), [(500, 33), (90, 520), (40, 1030)])
def test_each_program_walks_over_several_tiles(backend, device, rows, width, approximate):
    tensors = {"x": normal(rows, width, dtype=torch.float16, device=device)}
    tensors["bias"] = normal(width, dtype=torch.float16, device=device, seed=1)
    check_parity(OP, backend, tensors, {"approximate": approximate})


def test_dbias_does_not_depend_on_the_order_of_programs(backend, device):
    from tests.support.interpreter import shuffled_programs
    from transformer_kernels.ops.activation import _triton as activation

    if device.type != "cpu":
        pytest.skip("a GPU chooses its own order; test_same_bits_again runs there")
    x, bias = torch.randn(300, 70), torch.randn(70)
    sums = []
    for seed in range(3):
        with shuffled_programs(seed):
            sums.append(backward(activation.Kernels, prepared(OP, x, bias), None, x)[1])
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
