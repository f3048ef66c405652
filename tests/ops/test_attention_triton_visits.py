"""Blocks visited by Triton's attention kernels: only those with visible keys, for packed sequences and padding.

The interpreter calls one function per block, so that visits can be counted.
"""

import inspect
import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import transformer_kernels as tk
from tests.ops.test_attention import make
from tests.support.parity import backend_fixture, check_parity
from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.attention import prepare

OP = "attention"
QUERIES, MASKED = 32, 16
"""The tile of `long_path`: 32 queries by 32 keys, 16 in the masked loop."""

Block = dict[str, int]
Count = Callable[[ModuleType, str], list[Block]]
backend = backend_fixture("triton")


@pytest.fixture
def count(triton_attention, monkeypatch):
    """Lists the positions of every call of a device function."""
    if not _triton.interpreting():
        pytest.skip("only the interpreter's calls can be counted")

    def watch(module, name):
        original, calls = getattr(module, name), []
        signature = inspect.signature(original.fn)

        def counted(*args):
            calls.append(_positions(signature.bind(*args).arguments))
            return original(*args)

        monkeypatch.setattr(module, name, counted)
        return calls

    return watch


def _positions(arguments):
    """The start of the block, its number of positions, and the number of rows."""
    found = {name: int(arguments[name]) for name in ("start", "first_row") if name in arguments}
    if "keys" in arguments:
        found["first_key"] = int(arguments["keys"].first_key)
    if "queries" in arguments:
        found["first_row"] = int(arguments["queries"].first_row)
    if "source" in arguments and hasattr(arguments["source"], "length"):
        found["length"] = int(arguments["source"].length)
    found["walked"] = MASKED if arguments.get("MASKED") else QUERIES
    return found


def _sequences(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _forward_and_backward(tensors, **options):
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    out = tk.attention(**leaves, **options, backend="triton")
    out.backward(torch.ones_like(out))
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items() if x.is_floating_point()}}


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [[128], [64, 64], [32] * 4, [50, 7, 1, 70], [100, 20], [10]], ids=str)
def test_work_is_the_sum_of_the_squares(count, device, lengths, causal):
    from transformer_kernels.ops.attention import _triton_backward, _triton_backward_key, _triton_forward

    tensors = make(torch.float16, device, (128, 128), batch=1, heads=(1, 1))
    passes = {
        "keys of a query tile": count(_triton_forward, "attend_block"),
        "keys of a query tile, backward": count(_triton_backward, "query_gradient_block"),
        "queries of a key tile": count(_triton_backward_key, "accumulate_queries"),
    }
    _forward_and_backward(tensors, cu_seqlens=_sequences(lengths, device), causal=causal)
    starts = [0, *itertools.accumulate(lengths)]
    spans = list(itertools.pairwise(starts))
    touched = [[(a, b) for a, b in spans if a < tile + QUERIES and b > tile] for tile in range(0, 128, QUERIES)]
    blocks = sum(-(-own[-1][1] // MASKED) - own[0][0] // MASKED for own in touched if own)
    aligned = all(start % QUERIES == 0 for start in starts)
    for name, calls in passes.items():
        walked = sum(call["walked"] for call in calls)
        assert walked <= blocks * MASKED if causal else walked == blocks * MASKED, name
        if aligned:
            square = sum(length * length for length in lengths)
            triangle = sum(length * (length + QUERIES) // 2 for length in lengths)
            assert walked * QUERIES == (triangle if causal else square), name


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradient_of_a_bias_visits_tiles_of_one_sequence(count, device, causal):
    from transformer_kernels.ops.attention import _triton_backward_bias

    tensors = make(torch.float16, device, (128, 128), batch=1, heads=(1, 1))
    tensors["attn_bias"] = torch.randn(1, 1, 128, 128, device=device).half()
    tiles = count(_triton_backward_bias, "key_gradient_block")
    _forward_and_backward(tensors, cu_seqlens=_sequences([64, 60], device), causal=causal)
    assert {(tile["first_row"] // 64, tile["first_key"] // 64) for tile in tiles} == {(0, 0), (1, 1)}


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [[50, 7, 1, 40], [32, 64], [96], [33, 31, 20]], ids=str)
def test_borders_within_tiles(backend, device, lengths, causal):
    tensors = make(torch.float16, device, (100, 100), batch=1, heads=(2, 1))
    options = {"cu_seqlens": _sequences(lengths, device), "causal": causal, "return_lse": True}
    check_parity("attention", backend, tensors, options)


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
def test_gradients_do_not_cross_a_border(count, device, poisoned):
    tensors = make(torch.float32, device, (96, 96), batch=1, heads=(2, 1))
    cu_seqlens = _sequences([37, 40], device)
    clean = _forward_and_backward(tensors, cu_seqlens=cu_seqlens)
    with torch.no_grad():
        tensors[poisoned][:, :, 37:77] = float("nan")
    poisoned = _forward_and_backward(tensors, cu_seqlens=cu_seqlens)
    assert torch.isnan(poisoned["out"][:, :, 37:77]).all()
    for name, gradient in poisoned.items():
        torch.testing.assert_close(gradient[:, :, :37], clean[name][:, :, :37], atol=0, rtol=0, msg=name)
        assert (gradient[:, :, 77:] == 0).all(), name


@pytest.mark.usefixtures("long_path")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_padding_between_real_keys_is_not_visited(backend, count, device, causal):
    from transformer_kernels.ops.attention import _triton_backward, _triton_backward_key, _triton_forward

    positions = torch.arange(160, device=device)
    tensors = make(torch.float16, device, (160, 160), batch=1, heads=(1, 1))
    tensors["key_padding_mask"] = ((positions < 40) | (positions >= 140))[None]
    with torch.no_grad():
        for name in "kv":
            tensors[name][:, :, 40:140] = float("nan")
    forward = count(_triton_forward, "attend_block")
    queries = count(_triton_backward, "query_gradient_block")
    visits = count(_triton_backward_key, "accumulate_queries")
    loads = [count(_triton_backward_key, name) for name in ("load_rotated", "load_rows")]
    check_parity("attention", backend, tensors, {"causal": causal})
    for blocks in (forward, queries):
        visited = {block["start"] for block in blocks}
        assert visited == {0, 16, 32, 128, 144}
    assert {visit["first_key"] for visit in visits} == {0, 32, 128}
    unread = [load["start"] for load in itertools.chain(*loads) if load["length"] == 0]
    assert sorted(unread) == [64, 64, 96, 96]  # k and v of the two tiles that are all padding


def test_decode_visits_from_the_first_real_key_to_the_last(backend, count, device):
    from transformer_kernels.ops.attention import _triton_decode

    tensors = {name: x.detach() for name, x in make(torch.float16, device, (2, 700), batch=1, heads=(2, 1)).items()}
    positions = torch.arange(700, device=device)
    tensors["key_padding_mask"] = ((positions >= 100) & (positions < 200))[None]
    for name in "kv":
        tensors[name].masked_fill_(~tensors["key_padding_mask"][:, None, :, None], torch.nan)
    loads = count(_triton_decode, "load_rows")
    check_parity("attention", backend, tensors, {"causal": True, "return_lse": True})
    assert {load["start"] for load in loads} == {64, 128, 192}


@pytest.mark.parametrize(("start", "end"), [(0, 1024), (0, 1025), (100, 5300), (64, 9000)], ids=str)
def test_the_real_keys_of_any_range(triton_attention, device, start, end):
    """Short and long ranges use different chunk sizes."""
    from tests.support.triton_kernels import real_keys_kernel

    for first, last, hole in (
        (0, 9000, None),
        (1030, 4200, None),
        (500, 1000, 700),
        (1100, 5298, 5200),
        (8999, 9000, 0),
    ):
        real = torch.zeros(9000, dtype=torch.bool, device=device)
        real[first:last] = True
        if hole is not None:
            real[hole] = False
        found = torch.zeros(3, dtype=torch.int32, device=device)
        real_keys_kernel[(1,)](real, found, start, end, 9000, 4096)
        within = real[start:end].nonzero().flatten() + start
        if not len(within):
            assert found[0] >= found[1]  # nothing is visited
            continue
        low, high = int(within[0]), int(within[-1]) + 1
        assert found.tolist() == [low, high, int(len(within) == high - low)], (first, last, hole)


def test_the_sequence_of_every_token(triton_attention, device):
    for lengths, tokens in (([5], 5), ([3, 0, 0, 4], 9), ([], 4), ([0, 0], 3), ([1] * 300, 300), ([256, 256, 1], 600)):
        q = torch.empty(1, 1, tokens, 16, device=device, dtype=torch.float16)
        call = prepare(q, q, q, cu_seqlens=_sequences(lengths, device))
        sequences = triton_attention.Kernels(call).launches(call).extras(call, None).sequences
        spans = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
        end = sum(lengths)
        want = [next(((a, b) for a, b in spans if a <= token < b), (end, end)) for token in range(tokens)]
        assert sequences.T.tolist() == [list(pair) for pair in want], lengths
