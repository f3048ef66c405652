"""`attn_implementation="transformer_kernels"`: the models of transformers give what they give with eager attention."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here

huggingface = pytest.importorskip("transformer_kernels.huggingface", reason="transformers is not installed")
masking = pytest.importorskip("transformers.masking_utils")


def with_our_attention(model):
    ours = copy.deepcopy(model)
    ours.set_attn_implementation(huggingface.NAME)
    assert ours.config._attn_implementation == huggingface.NAME
    return ours


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_models_match_eager(family, padding):
    eager, batch = models.make(family), models.inputs(family, padding)
    exact = models.run(family, models.exact(eager), batch)
    ours = models.run(family, with_our_attention(eager), batch)
    models.assert_within_budget(ours, models.run(family, eager, batch), exact)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", models.CAUSAL)
def test_generation_matches_eager(family, cache):
    eager = models.make(family).eval()
    batch = models.inputs(family, "left", labels=False)
    options = {"max_new_tokens": 6, "do_sample": False} | ({} if cache is None else {"cache_implementation": cache})
    assert torch.equal(with_our_attention(eager).generate(**batch, **options), eager.generate(**batch, **options))


def test_packed_rows_do_not_see_each_other():
    eager = models.make("llama")
    ours, tokens = with_our_attention(eager), torch.arange(3, 13).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = ours(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, eager(input_ids=tokens, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(packed[:, 4:], ours(input_ids=tokens[:, 4:], use_cache=False).logits)


B, H, HK, LQ, LK, D = 2, 4, 2, 5, 7, 8


def reference(q, k, v, visible, scale, bias=0.0, softcap=None):
    """(B, L, H, D) from dense scores in float64; a row without keys is 0."""
    k, v = (x.repeat_interleave(H // HK, 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores + bias).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).float()


def qkv():
    torch.manual_seed(0)
    return torch.randn(B, H, LQ, D), torch.randn(B, HK, LK, D), torch.randn(B, HK, LK, D)


ROWS, COLUMNS = torch.arange(LQ)[:, None] + LK - LQ, torch.arange(LK)
CAUSAL = (COLUMNS <= ROWS).expand(B, 1, LQ, LK)
KEYS = torch.tensor([[True] * 7, [False] * 2 + [True] * 4 + [False]])
BIAS = torch.randn(B, 1, LQ, LK, generator=torch.Generator().manual_seed(2))
EVERYTHING = torch.ones(B, 1, LQ, LK, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "options", "visible", "bias"),
    [
        (None, {"is_causal": False}, EVERYTHING, 0.0),
        (None, {"is_causal": True}, CAUSAL, 0.0),
        (None, {}, CAUSAL, 0.0),
        (KEYS, {"is_causal": False}, KEYS[:, None, None, :] & EVERYTHING, 0.0),
        (KEYS.long(), {"is_causal": True}, KEYS[:, None, None, :] & CAUSAL, 0.0),
        (None, {"is_causal": True, "sliding_window": 3}, CAUSAL & (ROWS - COLUMNS < 3), 0.0),
        (CAUSAL & KEYS[:, None, None, :], {}, CAUSAL & KEYS[:, None, None, :], 0.0),
        (KEYS[:, None, None, :], {"sliding_window": 3}, KEYS[:, None, None, :] & EVERYTHING, 0.0),
        (BIAS, {}, EVERYTHING, BIAS),
        (BIAS.double(), {"position_bias": BIAS}, EVERYTHING, 2 * BIAS),
        (KEYS, {"is_causal": True, "position_bias": BIAS[:1]}, KEYS[:, None, None, :] & CAUSAL, BIAS[:1]),
    ],
    ids=lambda value: None if value is None or isinstance(value, float) else type(value).__name__,
)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_masks(mask, options, visible, bias, softcap):
    q, k, v = qkv()
    module = SimpleNamespace(is_causal=True)
    out, weights = huggingface.attention_forward(module, q, k, v, mask, scaling=0.3, softcap=softcap, **options)
    assert weights is None and out.shape == (B, LQ, H, D) and out.is_contiguous()
    torch.testing.assert_close(out, reference(q, k, v, visible, 0.3, bias, softcap), rtol=1e-5, atol=1e-5)


def test_position_bias_has_a_gradient():
    q, k, v = qkv()
    bias = torch.randn(1, H, LQ, LK, requires_grad=True)
    module = SimpleNamespace(is_causal=False)
    cotangent = torch.randn(B, LQ, H, D)
    out, _ = huggingface.attention_forward(module, q, k, v, KEYS, scaling=1.0, position_bias=bias)
    (ours,) = torch.autograd.grad(out, bias, cotangent)
    dense = reference(q, k, v, KEYS[:, None, None, :] & EVERYTHING, 1.0, bias)
    (expected,) = torch.autograd.grad(dense, bias, cotangent)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_dropout_drops_and_repeats_with_the_seed():
    q, k, v = qkv()
    module = SimpleNamespace(is_causal=False)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(huggingface.attention_forward(module, q, k, v, dropout=0.5)[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_module_names_its_backend():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="backend must be one of"):
        huggingface.attention_forward(SimpleNamespace(is_causal=False, backend="nonsense"), q, k, v)


@pytest.mark.parametrize("option", ["s_aux", "sinks", "indices", "block_indices", "cache", "head_mask"])
def test_what_would_change_the_result_is_refused(option):
    with pytest.raises(ValueError, match=option):
        huggingface.attention_forward(SimpleNamespace(), *qkv(), **{option: 1.0})


def test_reordered_attention_is_refused():
    ours = with_our_attention(models.make("gpt2", reorder_and_upcast_attn=True))
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        ours(**models.inputs("gpt2"))


def test_a_mask_of_three_axes_is_refused():
    with pytest.raises(ValueError, match="2 or 4 dimensions"):
        huggingface.attention_forward(SimpleNamespace(is_causal=False), *qkv(), torch.ones(B, LQ, LK))


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"mask_function": masking.causal_mask_function}, None),
        ({"mask_function": masking.causal_mask_function, "attention_mask": KEYS}, (B, LK)),
        ({"mask_function": masking.causal_mask_function, "attention_mask": torch.ones_like(KEYS)}, None),
        ({"mask_function": masking.causal_mask_function, "allow_is_causal_skip": False}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "q_offset": 0}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "q_offset": torch.tensor(2)}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "attention_mask": KEYS[:, :5]}, (B, 1, LQ, LK)),
        ({"mask_function": masking.bidirectional_mask_function, "allow_is_bidirectional_skip": True}, None),
        ({"mask_function": masking.bidirectional_mask_function}, (B, 1, LQ, LK)),
        ({"mask_function": masking.sliding_window_causal_mask_function(3)}, (B, 1, LQ, LK)),
    ],
)
def test_masks_stay_short_where_that_is_exact(arguments, shape):
    mask = huggingface.attention_mask(B, LQ, LK, **{"q_offset": LK - LQ, **arguments})
    assert (mask if mask is None else tuple(mask.shape)) == shape
