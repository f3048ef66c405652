"""The modules have the results and state dicts of torch.nn, and can replace its modules."""

import copy
import pickle

import pytest
import torch

import python_ref
from transformer_kernels import nn
from transformer_kernels.backends import dispatch

MODULES = {
    "LayerNorm": (lambda **options: nn.LayerNorm(12, **options), lambda: torch.nn.LayerNorm(12)),
    "GELU": (lambda **options: nn.GELU("tanh", **options), lambda: torch.nn.GELU("tanh")),
    "Softmax": (lambda **options: nn.Softmax(-1, **options), lambda: torch.nn.Softmax(-1)),
    "MultiHeadAttention": (
        lambda **options: nn.MultiHeadAttention(12, 3, batch_first=True, **options),
        lambda: torch.nn.MultiheadAttention(12, 3, batch_first=True),
    ),
}


def apply(module, x):
    return module(x, x, x, need_weights=False)[0] if isinstance(module, torch.nn.MultiheadAttention) else module(x)


def randomise(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def assert_same_with_gradients(ours, theirs, *inputs):
    """Both have equal outputs and gradients of all inputs and parameters, in fp64."""
    results = []
    for module in (ours.double(), theirs.double()):
        module.zero_grad()
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in inputs]
        out = module(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())])
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODULES)
class TestEveryModule:
    def test_is_the_torch_module(self, name):
        ours, theirs = (make() for make in MODULES[name])
        assert isinstance(ours, type(theirs))

    def test_state_dict_loads_in_both_directions(self, name):
        ours, theirs = (randomise(make()) for make in MODULES[name])
        x = torch.randn(2, 5, 12)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(apply(ours, x), apply(theirs, x), rtol=1e-5, atol=1e-6)
        randomise(ours)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(apply(ours, x), apply(theirs, x), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
    )
    def test_copies(self, name, duplicate):
        ours = randomise(MODULES[name][0](backend="torch"))
        twin = duplicate(ours)
        x = torch.randn(2, 5, 12)
        assert twin.backend == "torch"
        assert torch.equal(apply(ours, x), apply(twin, x))

    def test_unknown_backend_is_refused(self, name):
        with pytest.raises(ValueError, match="backend must be one of torch, cpu, triton, cuda, auto; got 'rocm'"):
            MODULES[name][0](backend="rocm")

    @pytest.mark.usefixtures("unplanned")
    def test_backend_is_passed_on(self, name, monkeypatch):
        requested = []

        original = dispatch.select

        def select(operation, backend, call):
            requested.append(backend)
            return original(operation, "torch", call)

        monkeypatch.setattr(dispatch, "select", select)
        apply(MODULES[name][0](backend="triton"), torch.randn(2, 5, 12))
        assert requested == ["triton"]

    def test_representation_tells_the_backend(self, name):
        make = MODULES[name][0]
        assert "backend='torch'" in repr(make(backend="torch"))
        assert "backend" not in repr(make())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12)], ids=str)
def test_layer_norm_over_any_last_axes(shape, affine, bias):
    ours, theirs = nn.LayerNorm(shape, 1e-3, affine, bias), torch.nn.LayerNorm(shape, 1e-3, affine, bias)
    theirs.load_state_dict(randomise(ours).state_dict())
    assert_same_with_gradients(ours, theirs, torch.randn(2, 5, 12))


def test_layer_norm_without_parameters_survives_meta():
    norm = nn.LayerNorm(12, elementwise_affine=False, device="meta").to_empty(device="cpu")
    x = torch.randn(3, 12)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (12,)), rtol=1e-5, atol=1e-6)
    assert not list(norm.buffers())


def test_layer_norm_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"LayerNorm: x must end with shape \(5, 12\); got \(5, 13\)"):
        nn.LayerNorm((5, 12))(torch.randn(5, 13))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_softmax_over_any_axis(dim):
    assert_same_with_gradients(nn.Softmax(dim), torch.nn.Softmax(dim), torch.randn(4, 5, 6))


def test_softmax_over_an_axis_that_is_not_there():
    with pytest.raises(IndexError, match=r"Softmax: dim must be an axis of x \(4, 5\); got 2"):
        nn.Softmax(2)(torch.randn(4, 5))
    with pytest.raises(TypeError, match="Softmax: dim must be an integer; got None"):
        nn.Softmax(None)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    assert_same_with_gradients(nn.GELU(approximate), torch.nn.GELU(approximate), torch.randn(4, 5))


def test_gelu_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match='GELU: approximate must be "none" or "tanh"; got \'erf\''):
        nn.GELU("erf")


def attention_pair(bias=True, batch_first=True, dropout=0.0):
    ours = randomise(nn.MultiHeadAttention(12, 3, dropout, bias=bias, batch_first=batch_first))
    theirs = torch.nn.MultiheadAttention(12, 3, dropout, bias=bias, batch_first=batch_first)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


class Sharing(torch.nn.Module):
    """Calls of an attention module with one, two or three different inputs."""

    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, query, key=None, value=None):
        key = query if key is None else key
        return self.attention(query, key, key if value is None else value, **self.options)[0]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@pytest.mark.parametrize("inputs", [1, 2, 3], ids=["self", "cross", "three-inputs"])
def test_attention_matches_torch(bias, batch_first, inputs):
    ours, theirs = attention_pair(bias, batch_first)
    tensors = [torch.randn(4, 4, 12), torch.randn(4, 6, 12) if batch_first else torch.randn(6, 4, 12)]
    tensors = [*tensors, torch.randn_like(tensors[1])][:inputs]
    assert_same_with_gradients(Sharing(ours), Sharing(theirs), *tensors)


PADDING = torch.tensor([[False, False, True, True, True], [False, False, False, False, True]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PENALTY = PADDING.double() * -2.5
BIAS = torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5)


MASKS = {
    "padding": {"key_padding_mask": PADDING},
    "padding-float": {"key_padding_mask": PENALTY},
    "mask-bool": {"attn_mask": CAUSAL},
    "mask-float": {"attn_mask": BIAS},
    "mask-per-head": {"attn_mask": torch.stack([BIAS * head for head in range(6)])},
    "mask-bool-per-head": {"attn_mask": torch.stack([CAUSAL if head % 2 else CAUSAL.T for head in range(6)])},
    "causal-and-mask": {"attn_mask": CAUSAL, "is_causal": True},
    "padding-and-mask": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "padding-and-mask-float": {"key_padding_mask": PENALTY, "attn_mask": BIAS},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_attention_masks_have_torch_meaning(masks):
    """True = ignore, as in torch.nn; everywhere else in this package True = a real token."""
    ours, theirs = attention_pair()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert_same_with_gradients(Sharing(ours, **masks), Sharing(theirs, **masks), x)
    _, weights = ours(x, x, x, need_weights=True, average_attn_weights=False, **masks)
    _, expected = theirs(x, x, x, need_weights=True, average_attn_weights=False, **masks)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def test_padding_mask_of_one_sequence():
    ours, theirs = attention_pair()
    x = torch.randn(5, 12)
    expected = theirs(x, x, x, key_padding_mask=PADDING[0])[0]
    torch.testing.assert_close(ours(x, x, x, key_padding_mask=PADDING[0])[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [5, 8])
def test_causal_needs_no_mask(keys):
    ours, theirs = attention_pair()
    x, y = torch.randn(2, 5, 12), torch.randn(2, keys, 12)
    later = torch.ones(5, keys, dtype=torch.bool).triu(1 + keys - 5)
    expected = theirs(x, y, y, attn_mask=later)
    results = ours(x, y, y, is_causal=True, need_weights=True)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)


def test_weights_come_unless_they_are_declined():
    ours, theirs = attention_pair(batch_first=False)
    x = torch.randn(5, 2, 12)
    assert ours(x, x, x, need_weights=False)[1] is None
    weights = ours(x, x, x)[1]
    torch.testing.assert_close(weights, theirs(x, x, x)[1], rtol=1e-5, atol=1e-6)
    single = ours(x[:, 0], x[:, 0], x[:, 0], need_weights=True)[1]
    torch.testing.assert_close(single, weights[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "shape"), [("key_padding_mask", (2, 5)), ("attn_mask", (5, 5))])
def test_query_that_sees_no_key_gets_the_output_bias(name, shape):
    ours, _ = attention_pair()
    x = torch.randn(2, 5, 12, requires_grad=True)
    out, weights = ours(x, x, x, need_weights=True, **{name: torch.ones(shape, dtype=torch.bool)})
    assert torch.equal(out, ours.out_proj.bias.expand_as(out))
    assert not weights.any()
    out.sum().backward()
    assert not x.grad.any()


def test_dropout_only_in_training():
    ours, _ = attention_pair(dropout=0.5)
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    first, second = ours(x, x, x)[0], ours(x, x, x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(ours(x, x, x)[0], first)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("norm_first", [True, False])
def test_takes_the_place_of_attention_in_a_torch_layer(norm_first):
    layer = torch.nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 5, 12)
    expected = layer(x, src_key_padding_mask=PADDING)
    ours = nn.MultiHeadAttention(12, 3, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x, src_key_padding_mask=PADDING), expected, rtol=1e-5, atol=1e-6)


def test_torch_layers_never_pass_the_backend_by():
    layer = torch.nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    layer.self_attn = nn.MultiHeadAttention(12, 2, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for module in (layer, encoder, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for part in module.modules():
            if isinstance(part, nn.MultiHeadAttention):
                part.backend = "nonsense"
        with torch.no_grad(), pytest.raises(ValueError, match="backend must be one of"):
            module.eval()(torch.randn(2, 5, 12), src_key_padding_mask=PADDING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 8}, r"kdim must be embed_dim \(12\); got 8: project the input first"),
        ({"vdim": 8}, r"vdim must be embed_dim \(12\); got 8: project the input first"),
        ({"add_bias_kv": True}, "add_bias_kv and add_zero_attn are not supported"),
        ({"add_zero_attn": True}, "add_bias_kv and add_zero_attn are not supported"),
        ({"num_heads": 5}, r"num_heads \(5\) must divide embed_dim \(12\)"),
        ({"num_heads": 0}, r"num_heads \(0\) must divide embed_dim \(12\)"),
    ],
)
def test_unsupported_attention_is_refused(options, message):
    with pytest.raises(ValueError, match=f"MultiHeadAttention: {message}"):
        nn.MultiHeadAttention(**{"embed_dim": 12, "num_heads": 3, **options})


def test_widths_of_torch_that_are_equal_are_taken():
    assert nn.MultiHeadAttention(12, 3, kdim=12, vdim=12).in_proj_weight.shape == (36, 12)


def test_bad_inputs_are_refused():
    ours, _ = attention_pair()
    x = torch.randn(2, 5, 12)
    with pytest.raises(ValueError, match=r"MultiHeadAttention: key must have shape .*; got \(2, 5, 8\)"):
        ours(x, x[..., :8], x)
    with pytest.raises(ValueError, match=r"MultiHeadAttention: value must have shape .*; got \(5, 12\)"):
        ours(x, x, x[0])
    with pytest.raises(TypeError, match="key_padding_mask must be bool, True = ignore, or floating"):
        ours(x, x, x, key_padding_mask=PADDING.long())
    with pytest.raises(TypeError, match="attn_mask must be bool, True = ignore, or floating"):
        ours(x, x, x, attn_mask=CAUSAL.long())
    for padding in (PADDING[:, 1:], PADDING[:1], PADDING[0]):
        message = rf"key_padding_mask must have shape \(B, S\) \(2, 5\); got \({', '.join(map(str, padding.shape))}"
        with pytest.raises(ValueError, match=message):
            ours(x, x, x, key_padding_mask=padding)
    for mask in (CAUSAL.expand(4, 5, 5), CAUSAL[:, 1:], CAUSAL[0]):
        with pytest.raises(ValueError, match=r"attn_mask must have shape \(L, S\) \(5, 5\) or .* \(6, 5, 5\); got"):
            ours(x, x, x, attn_mask=mask)
    with pytest.raises(TypeError, match=r"query must not be nested; .* enable_nested_tensor=False"):
        ours(*[torch.nested.nested_tensor([x[0], x[1, :3]])] * 3)


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 2)])
def test_embedding(padding_idx, shape):
    ours, theirs = nn.Embedding(7, 12, padding_idx), torch.nn.Embedding(7, 12, padding_idx)
    theirs.load_state_dict(randomise(ours).state_dict())
    tokens = torch.randint(0, 7, shape)
    tokens.view(-1)[-1:] = 3
    for module in (ours, theirs):
        (module(tokens) ** 3).sum().backward()
    assert torch.equal(ours(tokens), theirs(tokens))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_embedding_of_a_table_that_exists():
    table = torch.randn(7, 12)
    for freeze in (True, False):
        ours = nn.Embedding.from_pretrained(table, freeze, padding_idx=-1, backend="torch")
        assert ours.weight.data_ptr() == table.data_ptr() and ours.weight.requires_grad is not freeze
        assert (ours.padding_idx, ours.backend) == (6, "torch")
        assert torch.equal(ours(torch.tensor([1, 6])), table[[1, 6]])


@pytest.mark.parametrize("training", [True, False])
def test_add_layer_norm(training):
    module = randomise(nn.AddLayerNorm(12, 1e-3, dropout=0.5)).train(training)
    x, residual = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    normed, summed = module(x, residual)
    kept = (summed - residual) / x  # 0 or 2 in training, 1 otherwise
    assert set(kept.round().unique().tolist()) == ({0.0, 2.0} if training else {1.0})
    expected = torch.nn.functional.layer_norm(summed, (12,), module.weight, module.bias, 1e-3)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)
    theirs = torch.nn.LayerNorm(12)
    theirs.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match="dropout must be in"):
        nn.AddLayerNorm(12, dropout=2.0)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu(approximate):
    module = nn.BiasGELU(6, approximate)
    assert not module.bias.any()
    x = torch.randn(4, 6)
    randomise(module)
    expected = torch.nn.functional.gelu(x + module.bias, approximate=approximate)
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="BiasGELU"):
        nn.BiasGELU(6, "erf")


@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 5, 3), (4, 5, 3, 2)])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none"}])
def test_cross_entropy(shape, options):
    logits = torch.randn(shape)
    targets = torch.randint(0, 5, shape[:0] if len(shape) == 1 else (shape[0], *shape[2:]))
    targets.view(-1)[1:2] = 9
    ours, theirs = nn.CrossEntropyLoss(ignore_index=9, **options), torch.nn.CrossEntropyLoss(ignore_index=9, **options)
    torch.testing.assert_close(ours(logits, targets), theirs(logits, targets), rtol=1e-5, atol=1e-6)
    shares = torch.randn(shape).softmax(1 if len(shape) > 1 else 0)
    ours, theirs = nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    torch.testing.assert_close(ours(logits, shares), theirs(logits, shares), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy(bias):
    ours, theirs = nn.LinearCrossEntropy(6, 5, bias, 9, "sum", 0.1), torch.nn.Linear(6, 5, bias)
    theirs.load_state_dict(randomise(ours).state_dict())
    x, targets = torch.randn(3, 4, 6), torch.randint(0, 5, (3, 4))
    targets[0, 0] = 9
    expected = torch.nn.functional.cross_entropy(
        theirs(x).flatten(0, 1), targets.flatten(), ignore_index=9, reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(ours(x, targets), expected, rtol=1e-5, atol=1e-5)
    options = {"class_weight": torch.rand(5), "z_loss": 0.1, "softcap": 4.0}
    optioned = nn.LinearCrossEntropy(6, 5, bias, 9, **options)
    optioned.load_state_dict(ours.state_dict())  # strict: the class weights are not in it
    expected = python_ref.ops.linear_cross_entropy(x, ours.weight, targets, ours.bias, ignore_index=9, **options)
    torch.testing.assert_close(optioned(x, targets), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        lambda: (nn.Embedding(7, 6, backend="triton"), torch.tensor([1])),
        lambda: (nn.AddLayerNorm(6, backend="triton"), torch.randn(2, 6), torch.randn(2, 6)),
        lambda: (nn.BiasGELU(6, backend="triton"), torch.randn(2, 6)),
        lambda: (nn.CrossEntropyLoss(backend="triton"), torch.randn(2, 6), torch.tensor([1, 2])),
        lambda: (nn.LinearCrossEntropy(6, 5, backend="triton"), torch.randn(2, 6), torch.tensor([1, 2])),
    ],
)
def test_the_fused_modules_ask_their_backend(module):
    made, *inputs = module()
    made.backend = "nonsense"
    with pytest.raises(ValueError, match="backend must be one of"):
        made(*inputs)
    assert "backend='nonsense'" in repr(made)
