"""`compile(model, unpad=True)`: the same results at real tokens, zeros at padding, and no work on padding between."""

import copy

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from tests.support import transformers_models as models
from transformer_kernels.patching import _real_tokens
from transformer_kernels.patching._real_tokens import RealTokens

REAL = torch.arange(12)[None] < torch.tensor([12, 8, 5])[:, None]
UNPADDED = "without padding"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(_real_tokens, "MIN_ELEMENTS", 1)
    torch._dynamo.reset()


@pytest.fixture
def packed(monkeypatch):
    """Whether real tokens were packed, for each batch of which they are known."""
    found, original = [], RealTokens.of

    def of(real, width):
        found.append(original(real, width))
        return found[-1]

    monkeypatch.setattr(RealTokens, "of", of)
    return lambda: [tokens is not None for tokens in found]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, memory, mask):
        rows = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (y.view(y.shape[0], y.shape[1], 2, 8).transpose(1, 2) for y in rows)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(mask, -1e9).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


def keys(real):
    return ~real[:, None, None]


class Encoder(nn.Module):
    """Two layers written by hand.

    Args:
        between: what is applied to the output of each layer.
        mask: from the real tokens (B, L).
        crossed: whether attention is to other values than those of the queries.
    """

    def __init__(self, between=lambda x: x, mask=keys, crossed=False):
        super().__init__()
        self.embedding, self.other = nn.Embedding(50, 16), nn.Embedding(50, 16)
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.between, self.mask, self.crossed = between, mask, crossed

    def forward(self, tokens, real):
        x, mask = self.embedding(tokens), self.mask(real)
        for index in range(2):
            memory = self.other(tokens) if self.crossed else x
            x = self.norms[2 * index](x + self.attentions[index](x, memory, mask))
            x = self.between(self.norms[2 * index + 1](x + self.mlps[index](x)))
        return x


class OfTorch(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens, real):
        return self.encoder(self.embedding(tokens), src_key_padding_mask=~real)


def compared(model, real=REAL, lengths=(12,), everywhere=False):
    """The last output at padding, and the report; outputs and gradients of real tokens must be eager PyTorch's."""
    model = model.double()
    compiled = tk.compile(copy.deepcopy(model), backend="torch", unpad=True)
    for length in lengths:
        tokens, seen = torch.randint(1, 50, (len(real), length)), real[:, :length]
        outputs = []
        for module in (model, compiled):
            module.zero_grad()
            out = module(tokens, seen)
            outputs.append(out if everywhere else out[seen])
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-10)
        for ours, plain in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-8, atol=1e-9)
    return out[~seen], compiled.report()


ENCODERS = {
    "by hand": Encoder,
    "torch": OfTorch,
    "torch, norm first": lambda: OfTorch(norm_first=True, activation="gelu"),
    "a mask of queries and keys": lambda: Encoder(mask=lambda real: keys(real).expand(-1, 1, real.shape[1], -1)),
    "a running sum": lambda: Encoder(lambda x: x.cumsum(1)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_two_compilations_leave_out_padding_at_all_lengths(name, packed):
    padding, report = compared(ENCODERS[name](), lengths=(12, 11, 9, 10))
    assert report.graphs <= 2 and report.matched[UNPADDED] == report.graphs
    assert packed() == [True] * 4
    assert name == "a running sum" or bool((padding == 0.0).all())


def test_as_many_sequences_as_tokens(packed):
    compared(Encoder(), REAL.repeat(4, 1))
    assert packed() == [True]


def test_little_padding_is_computed_and_then_zeros(packed, monkeypatch):
    monkeypatch.setattr(_real_tokens, "MIN_ELEMENTS", 1 << 14)
    padding, _ = compared(Encoder())
    assert packed() == [False] and bool((padding == 0.0).all())


def causal(real):
    return keys(real) | torch.ones(2 * real.shape[-1:], dtype=torch.bool).triu(1)


PADDED = {
    "left": (Encoder, REAL.flip(1)),
    "a hole": (Encoder, REAL & (torch.arange(12) != 2)),
    "nothing": (Encoder, torch.ones_like(REAL)),
    "causal": (lambda: Encoder(mask=causal), REAL),
    "other values": (lambda: Encoder(crossed=True), REAL),
}


@pytest.mark.parametrize("name", PADDED)
def test_what_stays_as_it_is(name, packed):
    make, real = PADDED[name]
    _, report = compared(make(), real, everywhere=True)
    assert report.matched["attention"] == 2 and not any(packed())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_losses_of_encoders_of_transformers(family, implementation, packed):
    transformers = models.transformers
    options = models.DISTILBERT if family == "DistilBert" else models.ENCODER
    config = getattr(transformers, f"{family}Config")(**options, **models.TOKENS)
    for name in [name for name, value in vars(config).items() if "dropout" in name and isinstance(value, float)]:
        setattr(config, name, 0.0)
    make = getattr(transformers, f"{family}ForMaskedLM")
    model = make._from_config(config, attn_implementation=implementation).double()
    compiled = tk.compile(copy.deepcopy(model), backend="torch", unpad=True)
    given = {"input_ids": torch.randint(3, 30, REAL.shape), "attention_mask": REAL.long()}
    given["labels"] = given["input_ids"].where(REAL, -100)
    found, expected = compiled(**given), model(**given)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.logits[REAL], expected.logits[REAL], rtol=1e-9, atol=1e-10)
    assert packed() == [True] and bool((found.logits[~REAL] == 0.0).all())


def test_padding_is_computed_unless_asked():
    compiled = tk.compile(Encoder().double(), backend="torch")
    compiled(torch.randint(1, 50, REAL.shape), REAL)
    assert UNPADDED not in compiled.report().matched
