"""Norms of a float32 stream whose branch and result have bfloat16, against the same in casts and separate kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from transformer_kernels.backends import cpu
from transformer_kernels.graphs import graphed
from transformer_kernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from transformer_kernels.ops.norm._rounded import RoundedNorm

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="only the CPU kernels read and write two dtypes"
)
EPS = 1e-5


def leaf(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def case(dtype, added):
    """x, residual, weight and bias."""
    return leaf(3, 7, 40, dtype=dtype), leaf(3, 7, 40, seed=1) if added else None, leaf(40, seed=2), leaf(40, seed=3)


def in_casts(centred, x, residual, weight, bias, p):
    """(y, sum, y in bfloat16) by float32 kernels, which the oracle tests cover."""
    parameters = (weight, bias) if centred else (weight,)
    if residual is None:
        y, summed = (layer_norm if centred else rms_norm)(x.float(), *parameters, eps=EPS, backend="cpu"), None
    else:
        function = add_layer_norm if centred else add_rms_norm
        y, summed = function(x.float(), residual, *parameters, eps=EPS, dropout_p=p, backend="cpu")
    return y, summed, y.to(torch.bfloat16)


def gradients(outputs, given):
    seeds = [leaf(*y.shape, seed=9 + i).detach().to(y.dtype) for i, y in enumerate(outputs)]
    return torch.autograd.grad(outputs, given, seeds)


CASES = {
    "alone": (False, torch.float32, 0.0),
    "added": (True, torch.float32, 0.0),
    "branch": (True, torch.bfloat16, 0.0),
    "dropped": (True, torch.float32, 0.25),
    "dropped_branch": (True, torch.bfloat16, 0.25),
}
"""By name: whether there is a residual, the dtype of x and the dropout."""


@pytest.mark.parametrize("wide", (False, True), ids=("narrow", "both"))
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("centred", (True, False), ids=("layer_norm", "rms_norm"))
def test_it_has_the_bits_of_casts_and_kernels(centred, kind, wide):
    added, dtype, p = CASES[kind]
    x, residual, weight, bias = case(dtype, added)
    torch.manual_seed(0)
    expected = in_casts(centred, x, residual, weight, bias, p)
    torch.manual_seed(0)
    found = RoundedNorm(centred, wide)(x, residual, weight, bias if centred else None, EPS, p)
    assert (found[0] is not None, found[1] is not None) == (wide, added)
    given = [value for value in (x, residual, weight, bias if centred else None) if value is not None]
    present = [i for i, value in enumerate(found) if value is not None]
    outputs, wanted = [found[i] for i in present], [expected[i] for i in present]
    for y, reference in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(y, reference, rtol=0, atol=0)
    for y, reference in zip(gradients(outputs, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", (0, 1, 2), ids=("wide", "sum", "narrow"))
def test_one_result_alone_has_a_gradient(used):
    given = case(torch.bfloat16, True)
    found, expected = RoundedNorm(True, True)(*given, EPS)[used], in_casts(True, *given, 0.0)[used]
    given = given if used != 1 else given[:2]
    for y, reference in zip(gradients([found], given), gradients([expected], given), strict=True):
        torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-5)


def test_second_derivatives():
    x, residual, weight, bias = given = case(torch.float32, True)
    (dx,) = torch.autograd.grad(RoundedNorm(True, True)(*given, EPS)[0].square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(
        F.layer_norm(x + residual, (40,), weight, bias, EPS).square().sum(), x, create_graph=True
    )
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)
    for y, reference in zip(gradients([dx], given[:3]), gradients([expected], given[:3]), strict=True):
        torch.testing.assert_close(y, reference, rtol=1e-3, atol=1e-3)


def test_a_recorded_step_has_the_bits_of_an_eager_one():
    x, residual, weight, bias = (value.detach() for value in case(torch.bfloat16, True))

    def step(x, residual):
        y, summed, narrow = RoundedNorm(True, True)(x, residual, weight, bias, EPS)
        return y, summed, narrow

    expected = step(x, residual)
    recorded = graphed(step)
    for _ in range(4):
        found = recorded(x, residual)
    for y, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(y, reference, rtol=0, atol=0)


def test_tensors_without_values_have_the_shapes_and_dtypes():
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(value) for value in case(torch.bfloat16, True)]
        y, summed, narrow = RoundedNorm(True, True)(*given, EPS)
    assert {y.shape, summed.shape, narrow.shape} == {given[0].shape}
    assert (y.dtype, summed.dtype, narrow.dtype) == (torch.float32, torch.float32, torch.bfloat16)
