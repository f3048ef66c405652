"""torch.nn's encoders and decoders, compiled: masks do not end the trace, and inference runs on these kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.handwritten import compare
from transformer_kernels.patching import graph

CAUSAL = nn.Transformer.generate_square_subsequent_mask(8)
PADDING = torch.arange(8) >= torch.tensor([[8], [5]])
ADDED = torch.zeros(2, 8).masked_fill(PADDING, -torch.inf)
ALL_HIDDEN = torch.ones(2, 8, dtype=torch.bool)
OTHER = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
MASKS = {
    "none": {},
    "causal": {"mask": CAUSAL},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"mask": CAUSAL, "src_key_padding_mask": ADDED},
    "bool": {"mask": CAUSAL != 0},
    "other": {"mask": OTHER.masked_fill(OTHER < 0, 0.0)},
    "nothing visible": {"src_key_padding_mask": ALL_HIDDEN},
}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def encoder(**options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def routed(model: nn.Module):
    graph.GraphRoute()  # registers what is traced
    return compare.routed(model, compare.SINGLE.kernels)


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("options", ({}, {"norm_first": True, "activation": "gelu"}), ids=("relu", "norm_first-gelu"))
def test_inference_of_an_encoder(options, masks):
    model = encoder(**options).eval()
    compiled, matched = routed(model)
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, **masks), model(x, **masks), rtol=2e-5, atol=2e-6, equal_nan=True)
    assert matched["encoder_layer"] == 2


@pytest.mark.parametrize(("rows", "width"), [(16, 16), (96, 128)])
def test_small_inputs_stay_torchs(rows, width):
    model = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True).eval()
    route = graph.GraphRoute()
    x = torch.randn(2, rows // 2, width)
    with torch.no_grad():
        torch.compile(model, backend=route)(x)
    assert "encoder_layer" not in route.report().matched


def test_training_of_an_encoder_with_a_mask_is_one_graph():
    model = encoder(dropout=0.0)
    compiled, matched = routed(model)
    torch._dynamo.utils.counters.clear()
    x = torch.randn(2, 8, 16)
    found, expected = [], []
    for function, gradients in ((compiled, found), (model, expected)):
        model.zero_grad()
        function(x, mask=CAUSAL).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert matched["multi_head_attention"] == 2 and not torch._dynamo.utils.counters["graph_break"]


def test_a_decoder_with_masks_is_one_graph():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1).eval()
    compiled, matched = routed(model)
    x = torch.randn(2, 8, 16)

    def run(function) -> Tensor:
        return function(x, x, tgt_mask=CAUSAL, memory_mask=CAUSAL)

    torch.testing.assert_close(run(compiled), run(model), rtol=2e-5, atol=2e-6)
    assert matched["multi_head_attention"] == 2


@pytest.mark.filterwarnings("always:Support for mismatched")
def test_a_warning_does_not_end_the_trace():
    model = encoder(dropout=0.0)
    compiled, _ = routed(model)
    torch._dynamo.utils.counters.clear()
    x, masks = torch.randn(2, 8, 16), {"mask": CAUSAL, "src_key_padding_mask": PADDING}
    with pytest.warns(UserWarning, match="mismatched"):
        found = compiled(x, **masks)
    torch.testing.assert_close(found, model(x, **masks), rtol=2e-5, atol=2e-6)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_layer_whose_input_has_a_gradient_keeps_it():
    model = encoder().eval().requires_grad_(False)
    compiled, _ = routed(model)
    x = torch.randn(2, 8, 16, requires_grad=True)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_entry_point_registers_what_is_traced():
    assert graph.transformer_kernels.__name__ == "transformer_kernels"
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        getattr(graph, "other")  # noqa: B009
