"""Patched modules of torch.nn give what they give unpatched: in float64, so that it is exact."""

from __future__ import annotations

import copy
import functools
import pickle
import re

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from transformer_kernels.patching._swap import Patched

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.double()


def assert_same_with_gradients(module, *inputs, **options):
    """The module and its patched copy give the same outputs and gradients."""
    results = []
    ours = copy.deepcopy(randomised(module))
    assert tk.patch(ours).patched
    for each in (module, ours):
        each.zero_grad()
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in inputs]
        out = each(*leaves, **options)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in leaves), *(p.grad for p in each.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return ours


def leaky(x):
    return torch.nn.functional.leaky_relu(x)


ACTIVATIONS = ["relu", "gelu", nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), leaky]
MASKS = [{}, {"src_key_padding_mask": PADDING}, {"src_mask": CAUSAL, "is_causal": True}]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda value: str(value).split(" at")[0])
def test_encoder_layer(norm_first, activation):
    layer = nn.TransformerEncoderLayer(12, 2, 24, 0.0, activation, batch_first=True, norm_first=norm_first)
    for masks in MASKS:
        assert_same_with_gradients(layer, torch.randn(2, 5, 12), **masks)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_decoder_layer(norm_first, bias):
    layer = nn.TransformerDecoderLayer(12, 2, 24, 0.0, "gelu", norm_first=norm_first, bias=bias)
    tgt, memory = torch.randn(5, 2, 12), torch.randn(7, 2, 12)
    assert_same_with_gradients(layer, tgt, memory)
    hint = {"memory_mask": torch.ones(5, 3).triu(1).bool(), "memory_is_causal": True}  # as torch aligns it
    assert_same_with_gradients(layer, tgt, memory[:3], **hint)
    hidden = torch.arange(7) >= torch.tensor([[7], [4]])
    assert_same_with_gradients(
        layer,
        tgt,
        memory,
        tgt_mask=CAUSAL,
        tgt_key_padding_mask=PADDING.double() * -9.0,
        memory_key_padding_mask=hidden,
    )


@pytest.mark.parametrize("training", [True, False])
def test_a_whole_transformer(training):
    model = nn.Transformer(12, 2, 2, 2, 24, dropout=0.0, batch_first=True).train(training)
    src, tgt = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "tgt_mask": CAUSAL}
    ours = assert_same_with_gradients(model, src, tgt, **masks)
    with torch.no_grad():  # where torch would take its fast path, and nested tensors
        torch.testing.assert_close(
            ours(src.double(), tgt.double(), **masks), model(src.double(), tgt.double(), **masks)
        )


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_of_a_layer(norm_first, rate):
    layer = nn.TransformerEncoderLayer(12, 2, 24, rate, batch_first=True, norm_first=norm_first).double()
    ours, x = copy.deepcopy(layer), torch.randn(2, 5, 12, dtype=torch.float64)
    tk.patch(ours)
    if rate == 0.5:
        assert not torch.equal(ours(x), ours(x))
        ours, layer = ours.eval(), layer.eval()
    torch.testing.assert_close(ours(x), layer(x))


def test_no_fast_path_passes_a_backend_by():
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    ours = nn.TransformerEncoder(layer, 1).eval()
    tk.patch(ours)
    for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer):
        (module,) = (module for module in ours.modules() if isinstance(module, kind))
        module.backend = "nonsense"
        with torch.no_grad(), pytest.raises(ValueError, match="backend must be one of"):
            ours(torch.randn(2, 5, 12), src_key_padding_mask=PADDING)
        module.backend = None


def test_single_modules_wherever_they_stand():
    model = nn.Sequential(nn.LayerNorm(12), nn.ModuleDict({"a": nn.Sequential(nn.GELU("tanh"), nn.Softmax(-2))})["a"])
    report = tk.patch(ours := copy.deepcopy(model))
    assert [row.operation for row in report.rows] == ["layer_norm", "gelu", "softmax"]
    x = torch.randn(3, 4, 12)
    torch.testing.assert_close(ours(x), model(x))
    assert isinstance(ours[0], nn.LayerNorm) and list(ours.state_dict()) == list(model.state_dict())
    assert tk.patch(alone := nn.GELU()).rows[0].name == "" and "(the model)" in str(tk.patch(alone))


class Shifted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_what_is_not_known_exactly_is_left():
    kinds = {"kdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}
    model = nn.Sequential(Shifted(12), nn.Softmax(), *(nn.MultiheadAttention(12, 2, **options) for options in kinds))
    kept = [type(module) for module in model]
    report = tk.patch(model)
    assert [row.reason for row in report.left] == [
        "a subclass of torch.nn.LayerNorm with its own code; `accelerate` reroutes its calls of layer_norm",
        "dim is not given",
        "kdim or vdim differ from embed_dim",
        "add_bias_kv or add_zero_attn",
        "add_bias_kv or add_zero_attn",
    ]
    assert [type(module) for module in model] == kept


def test_a_layer_with_a_method_of_its_own_is_left():
    layer = nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True)
    layer._ff_block = lambda x: 0 * x
    x = torch.randn(2, 5, 12)
    before = layer(x)
    assert [row.reason for row in tk.patch(layer).left] == ["its method _ff_block is replaced on this instance"]
    torch.testing.assert_close(layer(x), before)


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def test_unpatch_refuses_a_class_made_of_the_patched_one():
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(12))
    tk.patch(model)
    nn.utils.parametrize.register_parametrization(model[1], "weight", Twice())
    with pytest.raises(RuntimeError, match="unpatch: 1 became a ParametrizedLayerNorm after patch; undo that first"):
        tk.unpatch(model)
    x = torch.randn(3, 12)
    expected = 2 * nn.functional.layer_norm(nn.functional.gelu(x), (12,))
    torch.testing.assert_close(model(x), expected)
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    tk.unpatch(model)
    torch.testing.assert_close(model(x), expected)


def test_our_own_modules_keep_their_backend():
    model = nn.Sequential(tk.nn.LayerNorm(12, backend="torch"))
    assert not tk.patch(model, backend="auto").rows
    tk.unpatch(model)
    assert model[0].backend == "torch" and type(model[0]) is tk.nn.LayerNorm


def test_unpatched_and_pickled():
    model = nn.Transformer(12, 2, 1, 1, 24, dropout=0.0)
    before = [(type(module), sorted(vars(module).items(), key=lambda item: item[0])) for module in model.modules()]
    tk.patch(model)
    twin = pickle.loads(pickle.dumps(model))
    src, tgt = torch.randn(5, 2, 12), torch.randn(5, 2, 12)
    assert torch.equal(twin(src, tgt), model(src, tgt))
    for each in (model, twin):
        tk.unpatch(each)
        assert not any(isinstance(module, Patched) for module in each.modules())
    after = [(type(module), sorted(vars(module).items(), key=lambda item: item[0])) for module in model.modules()]
    assert [(kind, [name for name, _ in content]) for kind, content in after] == [
        (kind, [name for name, _ in content]) for kind, content in before
    ]
    assert all(module._qkv_same_embed_dim for module in model.modules() if isinstance(module, nn.MultiheadAttention))


@pytest.mark.parametrize("kind", ["patched", "ours"])
def test_attention_draws_its_initial_weights_again(kind):
    module = tk.nn.MultiHeadAttention(12, 2) if kind == "ours" else nn.MultiheadAttention(12, 2)
    tk.patch(module)
    torch.manual_seed(1)
    twin = nn.MultiheadAttention(12, 2)
    torch.manual_seed(1)
    nn.Linear(12, 12)  # as the constructor does
    module._reset_parameters()
    assert torch.equal(module.in_proj_weight, twin.in_proj_weight) and not module._qkv_same_embed_dim


class NamedRMSNorm(nn.Module):
    """The code of an RMSNorm of transformers, with another name of its argument."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, rows):
        input_dtype = rows.dtype
        rows = rows.to(torch.float32)
        variance = rows.pow(2).mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * rows.to(input_dtype)


KEYWORDS = [
    (nn.LayerNorm(8), "input"),
    (nn.RMSNorm(8), "x"),
    (nn.GELU(), "input"),
    (nn.Softmax(-1), "input"),
    (NamedRMSNorm(8), "rows"),
]


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize(("module", "name"), KEYWORDS, ids=lambda value: type(value).__name__)
def test_an_argument_by_its_name(module, name, backend):
    x = torch.randn(4, 8)
    expected = module(x)
    ours = copy.deepcopy(module)
    assert tk.patch(ours, backend).patched
    torch.testing.assert_close(ours(**{name: x}), expected)


@pytest.mark.parametrize("norm_first", [False, True])
def test_submodules_replaced_after_patching(norm_first):
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True, norm_first=norm_first))
    tk.patch(layers[1])
    x = torch.randn(2, 5, 12)
    for layer in layers:
        layer.dropout1, layer.dropout2, layer.norm2 = nn.Identity(), nn.Tanh(), nn.Identity()
    torch.testing.assert_close(layers[1](x), layers[0](x))


def test_the_output_projection_is_not_called():
    """As in torch, whose attention reads its parameters: a hook of it sees no call."""
    module = nn.MultiheadAttention(12, 2)
    x = torch.randn(5, 2, 12)
    expected = module(x, x, x)[0]
    module.out_proj.register_forward_hook(lambda module, inputs, out: out + 1.0)
    tk.patch(module, "torch")
    torch.testing.assert_close(module(x, x, x)[0], expected)


@pytest.mark.parametrize("length", [5, 96])
def test_causality_without_a_mask_means_what_it_means_unpatched(length):
    """torch raises with gradients, and its fused inference ignores it; whatever the size."""
    layer = nn.TransformerEncoderLayer(64, 2, 64, 0.0, batch_first=True).eval()
    x = torch.randn(32, length, 64)
    with torch.no_grad():
        expected = layer(x, is_causal=True)
    tk.patch(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, is_causal=True), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(x, is_causal=True)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        layer.self_attn(x, x, x, is_causal=True)


REFUSED = [
    (nn.GELU(), torch.arange(4)),
    (nn.Softmax(-1), torch.arange(4)),
    (nn.Softmax(3), torch.randn(2, 4)),
    (nn.LayerNorm(4), torch.randn(2, 5)),
    (nn.LayerNorm(4).half(), torch.randn(2, 4)),
    (nn.RMSNorm(4), torch.randn(2, 5)),
]


@pytest.mark.parametrize(("module", "x"), REFUSED, ids=lambda value: type(value).__name__)
def test_errors_are_torchs(module, x):
    with pytest.raises(Exception) as theirs:  # whatever torch raises
        module(x)
    ours = copy.deepcopy(module)
    tk.patch(ours)
    with pytest.raises(theirs.type) as mine:
        ours(x)
    assert type(mine.value) is theirs.type
    tk.patch(ours, "torch")
    with pytest.raises((TypeError, ValueError, IndexError)):
        ours(x)


@pytest.mark.parametrize(
    "options", [{"key": torch.randn(4, 3, 12)}, {"attn_mask": torch.zeros(5, 6)}, {"query": torch.randn(5, 3, 11)}]
)
def test_errors_of_attention_are_torchs(options):
    x = torch.randn(5, 3, 12)
    given = {"query": x, "key": x, "value": x, **options}
    module = nn.MultiheadAttention(12, 2)
    with pytest.raises(Exception) as theirs:  # whatever torch raises
        module(**given)
    tk.patch(module)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        module(**given)


def test_a_number_is_normalised():
    """torch's softmax takes a tensor without axes, for which there is no kernel."""
    module = nn.Softmax(-1)
    tk.patch(module)
    assert module(torch.tensor(3.0, requires_grad=True)) == 1.0
    tk.patch(module, "torch")
    with pytest.raises(IndexError, match="Softmax: dim must be an axis"):
        module(torch.tensor(3.0))


def outcome(module, *inputs, **options):
    """The result of a call, or the exception that it raises."""
    try:
        out = module(*inputs, **options)
    except Exception as error:
        return type(error), str(error)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.float32])
def test_masks_of_another_dtype_than_the_queries(dtype, training, recorded):
    attention, layer = nn.MultiheadAttention(12, 2), nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True)
    x = torch.randn(2, 5, 12)
    for module, inputs, names in (
        (attention, (x, x, x), ("attn_mask", "key_padding_mask")),
        (layer, (x,), ("src_mask", "src_key_padding_mask")),
        (nn.TransformerDecoderLayer(12, 2, 24, 0.0), (x, x), ("tgt_mask", "tgt_key_padding_mask")),
    ):
        module.train(training)
        patched = copy.deepcopy(module)
        tk.patch(patched)
        first = 5 if module is layer else 2
        masks = torch.zeros(first, first, dtype=dtype), torch.zeros((2, 5) if module is layer else (5, 2), dtype=dtype)
        for name, mask in zip(names, masks, strict=True):
            with torch.set_grad_enabled(recorded):
                mine, theirs = (outcome(each, *inputs, **{name: mask}) for each in (patched, module))
            if isinstance(theirs, tuple):
                assert mine == theirs, name
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_block_that_is_replaced_after_patching(kind):
    plain = kind(12, 2, 24, 0.0)
    patched = copy.deepcopy(plain)
    tk.patch(patched)
    for each in (plain, patched):
        each._ff_block = torch.zeros_like
    inputs = torch.randn(1 if kind is nn.TransformerEncoderLayer else 2, 5, 2, 12)
    torch.testing.assert_close(patched(*inputs), plain(*inputs), rtol=1e-4, atol=1e-5)


class Doubled(nn.TransformerEncoderLayer):
    """A layer with its own feed-forward block, which torch's fused inference path leaves out."""

    def _ff_block(self, x):
        return 2 * super()._ff_block(x)


@pytest.mark.parametrize("layers", [0, 2])
def test_the_block_of_a_subclass_runs_in_inference_as_in_training(layers):
    layer = Doubled(12, 2, 24, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers) if layers else layer
    tk.patch(model.eval())
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        found = model(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_small_inference_changes_no_module_that_other_threads_read(monkeypatch):
    attention = nn.MultiheadAttention(12, 2, batch_first=True)
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    modules = [attention.eval(), layer.eval()]
    for module in modules:
        tk.patch(module)
    before = [{**vars(part)} for module in modules for part in module.modules()]
    called = []

    def observed(fused, *args):
        called.append([{**vars(part)} for module in modules for part in module.modules()] == before)
        return fused(*args)

    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        monkeypatch.setattr(torch, name, functools.partial(observed, getattr(torch, name)))
    x = torch.randn(1, 5, 12)
    with torch.no_grad():
        attention(x, x, x)
        layer(x)
    assert called == [True, True]


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention])
def test_a_parametrized_module_in_small_inference(kind):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    plain = (kind(12, 2, batch_first=True) if kind is nn.MultiheadAttention else kind(12)).eval()
    patched = copy.deepcopy(plain)
    tk.patch(patched)
    for each in (plain, patched):
        name = "in_proj_weight" if kind is nn.MultiheadAttention else "weight"
        nn.utils.parametrize.register_parametrization(each, name, Twice())
        each.eval()
    x = torch.randn(1, 5, 12)
    inputs = (x, x, x) if kind is nn.MultiheadAttention else (x,)
    with torch.no_grad():
        torch.testing.assert_close(outcome(patched, *inputs), outcome(plain, *inputs), rtol=1e-4, atol=1e-5)
