"""The layer that gives the logits: exact gradients, from the rows that have one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.backends import cpu
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.patching import _products
from transformer_kernels.patching._output import OutputLayer
from transformer_kernels.patching._swap import swap


def pair(bias=True):
    torch.manual_seed(0)
    eager = torch.nn.Linear(6, 50, bias=bias)
    ours = copy.deepcopy(eager)
    swap(ours, OutputLayer, None)
    return eager, ours


class Products(TorchDispatchMode):
    """Counts the multiplications of every matrix product."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.count += args[0].numel() * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def gradients(layer, x, rows, value=1.0):
    """Of x and the parameters, where only some rows of the logits count."""
    x = x.clone().requires_grad_()
    weights = torch.zeros(x.shape[:-1])
    weights.flatten()[rows] = value
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(*x.shape[:-1], 50, generator=generator) * weights.unsqueeze(-1)
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)


@pytest.mark.parametrize("rows", [[], [0], [3, 17], list(range(24))])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_a_linear_layer(rows, bias):
    eager, ours = pair(bias)
    x = torch.randn(2, 12, 6)
    assert torch.equal(ours(x), eager(x))
    for mine, theirs in zip(gradients(ours, x, rows), gradients(eager, x, rows), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_inference_is_the_product_of_any_patched_layer(monkeypatch):
    eager, ours = pair()
    called = []
    monkeypatch.setattr(_products, "linear_is_ours", lambda *given: called.append(given) or False)
    x = torch.randn(2, 12, 6)
    with torch.no_grad():
        assert torch.equal(ours(x), eager(x)) and len(called) == 1


def test_only_rows_with_a_gradient_are_multiplied():
    _, ours = pair()
    counted = []
    for rows in (2, 22, 23, 30):
        with Products() as products:
            gradients(ours, torch.randn(30, 6), list(range(rows)))
        counted.append(products.count)
    assert counted == [2 * rows * 6 * 50 for rows in (2, 22, 30, 30)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_row_whose_gradient_has_one_sign_counts(sign):
    eager, ours = pair()
    x, dy = torch.randn(30, 6), torch.zeros(30, 50)
    dy[4, 7] = sign
    mine, theirs = (torch.autograd.grad(layer(x), list(layer.parameters()), dy) for layer in (ours, eager))
    for given, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(given, expected)


def test_a_row_of_nan_is_a_row_with_a_gradient():
    _, ours = pair()
    dx, dweight, _ = gradients(ours, torch.randn(30, 6), [3], float("nan"))
    assert dx[3].isnan().all() and not dx[4].isnan().any() and dweight.isnan().all()


def test_second_derivatives_are_those_of_a_linear_layer():
    """In a row without a gradient, the gradient of the gradient is none the less."""
    results = []
    for layer in pair():
        x = torch.randn(30, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
        dy = torch.zeros(30, 50).requires_grad_()
        dx, dweight = torch.autograd.grad(layer(x), [x, layer.weight], dy, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum() + dx.sum() + dweight.sum(), [dy, x], allow_unused=True))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_transforms_and_autocast_go_past_it():
    eager, ours = pair()
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.vmap(ours)(x), eager(x))
    tangent = torch.func.jvp(ours, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(eager, (x,), (torch.ones_like(x),))[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype is torch.bfloat16


def test_a_recorded_step_multiplies_the_rows_of_each_batch(monkeypatch):
    """The kernels run inside one call of the recording, on memory of each replay."""
    monkeypatch.setattr(linear_cpu, "MIN_ROWS_ON_AMX", linear_cpu.MIN_ROWS)
    linear_cpu.few_rows.cache_clear()
    weights = []
    for recorded in (False, True):
        _, layer = pair()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)

        def step(x, targets, layer=layer, optimizer=optimizer):
            loss = torch.nn.functional.cross_entropy(layer(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = tk.graphed(step, optimizer, warm_up_calls=1) if recorded else step
        generator = torch.Generator().manual_seed(3)
        for kept in (600, 600, 300, 40, 500, 600):
            targets = torch.randint(50, (600,), generator=generator)
            targets[kept:] = -100
            with cpu.recorded(calls := []):
                run(torch.randn(600, 6, generator=generator), targets)
            names = [kernel.__name__ for kernel, _ in calls]
            if kept in (300, 500):  # a replay
                assert names.count("linear_backward_weight") == 1
        weights.append(layer.weight.detach())
    linear_cpu.few_rows.cache_clear()
    torch.testing.assert_close(*weights)
