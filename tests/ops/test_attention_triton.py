"""Attention kernels in Triton: each path where lengths would not choose it, and what only this backend promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from python_ref import ops as reference
from tests.ops.test_attention import make, padding
from tests.support.parity import check_parity, require
from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.attention import AttentionCall

OP = "attention"


@pytest.fixture(params=["triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    require(OP, request.param, device, torch.float32)
    return request.param


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(70, 100), (100, 70), (64, 64)], ids=str)
def test_masked_and_full_blocks_meet(
    backend: str, device: torch.device, lengths: tuple[int, int], causal: bool, window: int | None
) -> None:
    tensors = make(torch.float16, device, lengths, batch=1, heads=(2, 1))
    check_parity(OP, backend, tensors, {"causal": causal, "window": window, "return_lse": True})


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("kept", [(10, 90), (0, 40), (96, 100), (33, 64)], ids=str)
def test_padding_on_either_side_is_not_visited(backend: str, device: torch.device, kept: tuple[int, int]) -> None:
    tensors = make(torch.float32, device, (70, 100), batch=2)
    positions = torch.arange(100, device=device)
    tensors["key_padding_mask"] = torch.stack([(positions >= kept[0]) & (positions < kept[1]), positions % 3 > 0])
    with torch.no_grad():
        for name in "kv":
            tensors[name].masked_fill_(~tensors["key_padding_mask"][:, None, :, None], torch.nan)
    check_parity(OP, backend, tensors)


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 5}, {"causal": True, "window": 5}], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nothing_hidden_by_position_gets_out(
    backend: str, device: torch.device, options: dict[str, Any], poison: float
) -> None:
    tensors = make(torch.float32, device, (50, 50), batch=1)
    clean = _gradient_of_first_rows(backend, tensors, options)
    with torch.no_grad():
        for name in "kv":
            tensors[name][:, :, 40:] = poison
    for got, want in zip(_gradient_of_first_rows(backend, tensors, options), clean, strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0)


def _gradient_of_first_rows(backend: str, tensors: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    """Output and q's gradient at queries that see no key from 40 on."""
    q, k, v = (tensors[name].detach().requires_grad_() for name in "qkv")
    out = tk.attention(q, k, v, **options, backend=backend)
    out.backward(torch.ones_like(out))
    return [out[:, :, :30].detach(), q.grad[:, :, :30]]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "dropout_p": 0.3}, {"window": 300}], ids=str
)
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_decode_splits_the_keys(
    backend: str, triton_attention: Any, device: torch.device, queries: int, options: dict[str, Any]
) -> None:
    assert triton_attention._splits(1, 16, 3) > 1
    tensors = make(torch.float16, device, (queries, 700), batch=1, heads=(4, 2), width=40)
    tensors["key_padding_mask"] = padding(1, 700, device)
    tensors["attn_bias"] = torch.randn(1, 4, 1, 700, device=device)
    check_parity(OP, backend, {name: t.detach() for name, t in tensors.items()}, {**options, "return_lse": True})


def test_splits_fill_the_device(triton_attention: Any) -> None:
    assert triton_attention._splits(120, 64, 132) == 1  # busy anyway
    assert triton_attention._splits(8, 4, 132) == 1  # four blocks are not worth a second kernel
    assert triton_attention._splits(8, 64, 132) == 15  # 120 of 132 multiprocessors, in one wave


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tensor_descriptors_read_what_pointers_read(
    backend: str, triton_attention: Any, device: torch.device, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: t.detach() for name, t in make(torch.float16, device, (150, 200), batch=1, width=72).items()}
    monkeypatch.setattr(triton_attention, "_descriptors_pay", lambda call: True)
    check_parity(OP, backend, tensors, {"causal": causal, "return_lse": True})
    described = tk.attention(**tensors, causal=causal, backend=backend)
    monkeypatch.setattr(triton_attention, "_descriptors_pay", lambda call: False)
    torch.testing.assert_close(described, tk.attention(**tensors, causal=causal, backend=backend), atol=1e-3, rtol=1e-3)


def test_tensor_descriptors_need_alignment(
    backend: str, triton_attention: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = torch.randn(1, 64, 3, 2, 64, device=device).half()
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    options = (None, None, None, None, False, None, 0.0, 0.1)
    monkeypatch.setattr(triton_attention, "_descriptors_pay", lambda call: True)
    assert triton_attention._takes_descriptors(triton_attention._Call(q, k, v, (), *options))
    expanded = k[:, :1].expand(1, 2, 64, 64)
    assert not triton_attention._takes_descriptors(triton_attention._Call(q, expanded, v, (), *options))
    shifted = torch.randn(1, 2, 64, 72, device=device).half()[..., 3:67]
    assert not triton_attention._takes_descriptors(triton_attention._Call(shifted, k, v, (), *options))


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("lengths", [(20, 30), (80, 300), (2, 600)], ids=["short", "long", "decode"])
def test_any_sign_of_scale(backend: str, device: torch.device, lengths: tuple[int, int], scale: float) -> None:
    tensors = make(torch.float32, device, lengths, batch=1, heads=(1, 1))
    check_parity(OP, backend, tensors, {"scale": scale, "causal": True})


@pytest.mark.parametrize(("lengths", "scale"), [((80, 300), 2.0), ((2, 600), 2.0), ((2, 600), 0.5)], ids=str)
def test_gradients_of_large_scores_in_float32(
    backend: str, device: torch.device, lengths: tuple[int, int], scale: float
) -> None:
    tensors = make(torch.float32, device, lengths, batch=1, heads=(1, 1))
    check_parity(OP, backend, tensors, {"scale": scale, "causal": True})


@pytest.mark.parametrize("lengths", [(40, 50), (33, 130)], ids=["short", "long"])
def test_the_rounding_of_a_large_lse_is_taken_out_in_float32(
    backend: str, device: torch.device, lengths: tuple[int, int]
) -> None:
    """All scores are exactly 1024, so eager weights have no error, while half a unit of lse is 6e-5 of each of ours."""
    tensors = make(torch.float32, device, lengths, batch=1, heads=(2, 1), width=64)
    with torch.no_grad():
        for name in "qk":
            tensors[name][..., 0] = 32.0
        tensors["q"][..., 1:] = 0.0
    tensors["attn_bias"] = torch.zeros(1, 1, *lengths, device=device).requires_grad_()
    check_parity(OP, backend, tensors, {"scale": 1.0})


@pytest.mark.parametrize("lengths", [(40, 50), (300, 280)], ids=["short", "long"])
def test_gradients_are_written_in_the_layouts_that_are_given(
    backend: str, triton_attention: Any, device: torch.device, lengths: tuple[int, int]
) -> None:
    tensors = make(torch.float16, device, lengths, batch=2, heads=(2, 1))
    q, k, v = (tensors[name].detach() for name in "qkv")
    call = AttentionCall(q, k, v, None, None, None, None, True, None, 0.0, 0.2)
    result = triton_attention.forward(call)
    saved = (call, result, (torch.ones_like(result.out), None), (True, True, True, False))
    *wanted, _ = triton_attention.backward(*saved)
    queries, keys = lengths
    grads = (
        torch.full((2, 2, queries + 3, 40), 7.0, device=device).half()[:, :, 1 : queries + 1, 8:],
        torch.full((keys, 2, 3, 32), 7.0, device=device).half()[:, :, 1:2].permute(1, 2, 0, 3),
        torch.full((2, 1, keys, 67), 7.0, device=device).half()[..., 3:35],
    )
    *given, _ = triton_attention.backward(*saved, grads)
    for got, grad, want in zip(given, grads, wanted, strict=True):
        assert got.data_ptr() == grad.data_ptr() and torch.equal(grad, want)
        assert (grad._base == 7.0).sum() == grad._base.numel() - grad.numel()


def test_row_strides_beyond_32_bits_within_a_tile(triton_attention: Any) -> None:
    assert triton_attention._alignment(2, (64, 64, 64, 64, 64, 1 << 24)) == 0
    assert triton_attention._alignment(2, (1 << 24, 1 << 24, 64)) == 8  # between tiles offsets have 64 bits
    assert triton_attention._alignment(2, (1 << 20, 63, 64)) == 1


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_bits_of_the_reference(backend: str, device: torch.device, p: float) -> None:
    queries, keys = 21, 100
    q, k = torch.zeros(1, 2, queries, 64, device=device), torch.zeros(1, 2, keys, 64, device=device)
    kept = []
    for start in range(0, keys, 64):  # with equal weights, v picks out sixty-four columns of the mask
        v = torch.zeros(1, 2, keys, 64, device=device)
        v[:, :, start : start + 64] = torch.eye(64, device=device)[: min(64, keys - start)]
        torch.manual_seed(5)
        kept.append(tk.attention(q, k, v, dropout_p=p, backend=backend) > 0)
    torch.manual_seed(5)
    want = reference.dropout_keep(reference.draw_seed(device), 2, queries, keys, p)
    assert torch.equal(torch.cat(kept, dim=3)[0, :, :, :keys], want.view(2, queries, keys))


@pytest.mark.usefixtures("long_path")
def test_rows_biased_by_the_lowest_number_have_the_gradient_of_uniform_weights(
    backend: str, device: torch.device
) -> None:
    tensors = make(torch.float32, device, (20, 40), batch=1)
    tensors["attn_bias"] = torch.full((1, 1, 1, 40), torch.finfo(torch.float32).min, device=device)
    out = tk.attention(**tensors, backend=backend)
    out.sum().backward()
    torch.testing.assert_close(tensors["v"].grad, torch.full_like(tensors["v"], 0.5), rtol=0.02, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["ampere", "hopper"])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_every_table_computes_the_same(
    backend: str, device: torch.device, capability: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "INTERPRETED_CAPABILITY", capability)
    for lengths in ((60, 60), (30, 120), (30, 250), (100, 257)):
        tensors = make(torch.float16, device, lengths, batch=1, heads=(2, 1), width=width)
        check_parity(OP, backend, tensors, {"causal": True})
        tensors["attn_bias"] = torch.randn(1, 2, *lengths, device=device, requires_grad=True)
        check_parity(OP, backend, tensors, {"dropout_p": 0.2})
