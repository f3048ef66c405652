"""docs/backends.md: which exports of a patched model work, and what the others say."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from transformer_kernels.backends.errors import UnsupportedByBackend

WIDTH = 32


@pytest.fixture
def model():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, "gelu", batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.LayerNorm(WIDTH), nn.GELU(), nn.Softmax(-1)).eval()


@pytest.fixture
def x():
    return torch.randn(2, 7, WIDTH)


def patched(model, backend=None):
    ours = copy.deepcopy(model)
    tk.patch(ours, backend)
    return ours


def exported(model, x):
    return torch.export.export(model, (x,)).module()(x)


def strictly_exported(model, x):
    return torch.export.export(model, (x,), strict=True).module()(x)


def saved(model, x):
    memory = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), memory)
    memory.seek(0)
    return torch.export.load(memory).module()(x)


def compiled(model, x):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def traced(model, x):
    memory = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, (x,)), memory)
    memory.seek(0)
    return torch.jit.load(memory)(x)


WORKING = [exported, strictly_exported, saved, compiled, traced]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("export", WORKING, ids=lambda export: export.__name__)
def test_exports_with_the_operators(export, model, x):
    torch.testing.assert_close(export(patched(model), x), model(x), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*Python boolean")
def test_a_trace_of_causal_attention_has_the_operator(x):
    """The lengths that are compared are tensors in it."""
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    ours = patched(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 48, batch_first=True), 1)).eval()
    graph = torch.jit.trace(ours, (x, x, mask)).inlined_graph
    assert sum(node.kind() == "transformer_kernels::attention" for node in graph.nodes()) == 2


def test_an_export_has_the_operators(model, x):
    graph = torch.export.export(patched(model), (x,)).graph
    assert any(str(node.target).startswith("transformer_kernels.") for node in graph.nodes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_onnx(exporter, model, x):
    """The original code runs during the export: the same model as before patching."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    def operators(module):
        memory = io.BytesIO()
        program = torch.onnx.export(module, (x,), memory, dynamo=exporter == "dynamo", verbose=False)
        if program is not None:
            return [node.op_type for node in program.model_proto.graph.node]
        import onnx

        return [node.op_type for node in onnx.load_from_string(memory.getvalue()).graph.node]

    assert operators(patched(model)) == operators(model)
    if exporter == "torchscript":
        with pytest.raises(UnsupportedByBackend, match=r"torch.onnx.export is active.*tk.unpatch\(model\) first"):
            operators(patched(model, "torch"))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("part", [None, 1, 2, 3], ids=["whole", "layer", "norm", "activation"])
def test_scripts_are_refused(part, model, x):
    ours = patched(model)
    ours = ours if part is None else ours[part]
    with pytest.raises(RuntimeError, match=r"torch.jit.script: \w+ is patched.*tk.unpatch\(model\) first"):
        torch.jit.script(ours)
    tk.unpatch(ours)
    torch.jit.script(ours)


def test_transforms(model, x):
    ours = patched(model)
    torch.testing.assert_close(torch.func.vmap(ours)(x[None])[0], model(x))
    with pytest.raises(UnsupportedByBackend, match=r"a transform of torch.func.*tk.unpatch\(model\) first"):
        torch.func.vmap(patched(model, "torch"))(x[None])
