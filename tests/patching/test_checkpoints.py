"""Activation checkpointing: the pass without gradients and its recomputation with them draw the same random numbers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from transformer_kernels.ops import _crossovers

NEVER = _crossovers.NEVER
RATE = 0.3
FAMILIES = ("bert", "roberta", "distilbert", "gpt2", "llama", "t5", "t5_gated", "vit")


def torch_layer(kind):
    torch.manual_seed(0)
    made = kind(32, 4, 64, dropout=RATE, batch_first=True, norm_first=kind is nn.TransformerDecoderLayer)
    tk.patch(made)
    return made


def encoder():
    layer = torch_layer(nn.TransformerEncoderLayer)
    return layer, (torch.randn(2, 16, 32, requires_grad=True),)


def decoder():
    layer = torch_layer(nn.TransformerDecoderLayer)
    return layer, tuple(torch.randn(2, n, 32, requires_grad=True) for n in (12, 16))


def model_of(family, attention="eager"):
    pytest.importorskip("transformers")
    from tests.support import transformers_models as models

    return models.make(family, attention=attention, dropout=RATE), models.inputs(family)


@pytest.fixture(params=["faster in training", "faster in inference"])
def table(request, monkeypatch):
    """Sizes by which the choice differs between a pass without gradients and one with them."""
    limits = (NEVER, 0) if request.param == "faster in training" else (0, NEVER)
    monkeypatch.setitem(_crossovers.TABLE, _crossovers.level(), dict.fromkeys(_crossovers.TABLE["avx2"], limits))


def gradients(run, tensors):
    """Gradients by `backward`, which the reentrant variant needs."""
    for each in tensors:
        each.grad = None
    torch.manual_seed(5)
    run().square().sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in tensors]


def assert_same(function, inputs, parameters, reentrant):
    read = [*inputs, *parameters]
    plain = gradients(lambda: function(*inputs), read)
    recomputed = gradients(lambda: checkpoint(function, *inputs, use_reentrant=reentrant), read)
    compare(plain, recomputed)


def compare(plain, recomputed):
    largest = max(each.abs().max().item() for each in plain if each is not None)  # some are sums that cancel
    for expected, found in zip(plain, recomputed, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * largest)


def compare_models(model, batch, reentrant):
    """The model against its copy in which every block is checkpointed; both keep the hook on the embedding."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = copy.deepcopy(model)
    model.gradient_checkpointing_disable()
    compare(*[gradients(lambda model=each: model(**batch).loss, list(each.parameters())) for each in (model, again)])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [encoder, decoder])
def test_layers_of_torch(make, reentrant, table):
    layer, inputs = make()
    assert_same(layer, inputs, layer.parameters(), reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family, reentrant, table):
    model, batch = model_of(family)
    tk.patch(model)
    compare_models(model, batch, reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_alone_in_training(reentrant, table):
    """Monte Carlo dropout: the model evaluates, its dropouts train, that of the embeddings among them."""
    model, batch = model_of("bert")
    tk.patch(model)
    model.eval()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.train()
    embeddings = model.bert.embeddings

    def embed(start):
        return embeddings(batch["input_ids"]) + start

    assert_same(embed, [torch.zeros((), requires_grad=True)], embeddings.parameters(), reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_in_accelerate(reentrant, table):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with tk.accelerate():
        assert_same(partial(F.scaled_dot_product_attention, dropout_p=RATE), [q, k, v], [], reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_models_in_accelerate(family, reentrant, table):
    model, batch = model_of(family, attention="sdpa")
    with tk.accelerate():
        compare_models(model, batch, reentrant)
