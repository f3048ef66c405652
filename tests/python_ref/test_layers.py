"""The layers against torch.nn's own, with the same weights, in fp64 so that equal means equal."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from python_ref import GPT, BERTClassifier, BERTConfig, GPTConfig, ops
from python_ref.config import TransformerConfig
from python_ref.layers import Attention, Embedding, FeedForward, LayerNorm, PostNormBlock, PreNormBlock

SMALL = {"vocab_size": 11, "context": 8, "width": 12, "layers": 2, "heads": 3, "ffn_width": 20, "dropout": 0.0}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def config(**fields):
    return TransformerConfig(**{**SMALL, **fields})


def randomise(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def torch_attention(ours, bias=True):
    theirs = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True)
    theirs.load_state_dict(
        {
            name.replace("qkv.", "in_proj_").replace("out.", "out_proj."): weight
            for name, weight in ours.state_dict().items()
        }
    )
    return theirs


def torch_block(ours, norm, activation):
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre"
    )
    theirs.self_attn = torch_attention(ours.attention)
    theirs.linear1, theirs.linear2 = ours.feed_forward.up, ours.feed_forward.down
    theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
    theirs.norm2.load_state_dict(ours.feed_forward_norm.state_dict())
    return theirs


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[True, True, True, False, False], [True, True, True, True, True]])


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(("norm", "block"), [("pre", PreNormBlock), ("post", PostNormBlock)], ids=["pre", "post"])
def test_block_is_torch_encoder_layer(norm, block, activation, mask):
    ours = randomise(block(config(norm=norm, activation=activation), ops))
    theirs = torch_block(ours, norm, activation)
    x = torch.randn(2, 5, 12)
    padding = PADDED if mask == "padding" else None
    stream, branch = ours(x, key_padding_mask=padding, causal=mask == "causal")
    expected = theirs(
        x, src_mask=CAUSAL if mask == "causal" else None, src_key_padding_mask=None if padding is None else ~padding
    )
    torch.testing.assert_close(stream if branch is None else stream + branch, expected)


def test_block_adds_the_branch_that_it_is_given():
    block = randomise(PreNormBlock(config(), ops))
    stream, branch = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    for split, whole in zip(block(stream, branch), block(stream + branch), strict=True):
        torch.testing.assert_close(split, whole)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_cross_attention_is_torch_attention(bias):
    ours = randomise(Attention(config(attention_bias=bias), ops))
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    padding = torch.arange(7) < torch.tensor([[4], [7]])
    expected, _ = torch_attention(ours, bias)(x, context, context, key_padding_mask=~padding)
    torch.testing.assert_close(ours(x, context, key_padding_mask=padding), expected)


def test_attention_across_to_itself_is_self_attention():
    ours = randomise(Attention(config(kv_heads=1), ops))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x, x, causal=True), ours(x, causal=True))


def test_grouped_heads_are_repeated_heads():
    grouped = randomise(Attention(config(heads=6, kv_heads=2), ops))
    full = Attention(config(heads=6), ops)
    for name in ("weight", "bias"):
        q, k, v = getattr(grouped.qkv, name).detach().split([12, 4, 4])
        repeated = [part.unflatten(0, (2, 2)).repeat_interleave(3, dim=0).flatten(0, 1) for part in (k, v)]
        getattr(full.qkv, name).data = torch.cat([q, *repeated])
    full.out = grouped.out
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(grouped(x), full(x))


def test_attention_copies_neither_its_projection_nor_its_output():
    class Watching:
        linear = staticmethod(ops.linear)

        def packed_attention(self, qkv, heads, **options):
            assert qkv.shape == (2, 5, 10, 2) and qkv.data_ptr() == self.projected.data_ptr()
            self.out = torch.empty(2, 5, heads * 2)
            return self.out

    class Projection(nn.Module):
        def forward(self, x):
            self.read = x
            return x

    watching = Watching()
    layer = Attention(config(heads=6, kv_heads=2), watching)
    layer.out = Projection()
    layer.qkv.register_forward_hook(lambda module, inputs, output: setattr(watching, "projected", output))
    layer(torch.randn(2, 5, 12))
    assert layer.out.read.data_ptr() == watching.out.data_ptr()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("activation", "function"),
    [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("gelu_tanh", nn.GELU("tanh"))],
    ids=["relu", "gelu", "gelu_tanh"],
)
def test_feed_forward_network(activation, function, bias):
    ours = randomise(FeedForward(config(activation=activation, ffn_bias=bias), ops))
    assert (ours.up.bias is not None) == bias
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), nn.Sequential(ours.up, function, ours.down)(x))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_layer_norm(bias):
    ours = randomise(LayerNorm(config(norm_bias=bias, norm_eps=1e-3), ops))
    x, stream = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    expected = nn.functional.layer_norm(x + stream, (12,), ours.weight, ours.bias, 1e-3)
    normed, total = ours.add(x, stream)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(ours(x + stream), expected)
    torch.testing.assert_close(total, x + stream)


FAMILY = {
    "pre": {"norm": "pre"},
    "pre-without-final-norm": {"norm": "pre", "final_norm": False},
    "post": {"norm": "post", "final_norm": False},
    "post-with-final-norm": {"norm": "post"},
    "relu": {"activation": "relu"},
    "tanh-gelu": {"activation": "gelu_tanh"},
    "no-biases": {"attention_bias": False, "ffn_bias": False, "norm_bias": False},
    "sinusoidal": {"positions": "sinusoidal"},
    "embedding-norm": {"embedding_norm": True},
    "grouped-heads": {"kv_heads": 1},
    "odd-width": {"width": 15, "positions": "sinusoidal"},
    "llama": {"norm": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 1, "ffn_bias": False},
    "part-rotary": {"positions": "rotary", "rotary_width": 2, "rotary_interleaved": True, "activation": "geglu"},
    "windows": {"window": 2, "window_pattern": "LG", "qk_norm": True},
    "wide-values": {"value_dim": 5, "kv_heads": 1},
}
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@pytest.mark.parametrize("fields", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
class TestTheFamily:
    """What every member does, whatever its configuration."""

    def make(self, kind, fields, **more):
        fields = {**SMALL, **fields, **more}
        return GPT(GPTConfig(**fields)) if kind == "gpt" else BERTClassifier(BERTConfig(**fields))

    def test_every_parameter_gets_a_gradient(self, kind, fields):
        model = randomise(self.make(kind, fields))
        inputs = (TOKENS,) if kind == "gpt" else (TOKENS, None, TOKENS % 2)
        if fields.get("norm") == "rms":
            assert not any(isinstance(module, LayerNorm) for module in model.modules())
        model(*inputs).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name

    def test_dropout_acts_in_training_only(self, kind, fields):
        model = self.make(kind, fields, dropout=0.3)
        torch.manual_seed(0)
        first, second = model(TOKENS), model(TOKENS)
        torch.manual_seed(0)
        assert torch.equal(model(TOKENS), first)
        assert not torch.equal(first, second)
        model.eval()
        before = torch.get_rng_state()
        assert torch.equal(model(TOKENS), model(TOKENS))
        assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_asked_for_at_every_branch():
    """Attention weights and both branches of each block, the last one by the final LayerNorm."""

    class Recording:
        def __init__(self):
            self.dropped = []

        def __getattr__(self, name):
            def call(*args, dropout_p=None, **options):
                if dropout_p is not None:
                    self.dropped.append((name, dropout_p))
                    options["dropout_p"] = dropout_p
                return getattr(ops, name)(*args, **options)

            return call

    recording = Recording()
    GPT(GPTConfig(**{**SMALL, "dropout": 0.25}), recording)(TOKENS)
    per_block = [("packed_attention", 0.25), ("add_layer_norm", 0.25)]
    per_block.append(("add_layer_norm", 0.25))
    assert recording.dropped == [("embedding", 0.25), *per_block, *per_block]


def test_each_dropout_field_affects_its_own_layers_only():
    fields = ("embedding_dropout", "attention_dropout", "residual_dropout", "ffn_dropout")
    for field in fields:
        model = GPT(GPTConfig(**{**SMALL, "dropout": 0.0, field: 0.5}))
        layers = {name: module.dropout for name, module in model.named_modules() if hasattr(module, "dropout")}
        dropping = {name.split(".")[-1] for name, probability in layers.items() if probability and name}
        norms = {"attention_norm", "feed_forward_norm", "final_norm"}
        wanted = ({"embedding"}, {"attention"}, norms, {"feed_forward"})[fields.index(field)]
        assert dropping == wanted
        assert not torch.equal(model(TOKENS), model(TOKENS))


def test_attention_maps_are_one_a_layer_and_change_nothing():
    for fields in ({}, {"positions": "rotary", "window": 3, "head_bias": True}):
        model = randomise(GPT(GPTConfig(**{**SMALL, "width": 24, "kv_heads": 1, **fields})))
        logits, maps = model(TOKENS, return_attention=True)
        assert torch.equal(logits, model(TOKENS))
        assert [weights.shape for weights in maps] == [(2, 3, 5, 5)] * 2
        for weights in maps:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
            assert not weights.triu(1).any()
            assert weights[..., 4, 0].any() != ("window" in fields)
    bert = randomise(BERTClassifier(BERTConfig(**SMALL)))
    logits, maps = bert(TOKENS, PADDED, return_attention=True)
    assert torch.equal(logits, bert(TOKENS, PADDED))
    assert not maps[1][0, :, :, 3:].any() and maps[1][1].all()


def test_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than the model's 8 positions"):
        GPT(GPTConfig(**SMALL))(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("token", [-1, 11])
def test_token_outside_the_vocabulary_is_found_by_the_first_operation(token):
    only_embedding = SimpleNamespace(embedding=ops.embedding)
    with pytest.raises(IndexError, match=r"tokens must be in \[0, 11\); got ids from"):
        GPT(GPTConfig(**SMALL), only_embedding)(torch.tensor([[3, token, 4]]))


def embedding_layer(**fields):
    """An embedding with segments and LayerNorm, with random weights, and its formula."""
    layer = randomise(Embedding(config(embedding_norm=True, **fields), ops, segments=2))

    def written_out(tokens, positions, segments):
        x = layer.scale * layer.tokens.weight[tokens] + layer.positions[positions] + layer.segments.weight[segments]
        return nn.functional.layer_norm(x, (12,), layer.norm.weight, layer.norm.bias, layer.eps)

    return layer, written_out


@pytest.mark.parametrize("fields", [{}, {"positions": "sinusoidal"}], ids=["learned", "sinusoidal"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_segments", [False, True])
def test_embedding_equals_its_pieces(fields, packed, with_segments):
    layer, written_out = embedding_layer(**fields)
    tokens = torch.randint(0, 11, (2, 8))
    segments = torch.randint(0, 2, (2, 8)) if with_segments else None
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [7, 6, 5, 0, 0, 0, 1, 1]]) if packed else None
    positions = torch.arange(8).expand(2, 8) if position_ids is None else position_ids
    ours = layer(tokens, segments, position_ids)
    theirs = written_out(tokens, positions, torch.zeros_like(tokens) if segments is None else segments)
    torch.testing.assert_close(ours, theirs)
    parameters = list(layer.parameters())
    gradients = [torch.autograd.grad(x.square().sum(), parameters) for x in (ours, theirs)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_positions_of_packed_sequences_may_repeat_but_not_leave_the_context():
    layer, _ = embedding_layer()
    tokens = torch.zeros(1, 12, dtype=torch.int64)  # more tokens than positions
    positions = torch.arange(12)[None] % 6
    assert layer(tokens, None, positions).shape == (1, 12, 12)
    for segments in (None, tokens):
        with pytest.raises(IndexError, match=r"position_ids must be in \[0, 8\); got ids from 3 to 8"):
            layer(tokens, segments, positions + 3)
    with pytest.raises(ValueError, match=r"position_ids must have the shape of tokens \(1, 12\); got \(12,\)"):
        layer(tokens, None, positions[0])


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), ValueError, r"tokens must have shape \(batch, length\); got \(5,\)"),
        (torch.zeros(1, 5), TypeError, r"tokens must be int64 or int32; got torch\.float32"),
        (torch.zeros(1, 5, dtype=torch.bool), TypeError, "tokens must be int64 or int32; got torch.bool"),
    ],
    ids=["one-dimension", "floating", "bool"],
)
def test_tokens_that_are_no_batch_of_ids_are_refused(tokens, error, message):
    with pytest.raises(error, match=message):
        GPT(GPTConfig(**SMALL))(tokens)


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_flops_of_a_window_are_those_of_the_keys_seen(kind, length):
    fields = {**SMALL, "window": 3, "window_pattern": "LG", "value_dim": 5}
    model = GPT(GPTConfig(**fields)) if kind == "gpt" else BERTClassifier(BERTConfig(**fields))
    seen = sum(
        ops.visible_keys(length, length, torch.device("cpu"), causal=kind == "gpt", window=window).sum().item() / length
        for window in (3, None)
    )
    linear = sum(layer.weight.numel() for layer in model.blocks.modules() if isinstance(layer, nn.Linear))
    expected = 2 * linear + 2 * 3 * (4 + 5) * seen + 2 * model.head_weights_per_token(length)
    assert model.flops_per_token(length, training=False) == pytest.approx(expected)


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_flops_are_those_of_the_matrix_products(kind, length):
    """PyTorch's counter agrees, except for the half of causal attention that need not be computed."""
    from torch.utils.flop_counter import FlopCounterMode

    model = GPT(GPTConfig(**SMALL)) if kind == "gpt" else BERTClassifier(BERTConfig(**SMALL))
    model.eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.int64))
    unseen = 4 * 2 * 12 * (length - 1) / 2 if kind == "gpt" else 0.0
    counted = counter.get_total_flops() / (2 * length)
    assert model.flops_per_token(length, training=False) == pytest.approx(counted - unseen)
    assert model.flops_per_token(length) == pytest.approx(3 * (counted - unseen))


def test_model_runs_on_fake_and_meta_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert GPT(GPTConfig(**SMALL))(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 11)
    with torch.device("meta"):
        assert GPT(GPTConfig(**SMALL))(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 11)


def test_initial_residual_projections_shrink_with_depth():
    model = GPT(GPTConfig(**{**SMALL, "width": 96, "layers": 8, "init_scale_residual": True}))
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert not block.attention.out.bias.any()
    assert torch.equal(block.attention_norm.weight, torch.ones(96))
