"""add_layer_norm in Triton: dropout in two passes over blocks, and the gradients of backward."""

import pytest
import torch

from tests.support.arguments import normal
from tests.support.operations import backward, prepared
from tests.support.parity import backend_fixture, check_parity
from tests.support.triton_tables import process_in_blocks

OP = "add_layer_norm"
backend = backend_fixture("triton")


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("width", [65, 129, 200])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
def test_two_passes_match_the_reference(
    op, backend, dtype, device, width, dropout_p,
    monkeypatch, unplanned
):  # fmt: skip
    from transformer_kernels.ops.norm import _triton as norm

    process_in_blocks(monkeypatch, norm)
    names = ("x", "residual"), ("weight", "bias")
    tensors = {name: normal(7, width, dtype=dtype, device=device, seed=i) for i, name in enumerate(names[0])}
    tensors |= {name: normal(width, dtype=dtype, device=device, seed=i) for i, name in enumerate(names[1], 2)}
    if op == "add_rms_norm":
        del tensors["bias"]
    check_parity(op, backend, tensors, {"dropout_p": dropout_p}, seed=3)


def test_without_dropout_both_gradients_are_one_tensor(backend, device):
    from transformer_kernels.ops.norm import _triton as norm

    x, weight = torch.randn(4, 40, device=device), torch.ones(40, device=device)
    call = prepared(OP, x, x, weight)
    result = norm.Kernels(call).forward(call)
    dx, dresidual, _, dbias = backward(norm.Kernels, call, result, result.y, None)
    assert dx is dresidual and dbias is None and dresidual.shape == x.shape


def test_dropped_elements_have_no_gradient(backend, device):
    from transformer_kernels.ops.norm import _triton as norm

    x, weight = torch.ones(30, 70, device=device), torch.ones(70, device=device)
    call = prepared(OP, x, torch.zeros_like(x), weight, weight, dropout_p=0.5)
    result = norm.Kernels(call).forward(call)
    dx, dresidual, *_ = backward(norm.Kernels, call, result, result.y, x)
    assert torch.equal(dx != 0, result.summed != 0)
    assert torch.equal(dx, torch.where(result.summed != 0, 2 * dresidual, 0.0))
