"""Dropout of the torch backend: compiled and in tensor algebra, both with the reference's mask."""

import pytest
import torch

from python_ref import ops as reference
from transformer_kernels.ops import _dropout

SEED = torch.tensor([0x7234567890ABCDEF])
ROUTES = ("compiled", "tensor algebra")


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    if request.param == "tensor algebra":
        monkeypatch.setattr(_dropout, "compiled", lambda: None)
    elif _dropout.compiled() is None:
        pytest.skip("the package was installed without a C++ compiler")
    return request.param


def expected(x, p, scale, residual, first_head, first):
    """In float64, from the mask of the reference."""
    *_, rows, columns = x.shape
    heads = x.numel() // max(rows * columns, 1)
    keep = reference.dropout_keep(SEED, first_head + heads, first + rows, first + columns, p)
    kept = torch.where(keep[first_head:, first:, first:].reshape(x.shape), x.double() * scale, 0.0)
    return kept if residual is None else kept + residual.double()


SHAPES = [(1, 1, 1), (2, 3, 5), (7, 64), (3, 5, 130), (2, 2, 33, 31), (1, 1, 257)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("first_head", "first"), [(0, 0), (3, 0), (0, 1), (0, 12), (2, 39), (0, 64)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drops_what_the_reference_drops(route, shape, first_head, first, dtype):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for added in (None, residual):
        with torch.device("meta"):  # a default device that is not that of x
            got = _dropout.drop(x, SEED.clone(), 0.3, scale=1.25, residual=added, first_head=first_head, first=first)
        want = expected(x, 0.3, 1.25, added, first_head, first)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, atol=2 * unit, rtol=2 * unit)


@pytest.mark.parametrize("p", [0.0, 2**-17, 0.1, 0.999999, 1.0])
def test_extreme_probabilities(route, p):
    x = torch.randn(3, 200)
    kept = _dropout.drop(x, SEED.clone(), p)
    assert torch.equal(kept, expected(x, p, 1.0, None, 0, 0).float())
    assert p not in (0.0, 2**-17) or torch.equal(kept, x)
    assert p not in (0.999999, 1.0) or not kept.any()


def test_nothing_of_a_dropped_element_remains(route):
    x = torch.full((4, 100), float("nan"))
    keep = reference.dropout_keep(SEED, 1, 4, 100, 0.5)[0]
    dropped = _dropout.drop(x, SEED.clone(), 0.5)
    assert torch.equal(torch.isnan(dropped), keep)


def test_in_place(route):
    x = torch.randn(5, 70)
    want = _dropout.drop(x, SEED.clone(), 0.5, scale=2.0)
    got = _dropout.drop(x, SEED.clone(), 0.5, scale=2.0, in_place=True)
    assert got.data_ptr() == x.data_ptr() and torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 2, 3)], ids=str)
def test_empty(route, shape):
    assert _dropout.drop(torch.empty(shape), SEED.clone(), 0.5).shape == shape


def test_threads_do_not_change_the_bits():
    if _dropout.compiled() is None:
        pytest.skip("the package was installed without a C++ compiler")
    x, threads = torch.randn(3, 700, 513), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(_dropout.drop(x, SEED, 0.2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_instruction_sets_do_not_change_the_bits(dtype):
    if _dropout.compiled() is None:
        pytest.skip("the package was installed without a C++ compiler")
    x, residual = torch.randn(2, 70, 131).to(dtype), torch.randn(2, 70, 131).to(dtype)
    kernels = _dropout.compiled()
    names, used = kernels.instruction_sets, kernels.instruction_set()
    results = []
    try:
        for name in names:
            kernels.use(name)
            results.append(_dropout.drop(x, SEED, 0.2, scale=1.25, residual=residual, first=5))
    finally:
        kernels.use(used)
    assert all(torch.equal(result, results[0]) for result in results)


def test_bfloat16_rounds_as_pytorch_does():
    if _dropout.compiled() is None:
        pytest.skip("the package was installed without a C++ compiler")
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    got = _dropout.drop(x.view(1, -1), SEED, 0.0, scale=1.7)[0]
    torch.testing.assert_close(got, (x.float() * 1.7).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_double_backward_of_the_kernel_has_the_mask_of_the_first_pass():
    torch.manual_seed(0)
    x = torch.randn(2, 64, 80).sign().mul_(torch.rand(2, 64, 80) + 0.5).requires_grad_()
    y = _dropout.dropout(x.square(), 0.3, x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    kept = (y - x) / x.square()  # the scale, or 0
    expected = 2 * (2 * x * kept + 1).square() + 4 * y * kept
    torch.testing.assert_close(second, expected.detach(), rtol=1e-3, atol=1e-3)
