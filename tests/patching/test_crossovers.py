"""With "auto" on a CPU, inference below the measured sizes is PyTorch's; everything else stays this package's."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels import huggingface
from transformer_kernels.backends import dispatch
from transformer_kernels.ops import _crossovers

pytest.importorskip("transformers")

FEW_TOKENS = ("bert", "distilbert", "gpt2", "llama", "qwen2", "vit")  # Mistral's window and the bias of T5 stay ours


@pytest.fixture
def computed(monkeypatch, unplanned):
    """The operations that this package computed."""
    names: list[str] = []
    select = dispatch.select

    def counted(operation, backend, call):
        names.append(operation.name)
        return select(operation, backend, call)

    monkeypatch.setattr(dispatch, "select", counted)
    return names


def patched(family, backend=None):
    ours = copy.deepcopy(models.make(family)).eval()
    tk.patch(ours, backend=backend)
    return ours


@pytest.mark.parametrize("family", FEW_TOKENS)
def test_inference_of_few_tokens_is_pytorchs(family, computed):
    plain = models.make(family, attention="sdpa").eval()
    ours = copy.deepcopy(plain)
    tk.patch(ours)
    batch = models.inputs(family, None)
    with torch.no_grad():
        out = ours(**batch).logits
        assert not [name for name in computed if name != "cross_entropy" and "gelu" not in name]
        torch.testing.assert_close(out, plain(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_named_backend_computes_all_of_it(family, backend, computed):
    if (reason := dispatch.unavailable(backend, torch.device("cpu"))) is not None:
        pytest.skip(reason)
    ours, batch = patched(family, backend), models.inputs(family, None)
    with torch.no_grad():
        ours(**batch)
    assert {"attention"} | ({"add_rms_norm", "rotary"} if family == "llama" else {"add_layer_norm"}) <= set(computed)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_training_is_this_packages_at_every_size(family, computed):
    ours, batch = patched(family), models.inputs(family, None)
    ours(**batch)
    assert "attention" in computed and {"layer_norm", "rms_norm", "add_layer_norm"} & set(computed)


def test_large_inference_is_this_packages(computed, monkeypatch):
    sizes = {**_crossovers.CROSSOVERS, **{(name, 4): (0, 0) for name, _ in _crossovers.CROSSOVERS}}
    monkeypatch.setattr(_crossovers, "CROSSOVERS", sizes)
    ours, batch = patched("bert"), models.inputs("bert", None)
    with torch.no_grad():
        ours(**batch)
    assert {"attention", "add_layer_norm", "linear"} <= set(computed)


@pytest.mark.parametrize("queries", [1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_small_attention_means_the_same(queries, causal, heads, biased):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, queries, 8, generator=generator)
    k, v = torch.randn(2, 2, heads, 5, 8, generator=generator).unbind(0)
    bias = torch.randn(1, 4, queries, 5, generator=generator) if biased else None
    with torch.no_grad():
        small = _crossovers.small_attention(q, k, v, bias, causal=causal, scale=0.3, backend=None)
        assert (small is None) == (causal and (queries == 3 or (queries == 5 and biased)))
        if small is not None:
            expected = tk.attention(q, k, v, causal=causal, attn_bias=bias, scale=0.3, backend="torch")
            torch.testing.assert_close(small, expected, rtol=1e-5, atol=1e-6)


def test_what_a_layer_asks_for_is_not_lost(computed):
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    layer = SimpleNamespace(is_causal=False)
    options = [{"sliding_window": 2}, {"softcap": 5.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.5}]
    with torch.no_grad():
        huggingface.attention_forward(layer, q, k, v)
        assert not computed
        for count, each in enumerate(options, start=1):
            huggingface.attention_forward(layer, q, k, v, **each)
            assert computed == ["attention"] * count, each
        out, weights = huggingface.attention_forward(layer, q, k, v, output_attentions=True)
    assert computed[-1] == "attention_weights"
    torch.testing.assert_close(weights @ v, out.transpose(1, 2), rtol=1e-5, atol=1e-6)
