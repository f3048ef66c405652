"""Equal computations of a graph are merged where nothing can tell them apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_kernels.patching import graph

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(function):
    """The function compiled for the backend "torch", and the graphs that it became."""
    graphs = []

    def backend(module, inputs):
        graph.rewrite(module, torch.is_grad_enabled(), "torch")
        graphs.append(module.graph)
        return module.forward

    return torch.compile(function, backend=backend), graphs


def count(graphs, name: str) -> int:
    return sum(name in str(getattr(node.target, "__name__", node.target)) for graph in graphs for node in graph.nodes)


X = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.tensor([[3, 4, 5, 6, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0]])


def layer(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(-2, -1)).masked_fill(mask.unsqueeze(1) == 0, -1e9)
    return scores.softmax(-1) @ x


def stacked(x: Tensor, tokens: Tensor) -> Tensor:
    mask = (tokens != 0).unsqueeze(-2)
    return layer(layer(layer(x, mask), mask), mask)


def test_a_mask_that_each_layer_derives_is_prepared_once():
    function, graphs = compiled(stacked)
    with torch.no_grad():
        torch.testing.assert_close(function(X, TOKENS), stacked(X, TOKENS))
    assert count(graphs, "fused") == 0 and count(graphs, "unsqueeze") == 2 and count(graphs, "eq") == 1
    assert sum("masks" in node.name for node in graphs[0].nodes) == 1


def written(x: Tensor, tokens: Tensor) -> Tensor:
    mask = (tokens != 0).unsqueeze(-2)
    first = layer(x, mask)
    mask[..., 0] = False
    return layer(first, mask)


def derived_is_written(x: Tensor, tokens: Tensor) -> Tensor:
    first, second = tokens == 0, tokens == 0
    first[:, 1] = True
    return torch.where(first, 1.0, 2.0) + torch.where(second, 1.0, 2.0)


def written_through_a_view(x: Tensor, tokens: Tensor) -> Tensor:
    first, second = tokens == 0, tokens == 0
    first.view(-1)[3] = True
    return first.double() + second.double()


def input_is_written(x: Tensor, tokens: Tensor) -> Tensor:
    copy = tokens.clone()
    first = copy == 0
    copy[:, 1] = 0
    second = copy == 0
    return first.double() + 2.0 * second.double()


def of_other_types(x: Tensor, tokens: Tensor) -> Tensor:
    return (~torch.full((2,), 1)).double() + (~torch.full((2,), True)).double()


APART = (written, derived_is_written, written_through_a_view, input_is_written, of_other_types)


@pytest.mark.parametrize("function", APART)
def test_what_is_written_or_differs_stays_apart(function):
    run, _ = compiled(function)
    with torch.no_grad():
        found, expected = run(X, TOKENS), function(X, TOKENS)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)


def two_results(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens == 0, tokens == 0


def two_views(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return (tokens == 0)[:, :5], (tokens == 0)[:, :4]


@pytest.mark.parametrize("function", (two_results, two_views))
def test_results_do_not_share_memory(function):
    run, _ = compiled(function)
    first, second = run(TOKENS)
    first.fill_(True)
    torch.testing.assert_close(second, function(TOKENS)[1])


def test_weights_that_are_returned_are_not_computed_twice():
    """Dropout in evaluation mode is the identity: what it returns is the weights inside the match."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.dropout((x @ x.transpose(-2, -1)).softmax(-1), 0.1, False)
        return weights @ x, weights

    run, graphs = compiled(function)
    with torch.no_grad():
        found, expected = run(X), function(X)
    torch.testing.assert_close(found, expected)
    assert count(graphs, "matmul") == 2 and not any("fused" in node.name for node in graphs[0].nodes)


class Rotated(torch.nn.Module):
    """Two rotations by the negative angle, whose negated table becomes one."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(16, dtype=torch.float64).view(8, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            first, second = x[..., :2], x[..., 2:]
            x = torch.cat((first * self.cos + second * self.sin, first * (-self.sin) + second * self.cos), -1)
        return x


def test_a_constant_inside_two_matches():
    x, model = X[..., :4].clone().requires_grad_(), Rotated()
    function, graphs = compiled(model)
    found, expected = function(x), model(x)
    torch.testing.assert_close(found, expected)
    for ours, eager in zip(*(torch.autograd.grad(y.cos().sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, eager)
    assert count(graphs, "cat") == 0 and count(graphs, "rotate") + count(graphs, "__call__") >= 2
