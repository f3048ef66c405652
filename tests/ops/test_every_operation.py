"""Properties of every operation in every backend: layouts, reproducibility, empty inputs, required gradients."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import LAYOUTS, expanded, misaligned, normal, odd_along, strided
from tests.support.operations import EXAMPLES, function
from tests.support.parity import backend_fixture, check_parity, require
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends.dispatch import OPERATIONS

NAMES = list(EXAMPLES)
OF_ANY_WIDTH = (
    *("gelu", "bias_gelu", "bias_relu", "swiglu", "geglu", "softmax", "embedding"),
    *("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
)
PER_OPERATION = pytest.mark.parametrize("op", NAMES)
PASSES = int(os.environ.get("TRANSFORMER_KERNELS_PASSES", 0))
"""Number of backward passes that must give the same bits; 0: 1,000, fewer if kernels are interpreted or emulated."""
FEWER_PASSES = {"triton": 4, "cuda": 20}
backend = backend_fixture(*tk.BACKENDS)
vector_backend = backend_fixture("cuda")


def parity(op, backend, tensors, **how):
    check_parity(op, backend, tensors, EXAMPLES[op].options, seed=7, **how)


def test_there_is_an_example_of_each():
    assert sorted(EXAMPLES) == sorted(OPERATIONS)


@PER_OPERATION
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sm_75(op, vector_backend, dtype, device, monkeypatch, unplanned):
    """Its blocks have 64 KiB, its tensor cores multiply float16, and copies to shared memory are synchronous."""
    if not _extension.emulating():
        pytest.skip("a device is what it is")
    require(op, vector_backend, device, dtype)
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "75")
    tensors = EXAMPLES[op].make(dtype=dtype, device=device)
    if dtype is not torch.bfloat16:
        parity(op, vector_backend, tensors)
        return
    with pytest.raises(tk.UnsupportedByBackend, match=r"bfloat16 needs compute capability 8\.0"):
        function(op, vector_backend)(**tensors)


@PER_OPERATION
@pytest.mark.parametrize("layout", [*LAYOUTS, expanded], ids=lambda f: f.__name__)
def test_any_layout(op, backend, device, layout):
    """Of all tensors, indices too; expanded, of one."""
    tensors = EXAMPLES[op].make(device=device)
    for name in [EXAMPLES[op].view] if layout is expanded else tensors:
        tensors[name] = layout(tensors[name].detach()).requires_grad_(tensors[name].requires_grad)
    parity(op, backend, tensors)


@PER_OPERATION
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_misaligned_in_16_bits(op, backend, dtype, device):
    require(op, backend, device, dtype)
    tensors = EXAMPLES[op].make(dtype=dtype, device=device)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = misaligned(tensor.detach()).requires_grad_(tensor.requires_grad)
    parity(op, backend, tensors)


@PER_OPERATION
def test_gradient_of_any_layout(op, backend, device):
    """Expanded along the first axis, except for a scalar, or negated. The CUDA kernels load whole vectors of it."""
    tensors = EXAMPLES[op].make(device=device)
    for layout in (expanded, strided, lambda dy: torch._neg_view(-dy), *((misaligned,) if backend == "cuda" else ())):
        parity(op, backend, tensors, transform=lambda dy, layout=layout: layout(dy) if dy.dim() else dy)


@PER_OPERATION
def test_one_odd_address_or_stride(op, vector_backend, device):
    """One misaligned tensor or one odd stride, of indices and masks too, excludes vector loads of it."""

    def results(name="", layout=None):
        tensors = {each: tensor.detach() for each, tensor in EXAMPLES[op].make(4, 32, device=device).items()}
        if layout is not None:
            tensors[name] = layout(tensors[name])
        leaves = [tensors[each].requires_grad_() for each in differentiable(op)]
        torch.manual_seed(3)
        outputs = function(op, vector_backend)(**tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs])]

    expected = results()
    for name, tensor in EXAMPLES[op].make(4, 32).items():
        axes = range(tensor.dim() - 1) if tensor.dim() > 2 else ()
        for layout in (misaligned, *(functools.partial(odd_along, axis=axis) for axis in axes)):
            torch.testing.assert_close(results(name, layout), expected, msg=lambda m, name=name: f"{name}: {m}")


def differentiable(op):
    return [name for name, tensor in EXAMPLES[op].make().items() if tensor.requires_grad]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in NAMES for name in differentiable(op)])
def test_only_one_gradient_is_wanted(op, name, backend, device):
    tensors = EXAMPLES[op].make(device=device)
    for other in differentiable(op):
        tensors[other].requires_grad_(other == name)
    parity(op, backend, tensors)


@PER_OPERATION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_again(op, backend, dtype, device):
    require(op, backend, device, dtype)

    def once():
        tensors = EXAMPLES[op].make(60, 40, dtype, device)
        torch.manual_seed(3)
        results = function(op, backend)(**tensors)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.full_like(result, 0.37) for result in results])
        grads = [tensors[name].grad for name in differentiable(op)]
        return [*(result.detach() for result in results), *grads]

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


@pytest.fixture
def reorder(backend, device):
    """Gives emulated threads another order for each number; interpreted programs are shuffled at each launch."""
    if backend != "cuda" or device.type != "cpu":
        yield lambda number: None
        return
    emulation = _extension.load()
    yield lambda number: emulation.set_schedule("random", number)
    emulation.set_schedule("lowest_first", 0)


@pytest.mark.slow
@PER_OPERATION
def test_same_bits_however_often(op, backend, device, reorder):
    tensors = EXAMPLES[op].make(40, 24, device=device)
    leaves = [tensors[name] for name in differentiable(op)]
    torch.manual_seed(3)
    results = function(op, backend)(**tensors)
    results = results if isinstance(results, tuple) else (results,)
    cotangents = [normal(*result.shape, dtype=result.dtype, device=device).detach() for result in results]
    first: list[Tensor] = []
    for number in range(PASSES or (FEWER_PASSES.get(backend, 1000) if device.type == "cpu" else 1000)):
        reorder(number)
        grads = torch.autograd.grad(results, leaves, cotangents, retain_graph=True)
        bits = [grad.contiguous().view(torch.int32) for grad in grads]
        first = first or bits
        assert all(torch.equal(*pair) for pair in zip(bits, first, strict=True)), f"backward pass {number}"


@PER_OPERATION
def test_the_same_without_gradients(op, backend, device):
    """The raw route gives the same bits as the recorded one."""
    tensors = EXAMPLES[op].make(device=device)
    results = []
    for recorded in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(recorded):
            results.append(function(op, backend)(**tensors))
    for with_grad, without in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(with_grad, without)
        assert with_grad.requires_grad and not without.requires_grad


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (3, 0)], ids=["no rows", "no columns"])
@PER_OPERATION
def test_empty(op, backend, device, rows, columns):
    if columns == 0 and op not in OF_ANY_WIDTH:
        pytest.skip("it needs a column")
    tensors = EXAMPLES[op].make(rows, columns, device=device)
    results = function(op, backend)(**tensors)
    for result in results if isinstance(results, tuple) else (results,):
        assert result.numel() == 0 or result.dim() == 0
        if result.numel() == 0:
            result.sum().backward(retain_graph=True)
    for name in differentiable(op):
        grad = tensors[name].grad
        assert grad is None or (grad == 0).all()


@PER_OPERATION
def test_gradcheck_in_float64(op, device):
    tensors = EXAMPLES[op].make(4, 5, torch.float64, device)
    names = differentiable(op)

    def run(*leaves):
        torch.manual_seed(3)
        return function(op, "torch")(**{**tensors, **dict(zip(names, leaves, strict=True))})

    assert torch.autograd.gradcheck(run, tuple(tensors[name] for name in names))
