"""GPT against a GPT-2 written by hand, and the properties of a causal language model."""

import math

import pytest
import torch
import torch.nn.functional as F

import python_ref
from python_ref import GPT, GPTConfig

SMALL = {"vocab_size": 13, "context": 16, "width": 12, "layers": 2, "heads": 3, "dropout": 0.0}


def make(**fields):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SMALL, **fields})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def gpt2_by_hand(state, tokens, heads, layers):
    """GPT-2 as its paper and its code give it, head by head, from a dictionary of weights."""

    def norm(x, name):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attention(x, name):
        length, width = x.shape
        q, k, v = linear(x, f"{name}.qkv").split(width, dim=-1)
        hidden = torch.ones(length, length).triu(1).bool()
        outputs = []
        for head in torch.arange(width).view(heads, -1):
            scores = q[:, head] @ k[:, head].T / math.sqrt(len(head))
            outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head])
        return linear(torch.cat(outputs, dim=-1), f"{name}.out")

    x = state["embedding.tokens.weight"][tokens] + state["embedding.positions"][: len(tokens)]
    for layer in range(layers):
        block = f"blocks.{layer}"
        x = x + attention(norm(x, f"{block}.attention_norm"), f"{block}.attention")
        inner = gelu(linear(norm(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.up"))
        x = x + linear(inner, f"{block}.feed_forward.down")
    return norm(x, "final_norm") @ state["embedding.tokens.weight"].T


def test_logits_are_those_of_gpt2_by_hand():
    model = make(activation="gelu_tanh")
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    expected = gpt2_by_hand(model.state_dict(), tokens, heads=3, layers=2)
    torch.testing.assert_close(model(tokens[None])[0], expected)


def llama_by_hand(state, tokens, heads, kv_heads, layers, base):
    """Llama as its paper and its code give it, head by head, from a dictionary of weights."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]

    def rotated(x):
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
        swapped = torch.cat((-x[:, half:], x[:, :half]), dim=-1)
        return x * torch.cat((angle, angle), -1).cos() + swapped * torch.cat((angle, angle), -1).sin()

    def attention(x, name):
        length, width = x.shape
        d = width // heads
        q, k, v = (x @ state[f"{name}.qkv.weight"].T).split([width, kv_heads * d, kv_heads * d], dim=-1)
        hidden = torch.ones(length, length).triu(1).bool()
        outputs = []
        for head in range(heads):
            group = slice(head * kv_heads // heads * d, (head * kv_heads // heads + 1) * d)
            scores = rotated(q[:, head * d : (head + 1) * d]) @ rotated(k[:, group]).T / math.sqrt(d)
            outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, group])
        return torch.cat(outputs, dim=-1) @ state[f"{name}.out.weight"].T

    x = state["embedding.tokens.weight"][tokens]
    for layer in range(layers):
        block = f"blocks.{layer}"
        x = x + attention(norm(x, f"{block}.attention_norm"), f"{block}.attention")
        gate, up = (norm(x, f"{block}.feed_forward_norm") @ state[f"{block}.feed_forward.up.weight"].T).chunk(2, -1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ state[f"{block}.feed_forward.down.weight"].T
    return norm(x, "final_norm") @ state["embedding.tokens.weight"].T


def test_logits_are_those_of_llama_by_hand():
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "context": 16, "width": 24, "layers": 2, "heads": 6, "kv_heads": 2, "ffn_width": 20}
    model = python_ref.build("llama", **sizes).double()
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    expected = llama_by_hand(model.state_dict(), tokens, heads=6, kv_heads=2, layers=2, base=100_000.0)
    torch.testing.assert_close(model(tokens[None])[0], expected)


def test_character_model_is_torch_layers_between_two_tables():
    torch.manual_seed(0)
    model = python_ref.build("char_gpt", width=12, heads=3, vocab_size=13, dropout=0.0).double()
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    angles = torch.arange(5)[:, None] / 10_000 ** (torch.arange(0, 12, 2) / 12)
    positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    x = model.embedding.tokens.weight[tokens] * math.sqrt(12) + positions
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(12, 3, 48, dropout=0.0, batch_first=True).double()
        weights = {
            "self_attn.in_proj_weight": block.attention.qkv.weight,
            "self_attn.out_proj.weight": block.attention.out.weight,
            "self_attn.in_proj_bias": torch.zeros(36),
            "self_attn.out_proj.bias": torch.zeros(12),
        }
        for theirs, ours in (
            ("linear1", block.feed_forward.up),
            ("linear2", block.feed_forward.down),
            ("norm1", block.attention_norm),
            ("norm2", block.feed_forward_norm),
        ):
            weights[f"{theirs}.weight"], weights[f"{theirs}.bias"] = ours.weight, ours.bias
        layer.load_state_dict(weights)
        x = layer(x, src_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    torch.testing.assert_close(
        model(tokens), x @ model.head_weight.T + model.head_bias, rtol=1e-6, atol=1e-6
    )  # the table of positions is rounded to fp32


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_later_tokens_never_change_earlier_logits(norm):
    model = make(norm=norm)
    tokens = torch.randint(13, (2, 16))
    before = model(tokens)
    for position in (1, 7, 15):
        changed = tokens.clone()
        changed[:, position] = (tokens[:, position] + 1) % 13
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def test_tied_output_is_the_token_embedding():
    model = make(tied=True)
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
    tokens = torch.randint(13, (2, 4))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    absent = [token for token in range(13) if token not in tokens]
    assert model.embedding.tokens.weight.grad[absent].abs().sum() > 0  # as outputs, all tokens take part


def test_untied_output_has_weights_of_its_own():
    model = make(tied=False, head_bias=True)
    tokens = torch.randint(13, (2, 4))
    with torch.no_grad():
        model.head_weight.zero_()
    assert torch.equal(model(tokens), model.head_bias.expand(2, 4, 13))
