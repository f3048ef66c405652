"""Attention kernels in Triton: each path at lengths that do not select it, and guarantees of this backend only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from python_ref.ops import rotary_table
from tests.ops.test_attention import make, padding
from tests.support.interpreter import guarded
from tests.support.parity import backend_fixture, check_parity
from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.attention import _tiles as tiles
from transformer_kernels.ops.attention import prepare
from transformer_kernels.ops.attention._tiles import Kernel

OP = "attention"
backend = backend_fixture("triton")


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("window", [None, 7, 33, 64])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(70, 100), (100, 70), (64, 64)], ids=str)
def test_masked_and_full_blocks_meet(backend, device, lengths, causal, window):
    """With windows of 33 and 64, the visible keys of a tile's first and last query begin at a block boundary."""
    tensors = make(torch.float16, device, lengths, batch=1, heads=(2, 1))
    check_parity(OP, backend, tensors, {"causal": causal, "window": window, "return_lse": True})


ROTATED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window, dropout": {"causal": True, "window": 20, "dropout_p": 0.2},
}


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("masks", ["padding", "sequences"])
@pytest.mark.parametrize(("options", "interleaved"), [("full", False), ("causal", True), ("window, dropout", False)])
def test_rotated_in_every_loop(backend, device, options, interleaved, masks):
    """16 of 40 columns of grouped heads are rotated, each sequence with its own positions."""
    sequences = 2 if masks == "padding" else 1
    length = 70 if masks == "padding" else 110
    qkv = torch.randn(sequences, length, 8, 40).to(device, torch.float16).requires_grad_()
    cos, sin = rotary_table(torch.arange(length) * torch.arange(1, sequences + 1)[:, None], 16)
    tensors = {"qkv": qkv, "cos": cos.to(device), "sin": sin.to(device)}
    if masks == "padding":
        tensors["key_padding_mask"] = padding(2, length, device)
    else:
        tensors["cu_seqlens"] = torch.tensor([0, 30, 31, 100], dtype=torch.int32, device=device)
    check_parity("packed_attention", backend, tensors, {"heads": 4, "interleaved": interleaved, **ROTATED[options]})


def unlike(tensors):
    """The same values in different layouts between guard bands of NaN: q as (B, H, L, D), k as (B, L, H, D), v with
    gaps between rows."""
    q, k, v = (tensors[name].detach() for name in "qkv")
    _, heads, length, width = v.shape
    row = width + 24
    apart = torch.empty_strided(v.shape, (heads * length * row, length * row, row, 1), dtype=v.dtype, device=v.device)
    layouts = {"q": q.contiguous(), "k": k.transpose(1, 2).contiguous().transpose(1, 2), "v": apart.copy_(v)}
    return tensors | {name: guarded(x, [], fill=True).requires_grad_() for name, x in layouts.items()}


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 2), (6, 3)], ids=str)
def test_groups_batches_and_layouts_unlike_each_other(
    backend, triton_attention, device, heads, causal,
    monkeypatch
):  # fmt: skip
    """Heads in two sections of the L2 cache, with dropout, padding and a bias."""
    monkeypatch.setattr(triton_attention.tiles, "L2_BYTES", 4 * 70 * 32 * 2)  # two heads of keys
    tensors = make(torch.float16, device, (65, 70), batch=2, heads=heads)
    tensors["key_padding_mask"] = padding(2, 70, device)
    tensors["attn_bias"] = torch.randn(2, heads[0], 65, 70, device=device, requires_grad=True)
    options = {"causal": causal, "dropout_p": 0.2, "return_lse": True}
    check_parity(OP, backend, unlike(tensors), options)


@pytest.mark.parametrize("lengths", [(33, 45), (60, 300)], ids=["short", "long"])
@pytest.mark.parametrize("shape", [(1, 2, 1, -1), (2, 1, 0, -1)], ids=["row", "full"])
def test_gradient_of_a_bias_with_lse_and_fully_masked_rows(backend, device, lengths, shape):
    """A window and a padding mask fully mask some queries; the gradient of lse reaches the bias of others."""
    tensors = make(torch.float32, device, lengths, batch=2, heads=(2, 1))
    tensors["key_padding_mask"] = torch.arange(lengths[1], device=device).expand(2, -1) >= lengths[1] - 20
    shape = (*shape[:2], shape[2] or lengths[0], lengths[1])
    tensors["attn_bias"] = torch.randn(shape, device=device, requires_grad=True)
    _, lse = tk.attention(**{n: t.detach() for n, t in tensors.items()}, window=9, return_lse=True, backend=backend)
    assert torch.isinf(lse).any() and torch.isfinite(lse).any()
    check_parity(OP, backend, unlike(tensors), {"window": 9, "return_lse": True})


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("kept", [(10, 90), (0, 40), (96, 100), (33, 64)], ids=str)
def test_padding_on_either_side_is_not_visited(backend, device, kept):
    tensors = make(torch.float32, device, (70, 100), batch=2)
    positions = torch.arange(100, device=device)
    tensors["key_padding_mask"] = torch.stack([(positions >= kept[0]) & (positions < kept[1]), positions % 3 > 0])
    with torch.no_grad():
        for name in "kv":
            tensors[name].masked_fill_(~tensors["key_padding_mask"][:, None, :, None], torch.nan)
    check_parity(OP, backend, tensors)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "dropout_p": 0.3}, {"window": 300}, {"softcap": 0.7, "scale": -0.5}],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_decode_splits_the_keys(backend, triton_attention, device, queries, options):
    assert triton_attention._splits(1, 16, 3) > 1
    tensors = make(torch.float16, device, (queries, 700), batch=1, heads=(4, 2), width=40)
    tensors["key_padding_mask"] = padding(1, 700, device)
    shape = {1: (1, 4, 1, 700), 5: (4, 5, 1), 16: (1, 16, 700)}[queries]
    tensors["attn_bias"] = torch.randn(shape, device=device)
    check_parity(OP, backend, {name: t.detach() for name, t in tensors.items()}, {**options, "return_lse": True})


@pytest.mark.parametrize("options", [{}, {"window": 1100}], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_of_batches_groups_and_many_splits(
    backend, triton_attention, device, queries, options,
    monkeypatch, unplanned
):  # fmt: skip
    """Twenty splits, more than the combine kernel reads per step, of grouped heads with dropout, lse and a bias per
    head, with different layouts of k and v; scores grow along the keys, so each split has another maximum."""
    monkeypatch.setattr(triton_attention, "_splits", lambda programs, blocks, _: blocks)
    monkeypatch.setattr(triton_attention.tiles, "find", lambda *_: triton_attention.Tile(16, 64, 64, 4, 1))
    tensors = unlike(make(torch.float16, device, (queries, 1260), batch=2, heads=(6, 3), width=40))
    tensors["key_padding_mask"] = torch.arange(1260, device=device).expand(2, -1) < 1250
    slopes = torch.linspace(-1.0, 1.0, 6, device=device)[:, None, None]
    tensors["attn_bias"] = slopes * torch.linspace(0.0, 12.0, 1260, device=device)
    tensors = {name: t.detach() for name, t in tensors.items()}
    check_parity(OP, backend, tensors, {**options, "causal": True, "dropout_p": 0.3, "return_lse": True})


def test_a_sequence_that_is_not_finite_leaves_the_gradients_of_its_neighbours(backend, device):
    """The boundary is within a tile; the queries, keys, values and incoming gradients of the neighbours are NaN."""
    tensors = make(torch.float16, device, (96, 96), batch=1, heads=(2, 1))
    cu_seqlens = torch.tensor([0, 37, 81], dtype=torch.int32, device=device)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor[:, :, 37:] = torch.nan
    out = tk.attention(**tensors, cu_seqlens=cu_seqlens, backend=backend)
    out.backward(torch.where(torch.arange(96, device=device)[:, None] < 37, 1.0, torch.nan).half().expand_as(out))
    for tensor in tensors.values():
        assert tensor.grad[:, :, :37].isfinite().all() and tensor.grad[:, :, 37:81].isnan().all()


def test_splits_fill_the_device(triton_attention):
    assert triton_attention._splits(120, 64, 132) == 1  # full without splits
    assert triton_attention._splits(8, 4, 132) == 1  # four blocks are not worth a second kernel
    assert triton_attention._splits(8, 64, 132) == 15  # 120 of 132 multiprocessors, in one wave


@pytest.mark.usefixtures("long_path")
def test_long_path_with_an_unequal_window_and_alibi(backend, device):
    """Blocks of 32: the window's ends are in different blocks on both sides, for queries and keys. With a softcap."""
    tensors = make(torch.float32, device, (70, 100), batch=1, heads=(2, 1), width=16)
    options = {"window": (9, 40), "alibi_slopes": torch.tensor([0.5, 0.02], device=device), "return_lse": True}
    options["softcap"] = 0.7
    check_parity(OP, backend, tensors, options)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("lengths", [(20, 30), (80, 300), (2, 600)], ids=["short", "long", "decode"])
def test_any_sign_of_scale(backend, device, lengths, scale):
    tensors = make(torch.float32, device, lengths, batch=1, heads=(1, 1))
    check_parity(OP, backend, tensors, {"scale": scale, "causal": True})


@pytest.mark.parametrize(("lengths", "scale"), [((80, 300), 2.0), ((2, 600), 2.0), ((2, 600), 0.5)], ids=str)
def test_gradients_of_large_scores_in_float32(backend, device, lengths, scale):
    tensors = make(torch.float32, device, lengths, batch=1, heads=(1, 1))
    check_parity(OP, backend, tensors, {"scale": scale, "causal": True})


@pytest.mark.parametrize("order", ["heads first", "tokens first", "separate heads"])
@pytest.mark.parametrize("lengths", [(40, 50), (300, 280)], ids=["short", "long"])
def test_gradients_are_written_in_the_layouts_that_are_given(backend, triton_attention, device, lengths, order):
    """dk and dv of separate heads or of different strides are copied."""
    tensors = make(torch.float16, device, lengths, batch=2, heads=(2, 2 if order == "separate heads" else 1))
    q, k, v = (tensors[name].detach() for name in "qkv")
    call = prepare(q, k, v, causal=True, scale=0.2)
    result = triton_attention.Kernels(call).forward(call)
    incoming, everything = (torch.ones_like(result.out), None), (True, True, True, False)
    *wanted, _ = triton_attention.Kernels(call).backward(call, result, incoming, everything)
    queries, keys = lengths
    grads = (
        torch.full((2, 2, queries + 3, 40), 7.0, device=device).half()[:, :, 1 : queries + 1, 8:],
        torch.full((keys, 2, 3, 32), 7.0, device=device).half()[:, :, 1:2].permute(1, 2, 0, 3),
        torch.full((2, 1, keys, 67), 7.0, device=device).half()[..., 3:35],
    )
    if order == "tokens first":
        grads = (
            torch.full((2, queries, 3, 32), 7.0, device=device).half()[:, :, 1:].transpose(1, 2),
            torch.full((2, keys, 3, 32), 7.0, device=device).half()[:, :, 1:2].transpose(1, 2),
            torch.full((2, keys, 1, 67), 7.0, device=device).half()[..., 3:35].transpose(1, 2),
        )
    elif order == "separate heads":
        sizes = (queries, keys, keys)
        grads = tuple(torch.full((2, 2, size + 1, 32), 7.0, device=device).half()[:, :, 1:] for size in sizes)
    *given, _ = triton_attention.Kernels(call).backward(call, result, incoming, everything, grads)
    for got, grad, want in zip(given, grads, wanted, strict=True):
        assert got.data_ptr() == grad.data_ptr() and torch.equal(grad, want)
        assert (grad._base == 7.0).sum() == grad._base.numel() - grad.numel()


def test_row_strides_beyond_32_bits_within_a_tile(triton_attention):
    assert triton_attention.alignment(2, (64, 64, 64, 64, 64, 1 << 24)) == 0
    assert triton_attention.alignment(2, (1 << 24, 1 << 24, 64)) == 8  # between tiles offsets have 64 bits
    assert triton_attention.alignment(2, (1 << 20, 63, 64)) == 1


@pytest.mark.usefixtures("long_path")
def test_rows_biased_by_the_lowest_number_have_the_gradient_of_uniform_weights(backend, device):
    tensors = make(torch.float32, device, (20, 40), batch=1)
    tensors["attn_bias"] = torch.full((1, 1, 1, 40), torch.finfo(torch.float32).min, device=device)
    out = tk.attention(**tensors, backend=backend)
    out.sum().backward()
    torch.testing.assert_close(tensors["v"].grad, torch.full_like(tensors["v"], 0.5), rtol=0.02, atol=0)


@pytest.mark.parametrize("width", [64, 128])
def test_many_keys_are_read_in_blocks_of_128_where_a_causal_call_reads_64(
    backend, device, width, triton_attention, monkeypatch, unplanned
):
    monkeypatch.setattr(_triton, "INTERPRETED_CAPABILITY", (9, 0))
    tensors = make(torch.float16, device, (130, tiles.LONG_KEYS + 50), batch=1, heads=(1, 1), width=width)
    check_parity(OP, backend, tensors, {"causal": True})
    keys = []
    for length in (tiles.LONG_KEYS - 1, tiles.LONG_KEYS):
        q, k = (torch.empty(1, 1, each, width, dtype=torch.float16, device=device) for each in (130, length))
        call = prepare(q, k, k, causal=True, scale=0.125)
        keys.append(triton_attention.Kernels(call).launches(call).tile(Kernel.FORWARD).keys)
    assert keys == [64 if width == 64 else 128, 128]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["ampere", "hopper"])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_every_table_computes_the_same(backend, device, capability, width, monkeypatch, unplanned):
    monkeypatch.setattr(_triton, "INTERPRETED_CAPABILITY", capability)
    for lengths in ((60, 60), (30, 120), (30, 250), (100, 257)):
        tensors = make(torch.float16, device, lengths, batch=1, heads=(2, 1), width=width)
        check_parity(OP, backend, tensors, {"causal": True})
        tensors["attn_bias"] = torch.randn(1, 2, *lengths, device=device, requires_grad=True)
        check_parity(OP, backend, tensors, {"dropout_p": 0.2})
