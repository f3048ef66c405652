"""Modules of other packages (timm) keep their own forward; its calls of torch.nn.functional are rerouted."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import rms_norm

import transformer_kernels as tk
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.patching import _rerouted

EXACT = {"rtol": 1e-9, "atol": 1e-9}


class FastNorm(nn.LayerNorm):
    """A LayerNorm with a switch, as timm's."""

    _fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            return x
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RootNorm(nn.Module):
    """An RMSNorm that calls the function by its name alone."""

    def __init__(self, width):
        super().__init__()
        self.normalized_shape, self.weight = (width,), nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return rms_norm(x, self.normalized_shape, self.weight, 1e-6)


class Attended(nn.Module):
    """Self-attention from a packed projection, with both ways to compute it, as timm's."""

    def __init__(self, width=16, heads=2, drop=0.0, norm=nn.Identity):
        super().__init__()
        self.num_heads, self.fused_attn = heads, True
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = norm(width // heads), norm(width // heads)
        self.attn_drop, self.proj_drop = nn.Dropout(drop), nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            rate = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=rate, is_causal=is_causal)
        else:
            out = self.attn_drop((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """timm's feed-forward network."""

    def __init__(self, act, norm, bias, rate):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(16, 32, bias=bias), act, nn.Dropout(rate)
        self.norm, self.fc2, self.drop2 = norm, nn.Linear(32, 16), nn.Dropout(rate)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


@pytest.fixture
def computed(monkeypatch):
    """The functions that our operations compute, in order."""
    names = []

    def recorded(name, handler):
        def call(*args, **kwargs):
            result = handler(*args, **kwargs)
            names.append(name if isinstance(result, torch.Tensor) else f"{name} left")
            return result

        return call

    handlers = {name: recorded(name, handler) for name, handler in _rerouted.HANDLERS.items()}
    monkeypatch.setattr(_rerouted, "HANDLERS", handlers)
    return names


def patched_pair(module, operation, backend="torch"):
    torch.manual_seed(0)
    ours = copy.deepcopy(module := module.double())
    assert operation in [row.operation for row in tk.patch(ours, backend).patched]
    return module, ours


def assert_same(module, ours, x, **options):
    results = []
    for each in (module, ours):
        each.zero_grad()
        leaf = x.double().clone().requires_grad_()
        out = each(leaf, **options)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


MASKS = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.ones(5, 5).tril().bool()},
    {"attn_mask": torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5)},
]


@pytest.mark.parametrize("norm", [nn.Identity, FastNorm, RootNorm])
@pytest.mark.parametrize("training", [True, False])
def test_attention(computed, norm, training):
    module, ours = patched_pair(Attended(norm=norm).train(training), "attention")
    for options in MASKS:
        computed.clear()
        assert_same(module, ours, torch.randn(2, 5, 16), **options)
        norms = {nn.Identity: [], FastNorm: ["layer_norm"] * 2, RootNorm: ["rms_norm"] * 2}[norm]
        assert computed == [*norms, "scaled_dot_product_attention"]


def test_dropout_of_attention_follows_the_mode():
    module, ours = patched_pair(Attended(drop=0.5), "attention")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert not torch.equal(ours(x), ours(x))
    torch.testing.assert_close(ours.eval()(x), module.eval()(x), **EXACT)
    module.train().attn_drop.p = ours.train().attn_drop.p = 1.0
    torch.testing.assert_close(ours(x), module(x), **EXACT)


def test_switches_that_select_other_code_are_left():
    model = nn.Sequential(Attended(), FastNorm(16), RootNorm(16))
    model[0].fused_attn, model[1]._fast_norm, model[2].backend = False, True, "mine"
    assert [(row.name, row.reason) for row in tk.patch(model).left] == [
        ("0", "fused_attn is off: its scores, softmax and dropout are separate calls"),
        ("1", "_fast_norm selects another function"),
        ("2", "it has an attribute `backend` of its own"),
    ]


def test_a_switch_after_patching_is_followed(computed):
    module, ours = patched_pair(Attended(), "attention")
    module.fused_attn = ours.fused_attn = False
    assert_same(module, ours, torch.randn(2, 5, 16))
    assert computed == []


class Flat(nn.Module):
    """Attention without an axis of heads, which is not supported."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_a_named_backend_never_falls_back(computed):
    x = torch.randn(2, 5, 16)
    module = Flat()
    tk.patch(module)
    torch.testing.assert_close(module(x), Flat()(x))
    assert computed == ["scaled_dot_product_attention left"]
    tk.patch(module, "torch")
    with pytest.raises(UnsupportedByBackend, match="scaled_dot_product_attention: backend 'torch' does not compute"):
        module(x)


class Other(nn.Module):
    """A forward that calls a method of the name of a function."""

    def layer_norm(self, x):
        return 2 * x

    def forward(self, x):
        return self.layer_norm(F.dropout(x))


def test_only_torchs_functions_are_recognised():
    assert not tk.patch(Other()).rows


def test_unpatch_copies_and_pickles():
    model = nn.Sequential(Attended(), FastNorm(16))
    kinds, names, x = [type(each) for each in model.modules()], list(model.state_dict()), torch.randn(2, 5, 16)
    expected = model(x)
    tk.patch(model)
    assert list(model.state_dict()) == names
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(x), expected)
    tk.unpatch(model)
    assert [type(each) for each in model.modules()] == kinds and "backend" not in vars(model[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(32)], ids=["identity", "layer_norm"])
@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU()], ids=["gelu", "silu"])
def test_mlp(act, norm, bias):
    module, ours = patched_pair(Mlp(act, norm, bias, 0.0), "linear")
    assert_same(module, ours, torch.randn(2, 5, 16))


def test_dropouts_of_an_mlp_stay():
    module, ours = patched_pair(Mlp(nn.GELU(), nn.Identity(), True, 0.5), "linear")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    results = []
    for each in (module, ours):
        torch.manual_seed(1)
        results.append(each(x))
    torch.testing.assert_close(*results, **EXACT)


def doubled(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        return 2 * forward(self, x)

    return wrapped


class Decorated(FastNorm):
    @doubled
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def test_a_decorated_forward_is_left():
    """Its source is that of another function."""
    module = nn.Sequential(Decorated(16))
    x = torch.randn(3, 16)
    expected = module(x)
    assert not tk.patch(module, "torch").patched
    assert torch.equal(module(x), expected)
