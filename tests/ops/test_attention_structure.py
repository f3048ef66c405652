"""Masks recognised from their values: exactly, or not at all; the same results and gradients as with the dense mask."""

from __future__ import annotations

import functools
import gc
import itertools
import math

import numpy as np
import pytest
import torch

import transformer_kernels as tk
from tests.support.parity import check_parity
from transformer_kernels import BackendUnavailable, nn
from transformer_kernels.backends import cpu
from transformer_kernels.ops.attention import _structure
from transformer_kernels.ops.attention._structure import structure_of

try:
    cpu.load()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = [torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64]


def positions(shape):
    _, _, queries, keys = shape
    return torch.arange(queries)[:, None], torch.arange(keys)


def lengths(shape, random):
    return torch.randint(1, shape[3] + 1, (shape[0], 1, 1, 1), generator=random)


def documents(shape, random):
    starts = torch.rand(shape[0], 1, 1, max(shape[2:]), generator=random) < 0.1
    number = starts.long().cumsum(-1)
    return number[..., : shape[2]].mT == number[..., : shape[3]]


KINDS = {
    "nothing": lambda i, j, s, r: torch.ones(s[2], s[3], dtype=torch.bool),
    "causal, top-left": lambda i, j, s, r: j <= i,
    "causal, bottom-right": lambda i, j, s, r: j <= i + s[3] - s[2],
    "strictly causal": lambda i, j, s, r: j < i,
    "window": lambda i, j, s, r: (j <= i + 3) & (j >= i - 5),
    "right padding": lambda i, j, s, r: j < lengths(s, r),
    "left padding": lambda i, j, s, r: j >= s[3] - lengths(s, r),
    "padding with gaps": lambda i, j, s, r: torch.rand(s[0], 1, 1, s[3], generator=r) < 0.6,
    "documents": lambda i, j, s, r: documents(s, r),
    "prefix": lambda i, j, s, r: (j < lengths(s, r) // 2) | (j <= i),
    "chunks": lambda i, j, s, r: i // 7 == j // 7,
    "per head": lambda i, j, s, r: j >= i - torch.arange(1, s[1] + 1)[:, None, None],
    "one key": lambda i, j, s, r: j == i,
}
"""Of i, j, the shape of the scores and a generator."""

PAIRS = [*((kind,) for kind in KINDS), *itertools.combinations(KINDS, 2)]


@functools.cache
def made(kinds, shape, seed=0):
    random, (i, j) = torch.Generator().manual_seed(seed), positions(shape)
    return functools.reduce(torch.logical_and, [KINDS[kind](i, j, shape, random) for kind in kinds])


def as_dtype(mask, dtype, hidden=-math.inf):
    return mask.clone() if dtype is torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hidden)


def written_out(structure, shape):
    """The dense mask of a structure."""
    i, j = positions(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    if structure.causal:
        mask &= j <= i + shape[3] - shape[2]
    if structure.key_padding_mask is not None:
        mask &= structure.key_padding_mask[:, None, None, :]
    if structure.key_ranges is not None:
        mask &= (j >= structure.key_ranges[..., :1]) & (j < structure.key_ranges[..., 1:])
    return mask


def visible(mask):
    return mask if mask.dtype is torch.bool else mask == 0


@pytest.mark.parametrize("kinds", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("lengths", [(40, 40), (21, 150), (150, 21), (1, 90)], ids=str)
def test_kinds_and_conjunctions_are_recognised_exactly(kinds, lengths):
    """In the dtypes in turn. A window among padding with gaps and the like stay one interval of the padded keys."""
    shape = (2, 3, *lengths)
    dtype = DTYPES[(PAIRS.index(kinds) + lengths[0]) % len(DTYPES)]
    mask = made(kinds, shape)
    structure = structure_of(as_dtype(mask, dtype), shape)
    assert structure is not None
    assert torch.equal(written_out(structure, shape), mask.expand(shape))


@pytest.mark.parametrize("seed", range(60))
def test_one_changed_element_is_recognised_exactly_or_not_at_all(seed):
    random = torch.Generator().manual_seed(seed)
    shape, dtype = (2, 2, 30 + seed, 75), DTYPES[seed % len(DTYPES)]
    mask = as_dtype(made(PAIRS[seed % len(PAIRS)], shape, seed).expand(shape), dtype)
    at = tuple(int(torch.randint(size, (), generator=random)) for size in shape)
    others = [0.0, -math.inf] if seed % 3 else [-1.0, math.nan, math.inf, -1e4]
    mask[at] = ~mask[at] if dtype is torch.bool else others[int(visible(mask)[at]) if seed % 3 else seed % 4]
    structure = structure_of(mask, shape)
    if structure is not None:
        assert torch.equal(written_out(structure, shape), visible(mask))
    else:
        assert seed % 3 == 0 or not torch.equal(
            visible(mask), made(PAIRS[seed % len(PAIRS)], shape, seed).expand(shape)
        )


def test_one_hole_in_causality_is_left_and_a_hidden_last_key_is_a_range():
    shape = (1, 1, 300, 300)
    mask = made(("causal, top-left",), shape).clone()
    assert structure_of(mask, shape)[:3] == (True, None, None)
    mask[200, 100] = False
    assert structure_of(mask, shape) is None
    mask[200, 100], mask[200, 200] = True, False
    assert structure_of(mask, shape).key_ranges[0, 0, 200].tolist() == [0, 200]


@pytest.mark.parametrize(
    "change", [lambda x: x.mT.contiguous().mT, lambda x: x[:, :], lambda x: x.expand(2, 1, -1, -1)]
)
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_layouts(change, default):
    """Read into memory of the CPU, whatever the default device is."""
    shape = (2, 3, 64, 64)
    mask = change(made(("causal, top-left",), shape))
    with torch.device(default):
        structure = structure_of(mask, shape)
    assert structure is not None
    assert structure[:3] == (True, None, None)


def test_two_values_that_hide_and_masks_with_gradients_are_left():
    shape = (1, 1, 50, 50)
    mask = as_dtype(made(("causal, top-left",), shape), torch.float32, -1e9)
    assert structure_of(mask, shape).hidden == -1e9
    assert structure_of(mask.clone().requires_grad_(), shape) is None
    mask[0, 40] = -math.inf
    assert structure_of(mask, shape) is None


def test_rows_that_see_nothing_are_left_where_a_number_hides():
    shape = (1, 1, 50, 50)
    strict = made(("strictly causal",), shape)
    assert structure_of(as_dtype(strict, torch.float32), shape) is not None
    assert structure_of(as_dtype(strict, torch.float32, torch.finfo(torch.float32).min), shape) is None


def test_it_is_remembered_until_the_mask_changes(monkeypatch):
    reads, read = [], _structure._read
    monkeypatch.setattr(_structure, "_read", lambda *args: reads.append(1) or read(*args))
    shape = (1, 1, 70, 70)
    mask = made(("causal, top-left",), shape).clone()
    for _ in range(3):
        assert structure_of(mask, shape).causal
        assert structure_of(mask[None, None], (1, 1, 70, 70)).causal
    assert len(reads) == 2
    mask[10, 2] = False
    assert structure_of(mask, shape) is None
    mask.numpy()[10, 2] = True  # no version counter sees it
    assert structure_of(mask, shape).causal
    mask.numpy()[10, 2] = False
    assert structure_of(mask, shape) is None


def test_masks_of_numpy_are_read_in_each_call():
    values = np.tri(80, dtype=bool)
    mask = torch.from_numpy(values)
    assert structure_of(mask, (1, 1, 80, 80)).causal
    values[40, 3] = False
    assert structure_of(mask, (1, 1, 80, 80)) is None


def test_no_memory_is_kept_and_none_that_is_reused_is_mistaken():
    shape = (1, 1, 90, 90)
    for _ in range(20):  # the allocator gives the same address again
        assert structure_of(torch.ones(90, 90, dtype=torch.bool).tril(), shape).causal
        assert structure_of(torch.ones(90, 90, dtype=torch.bool).triu(), shape).causal is False
    gc.collect()
    structure_of(torch.ones(90, 90, dtype=torch.bool), shape)
    assert len(_structure._remembered) <= 2 + sum(
        not storage.expired() for storage, _, _ in _structure._remembered.values()
    )


def tensors_of(shape, dtype=torch.float32, kv_heads=None, width=24):
    random = torch.Generator().manual_seed(3)
    batch, heads, queries, keys = shape
    sizes = {"q": (heads, queries), "k": (kv_heads or heads, keys), "v": (kv_heads or heads, keys)}
    return {
        name: torch.randn(batch, *size, width, generator=random).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", PAIRS[:: len(PAIRS) // 24], ids=" and ".join)
def test_outputs_and_gradients_are_those_of_the_dense_mask(kinds, dtype):
    shape = (2, 4, 75, 90)
    mask = made(kinds, shape)
    assert structure_of(mask, shape) is not None
    check_parity("attention", "cpu", {**tensors_of(shape, dtype, 2), "attn_bias": mask}, {"return_lse": True})


@pytest.mark.parametrize("hidden", [-math.inf, -1e9, torch.finfo(torch.float32).min], ids=str)
@pytest.mark.parametrize(
    "kinds", [("causal, top-left",), ("right padding", "window"), ("documents",)], ids=" and ".join
)
def test_additive_masks(kinds, hidden):
    shape = (2, 4, 75, 75)
    mask = as_dtype(made(kinds, shape), torch.float32, hidden)
    check_parity("attention", "cpu", {**tensors_of(shape), "attn_bias": mask}, {"return_lse": True})


def test_a_number_hides_no_key_where_scores_are_larger():
    shape = (1, 2, 70, 70)
    tensors = tensors_of(shape)
    with torch.no_grad():
        tensors["q"].mul_(60.0)
    mask = as_dtype(made(("causal, top-left",), shape), torch.float32, -100.0)
    assert not _structure.hides(-100.0, tensors["q"], tensors["k"], None, None)
    assert _structure.hides(-1e9, tensors["q"], tensors["k"], None, None)
    assert _structure.hides(-300.0, tensors["q"], tensors["k"], None, 30.0)
    check_parity("attention", "cpu", {**tensors, "attn_bias": mask})


OPTIONS = {
    "window": {"window": (20, 4)},
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.3},
    "softcap": {"softcap": 2.0},
    "padding": {},
    "sinks": {},
    "alibi": {},
    "packed": {},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kinds", [("documents",), ("padding with gaps", "window"), None], ids=str)
def test_with_other_options(kinds, option):
    """None: a random mask, which is not recognised."""
    shape = (1, 4, 80, 80)
    random = torch.Generator().manual_seed(1)
    mask = torch.rand(shape, generator=random) < 0.7 if kinds is None else made(kinds, shape)
    tensors = {**tensors_of(shape), "attn_bias": mask}
    if option == "padding":
        tensors["key_padding_mask"] = torch.rand(1, 80, generator=random) < 0.8
    if option == "sinks":
        tensors["sinks"] = torch.randn(4, generator=random).requires_grad_()
    if option == "alibi":
        tensors["alibi_slopes"] = torch.linspace(0.1, 0.4, 4)
    if option == "packed":
        tensors["cu_seqlens"] = torch.tensor([0, 30, 30, 71]).int()
    check_parity("attention", "cpu", tensors, {**OPTIONS[option], "return_lse": True})


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("shape", [(1, 1, 60, 100), (2, 1, 1, 100), (1, 4, 60, 100), (2, 4, 60, 1), (60, 100)], ids=str)
def test_bool_masks_that_are_not_recognised(backend, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    check_parity("attention", backend, {**tensors_of((2, 4, 60, 100)), "attn_bias": mask}, {"return_lse": True})


@pytest.mark.parametrize("op", ["packed_attention", "attention_weights"])
@pytest.mark.parametrize("kinds", [("documents",), None], ids=str)
def test_the_other_attention_functions(op, kinds):
    shape = (2, 2, 70, 70)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5 if kinds is None else made(kinds, shape)
    tensors = tensors_of(shape)
    if op == "packed_attention":
        qkv = torch.cat([x.detach().transpose(1, 2) for x in tensors.values()], dim=2).requires_grad_()
        check_parity(op, "cpu", {"qkv": qkv, "attn_bias": mask}, {"heads": 2})
    else:
        check_parity(op, "cpu", {"q": tensors["q"], "k": tensors["k"], "attn_bias": mask})


def test_queries_of_one_key_head_that_see_different_keys_while_decoding():
    shape = (2, 4, 1, 3000)
    mask = torch.arange(3000) < torch.tensor([5, 100, 2999, 40])[:, None, None]
    check_parity("attention", "cpu", {**tensors_of(shape, kv_heads=1), "attn_bias": mask})


def test_masks_that_are_not_plain_memory_are_left_to_the_validation():
    q = torch.randn(1, 2, 70, 16)
    mask = torch.ones(70, 70).triu(1)
    assert structure_of(torch._neg_view(mask), (1, 2, 70, 70)) is None
    assert structure_of(mask.to_sparse(), (1, 2, 70, 70)) is None
    for other in (mask.to_sparse(), torch.nested.nested_tensor([mask]), torch._neg_view(mask)):
        with pytest.raises(TypeError, match="attention: attn_bias must"):
            tk.attention(q, q, q, attn_bias=other)
    batched = torch.func.vmap(lambda bias: tk.attention(q, q, q, attn_bias=bias))(mask.expand(2, 70, 70))
    torch.testing.assert_close(batched, tk.attention(q, q, q, attn_bias=mask).expand_as(batched))


def test_compiled_calls_keep_the_mask():
    q = torch.randn(1, 2, 70, 16)
    mask = made(("documents",), (1, 2, 70, 70))
    compiled = torch.compile(lambda q, mask: tk.attention(q, q, q, attn_bias=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, mask), tk.attention(q, q, q, attn_bias=mask))


def test_a_bool_mask_becomes_no_float_copy():
    length = 1024
    mask = torch.rand(length, length) < 0.5
    q = torch.randn(1, 1, length, 8)
    tk.attention(q, q, q, attn_bias=mask, backend="cpu")
    with torch.profiler.profile(profile_memory=True) as profile:
        tk.attention(q, q, q, attn_bias=mask, backend="cpu")
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) < length * length


def test_torch_masks_of_multi_head_attention():
    layer = nn.MultiHeadAttention(32, 4, batch_first=True)
    torch_layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    torch_layer.load_state_dict(layer.state_dict())
    x = torch.randn(3, 70, 32)
    padding = torch.arange(70) >= torch.tensor([[70], [50], [66]])
    floating = torch.zeros(3, 70).masked_fill(padding, -math.inf)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(70)
    for mask, keys in itertools.product((causal, causal != 0, None), (padding, floating, None)):
        wanted, _ = torch_layer(x, x, x, attn_mask=mask, key_padding_mask=keys)
        got, _ = layer(x, x, x, attn_mask=mask, key_padding_mask=keys)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)
