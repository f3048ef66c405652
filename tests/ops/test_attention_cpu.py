"""Attention on the CPU: instruction sets, threads, keys split among threads, and memory bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import transformer_kernels as tk
from tests.support.parity import check_parity
from transformer_kernels import BackendUnavailable
from transformer_kernels.backends import cpu
from transformer_kernels.ops.attention import prepare
from transformer_kernels.ops.attention._compiled import Kernels

try:
    SETS = cpu.load().instruction_sets
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

KERNELS = Kernels.on(cpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=SETS)
def instruction_set(request):
    before = cpu.load().instruction_set()
    cpu.load().use(request.param)
    yield request.param
    cpu.load().use(before)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(lengths, heads=(4, 2), width=40, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    queries, keys = lengths
    shapes = {"q": (heads[0], queries), "k": (heads[1], keys), "v": (heads[1], keys)}
    return {
        name: torch.randn(batch, *shape, width, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def run(tensors, **options):
    torch.manual_seed(3)
    out, lse = tk.attention(**tensors, **options, return_lse=True, backend="cpu")
    wanted = [each for each in tensors.values() if each.requires_grad]
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad([out, finite], wanted, [torch.ones_like(out), finite.detach()]),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "all masks"])
def test_each_instruction_set_matches_the_reference(instruction_set, dtype, everything):
    tensors, options = make((37, 150), dtype=dtype), {"causal": not everything, "return_lse": True}
    if everything:
        tensors["key_padding_mask"] = torch.arange(150).expand(2, 150) % 7 != torch.tensor([[3], [5]])
        tensors["attn_bias"] = torch.randn(1, 4, 37, 150).to(dtype).requires_grad_()
        options |= {"window": (59, 9), "alibi_slopes": torch.linspace(-0.1, 0.4, 8).view(2, 4)}
        options |= {"dropout_p": 0.2, "softcap": 1.5}
    check_parity("attention", "cpu", tensors, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_go_together_through_keys_beyond_the_cache(instruction_set, dtype):
    """Blocks of queries in groups of four, the last of two; keys and their gradients in five parts."""
    check_parity("attention", "cpu", make((150, 600), (2, 1), 256, 1, dtype), {"window": (400, 90), "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_one_query_for_each_head(instruction_set, dtype, group):
    """Two parts of keys with gaps and a window, rows that end within a register; then fewer keys than streams."""
    tensors = make((1, 1100), (2 * group, 2), dtype=dtype)
    tensors["key_padding_mask"] = torch.arange(1100).expand(2, 1100) % 7 != torch.tensor([[3], [5]])
    check_parity("attention", "cpu", tensors, {"causal": True, "window": 1090, "return_lse": True})
    few = make((1, 3), (2 * group, 2), 144, dtype=dtype)
    check_parity("attention", "cpu", few, {"scale": -0.3, "return_lse": True})


LEADING = torch.arange(144) < torch.tensor([[144], [101]])


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (21, 9)}, {"key_padding_mask": LEADING}],
    ids=["full", "causal", "window", "leading keys"],
)
def test_rows_read_in_place_give_the_bits_of_packed_ones(instruction_set, options):
    """Float32 rows are not copied unless a value is not finite or the stride is a multiple of 2 KiB."""
    tensors = make((130, 144), width=64)
    copied, apart = (
        {name: pad(x.detach(), (0, gap))[..., :64].requires_grad_() for name, x in tensors.items()} for gap in (448, 5)
    )
    for finite in (True, False):
        for packed, *in_place in zip(*(run(each, **options) for each in (copied, tensors, apart)), strict=True):
            assert not finite or packed.isfinite().all()
            for result in in_place:
                torch.testing.assert_close(result, packed, rtol=0, atol=0, equal_nan=True)
        for each in (copied, tensors, apart):
            each["v"].data[0, 1, 100] = float("inf")


PACKED_APART = {
    name: torch.tensor(starts, dtype=torch.int32)
    for name, starts in {"cu_seqlens": [0, 120, 120, 190], "cu_seqlens_k": [0, 30, 41, 300]}.items()
}
CALLS: dict[str, Any] = {
    "one head": (make((300, 300), (1, 1), batch=1), {"causal": True}),
    "grouped": (make((200, 333), (6, 2), batch=1), {"dropout_p": 0.3}),
    "many heads": (make((64, 64), (4, 4), 32, 8), {"causal": True}),
    "decoding": (make((2, 3000), (8, 2), 64), {"causal": True}),
    "one query": (make((1, 3000), (6, 2), 64), {"causal": True}),
    "wide heads": (make((300, 600), (1, 1), 256, 1), {"window": (350, 90)}),
    "bias": ({**make((130, 70)), "attn_bias": torch.linspace(-1, 1, 280).view(4, 1, 70).requires_grad_()}, {}),
    "unequal window": (make((300, 333), (6, 2), batch=1), {"window": (70, 9), "softcap": 1.0}),
    "packed apart": (make((200, 333), batch=1), {**PACKED_APART, "dropout_p": 0.3, "alibi_slopes": torch.rand(4)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_threads_changes_no_bit(name, threads):
    tensors, options = CALLS[name]
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(run(tensors, **options))
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["plain", "padded", "causal", "biased", "dropout", "slopes"])
def test_keys_split_among_threads_match_the_reference(case, dtype):
    tensors, options = make((3, 2500), (4, 2), 24, dtype=dtype), {"return_lse": True}
    if case == "padded":  # the second sequence sees no key of the first two parts
        tensors["key_padding_mask"] = torch.stack([torch.arange(2500) % 3 > 0, torch.arange(2500) >= 2100])
    if case == "biased":
        tensors["attn_bias"] = torch.randn(4, 1, 2500).to(dtype).requires_grad_()
    if case == "slopes":
        options |= {"alibi_slopes": torch.rand(4) / 100, "window": (None, 1), "scale": -0.2, "softcap": 0.8}
    options |= {"causal": case == "causal", "dropout_p": 0.25 if case == "dropout" else 0.0}
    check_parity("attention", "cpu", tensors, options)


def test_the_lowest_bias_still_gives_a_mean():
    tensors = make((5, 9), (2, 2))
    bias = torch.full((1, 1, 5, 9), torch.finfo(torch.float32).min)
    out = tk.attention(**tensors, attn_bias=bias, backend="cpu")
    torch.testing.assert_close(out, tensors["v"].mean(dim=2, keepdim=True).expand_as(out))


def _guarded(shape):
    """A tensor (B, H, L, D) surrounded by NaN, with gaps between rows, and the whole buffer."""
    batch, heads, length, width = shape
    memory = torch.full((batch + 2, heads, length + 2, width + 3), float("nan"))
    return memory[1:-1, :, 1:-1, 1 : width + 1], memory


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed apart"])
def test_nothing_beside_the_operands_is_read_or_written(packed):
    of_queries, of_keys = ((1, 3, 200, 21), (1, 3, 333, 21)) if packed else ((2, 3, 37, 21), (2, 3, 37, 21))
    views = [_guarded(shape) for shape in (of_queries, of_keys, of_keys, of_queries, of_queries, of_keys, of_keys)]
    for view, _ in views[:4]:
        view.copy_(torch.randn(view.shape))
    q, k, v, dout = (view for view, _ in views[:4])
    call = prepare(q, k, v, causal=True, scale=0.2)
    if packed:
        k[:, :, 300:] = v[:, :, 300:] = float("nan")
        call = prepare(q, k, v, **PACKED_APART, window=(29, 2), alibi_slopes=torch.rand(3), scale=0.2)
    result = KERNELS(call).forward(call)
    into = tuple(view for view, _ in views[4:])
    plain = KERNELS(call).backward(call, result, (dout, None), (True, True, True, False))
    KERNELS(call).backward(call, result, (dout, None), (True, True, True, False), into)
    for got, want, (_, memory) in zip(into, plain, views[4:], strict=False):
        assert torch.equal(got, want)
        got.fill_(float("nan"))
        assert memory.isnan().all()


def test_unwanted_gradients_are_not_computed():
    tensors = make((20, 30))
    call = prepare(*(tensors[name].detach() for name in "qkv"), scale=0.2)
    result = KERNELS(call).forward(call)
    whole = KERNELS(call).backward(call, result, (torch.ones_like(result.out), None), (True, True, True, False))
    for i in range(3):
        wanted = tuple(j == i for j in range(4))
        gradients = KERNELS(call).backward(call, result, (torch.ones_like(result.out), None), wanted)
        assert torch.equal(gradients[i], whole[i]) and sum(each is not None for each in gradients) == 1
