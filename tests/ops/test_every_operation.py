"""What holds for every operation in every backend: any layout, the same bits again, nothing to do, gradients wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.operations import EXAMPLES, function
from tests.support.parity import backend_fixture, check_parity, require
from transformer_kernels._dispatch import OPERATIONS

NAMES = list(EXAMPLES)
PER_OPERATION = pytest.mark.parametrize("op", NAMES)
backend = backend_fixture(*tk.BACKENDS)


def parity(op: str, backend: str, tensors: dict[str, Any], **how: Any) -> None:
    check_parity(op, backend, tensors, EXAMPLES[op].options, seed=7, **how)


def test_there_is_an_example_of_each() -> None:
    assert sorted(EXAMPLES) == sorted(OPERATIONS)


def transposed(x: Tensor) -> Tensor:
    order = list(range(x.dim()))
    first = order[-3] if x.dim() > 2 else order[0]
    second = order[-2] if x.dim() > 2 else order[1]
    return x.transpose(first, second).contiguous().transpose(first, second)


def sliced(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 9), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 5 : x.shape[-1] + 5] = x
    return wide[..., 5 : x.shape[-1] + 5]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def misaligned(x: Tensor) -> Tensor:
    storage = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


@PER_OPERATION
@pytest.mark.parametrize("layout", [transposed, sliced, expanded, misaligned, strided], ids=lambda f: f.__name__)
def test_any_layout(op: str, backend: str, device: torch.device, layout: Any) -> None:
    tensors = EXAMPLES[op].make(device=device)
    name = EXAMPLES[op].view
    tensors[name] = layout(tensors[name].detach()).requires_grad_()
    parity(op, backend, tensors)


@PER_OPERATION
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_misaligned_in_16_bits(op: str, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    require(op, backend, device, dtype)
    tensors = EXAMPLES[op].make(dtype=dtype, device=device)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = misaligned(tensor.detach()).requires_grad_(tensor.requires_grad)
    parity(op, backend, tensors)


@PER_OPERATION
def test_gradient_of_any_layout(op: str, backend: str, device: torch.device) -> None:
    """Expanded along the first axis; of a scalar there is only one."""
    tensors = EXAMPLES[op].make(device=device)
    parity(op, backend, tensors, transform=lambda dy: expanded(dy) if dy.dim() else dy)
    parity(op, backend, tensors, transform=lambda dy: strided(dy) if dy.dim() else dy)


def differentiable(op: str) -> list[str]:
    return [name for name, tensor in EXAMPLES[op].make().items() if tensor.requires_grad]


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in NAMES for name in differentiable(op)])
def test_only_one_gradient_is_wanted(op: str, name: str, backend: str, device: torch.device) -> None:
    tensors = EXAMPLES[op].make(device=device)
    for other in differentiable(op):
        tensors[other].requires_grad_(other == name)
    parity(op, backend, tensors)


@PER_OPERATION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_again(op: str, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    require(op, backend, device, dtype)

    def once() -> list[Tensor]:
        tensors = EXAMPLES[op].make(60, 40, dtype, device)
        torch.manual_seed(3)
        results = function(op, backend)(**tensors)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.full_like(result, 0.37) for result in results])
        grads = [tensors[name].grad for name in differentiable(op)]
        return [*(result.detach() for result in results), *grads]

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


@PER_OPERATION
def test_the_same_without_gradients(op: str, backend: str, device: torch.device) -> None:
    """The raw route gives the bits of the recorded one."""
    tensors = EXAMPLES[op].make(device=device)
    results = []
    for recorded in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(recorded):
            results.append(function(op, backend)(**tensors))
    for with_grad, without in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(with_grad, without)
        assert with_grad.requires_grad and not without.requires_grad


@PER_OPERATION
def test_empty(op: str, backend: str, device: torch.device) -> None:
    tensors = EXAMPLES[op].make(0, 8, device=device)
    results = function(op, backend)(**tensors)
    for result in results if isinstance(results, tuple) else (results,):
        assert result.numel() == 0 or result.dim() == 0
        if result.numel() == 0:
            result.sum().backward(retain_graph=True)
    for name in differentiable(op):
        grad = tensors[name].grad
        assert grad is None or (grad == 0).all()


@PER_OPERATION
def test_gradcheck_in_float64(op: str, device: torch.device) -> None:
    tensors = EXAMPLES[op].make(4, 5, torch.float64, device)
    names = differentiable(op)

    def run(*leaves: Tensor) -> Any:
        torch.manual_seed(3)
        return function(op, "torch")(**{**tensors, **dict(zip(names, leaves, strict=True))})

    assert torch.autograd.gradcheck(run, tuple(tensors[name] for name in names))


def test_normal_draws_the_same_values_in_every_dtype() -> None:
    wide, low = (normal(3, dtype=dtype, device=torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(wide.to(torch.bfloat16), low)
