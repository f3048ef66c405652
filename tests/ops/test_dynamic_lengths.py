"""torch.compile(dynamic=True) and torch.export: one graph for any length, of every operation and patched layer."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.export import Dim

import transformer_kernels as tk
from tests.support.operations import EXAMPLES, function

LENGTHS = (14, 22, 26)  # of no other size of an example: equal ones are assumed to stay equal
WIDTH = 32
LAYERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 1),
    "encoder, norm first": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True, activation="gelu"),
        1,
    ),
    "decoder": (lambda: nn.TransformerDecoderLayer(WIDTH, 4, 64, batch_first=True), 2),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), 3),
    "layer_norm": (lambda: nn.LayerNorm(WIDTH), 1),
    "rms_norm": (lambda: nn.RMSNorm(WIDTH), 1),
    "gelu": (nn.GELU, 1),
    "softmax": (lambda: nn.Softmax(-1), 1),
}


class OfExample(nn.Module):
    """An operation with the options of its example, on a dict of tensors."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.function = function(op)

    def forward(self, tensors):
        return self.function(**tensors)


def layer(name):
    """A patched layer, and the inputs that it takes for a length."""
    make, count = LAYERS[name]
    made = make()
    tk.patch(made)
    return made, lambda length: tuple(torch.randn(2, length, WIDTH) for _ in range(count))


def first(outputs):
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def graphs_of(module, inputs_of, training):
    """The number of graphs compiled for all LENGTHS."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    for length in LENGTHS:
        with torch.set_grad_enabled(training):
            out = first(compiled(*inputs_of(length)))
        if training:
            out.sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("op", EXAMPLES)
def test_an_operation_is_compiled_once(op, training):
    assert graphs_of(OfExample(op), lambda length: (EXAMPLES[op].make(length),), training) == 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_patched_layer_is_compiled_once(name, training):
    module, inputs_of = layer(name)
    module.train(training)

    def leaves(length):
        return tuple(x.requires_grad_(training) for x in inputs_of(length))

    assert graphs_of(module, leaves, training) == 1


@pytest.mark.parametrize("op", EXAMPLES)
def test_an_operation_is_exported_for_any_length(op):
    """By the tracer that is not strict, which reads shapes as symbols."""
    small, large = ({k: v.detach() for k, v in EXAMPLES[op].make(rows).items()} for rows in (12, 20))
    sizes = {
        name: {i: Dim.AUTO for i in range(x.dim()) if x.shape[i] != large[name].shape[i]} for name, x in small.items()
    }
    exported = torch.export.export(OfExample(op), (small,), dynamic_shapes=(sizes,), strict=False).module()
    torch.manual_seed(0)
    found = first(exported(large))
    torch.manual_seed(0)
    torch.testing.assert_close(found, first(function(op)(**large)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_patched_layer_is_exported_for_any_length(name):
    module, inputs_of = layer(name)
    module.eval()
    inputs = inputs_of(LENGTHS[0])
    with torch.no_grad():
        exported = torch.export.export(
            module, inputs, dynamic_shapes=tuple({1: Dim.DYNAMIC} for _ in inputs), strict=False
        ).module()
        large = inputs_of(31)
        torch.testing.assert_close(first(exported(*large)), first(module(*large)), rtol=1e-5, atol=1e-5)
