"""The definitions themselves: published numbers, PyTorch's own functions, and the generator's test vectors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from python_ref import ops


def assert_rounds_to(values: torch.Tensor, wanted: list[float]) -> None:
    assert [round(value, 4) for value in values.flatten().tolist()] == wanted


def test_softmax_of_a_query_with_four_keys() -> None:
    q = torch.tensor([1.5]).view(1, 1, 1, 1)
    k = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
    assert_rounds_to(ops.attention_weights(q, k, scale=1.0), [0.0087, 0.0388, 0.1738, 0.7788])


def test_masked_softmax_with_two_valid_entries() -> None:
    y = ops.softmax(torch.tensor([2.0, 1.0, 0.0, 0.0]), mask=torch.tensor([True, True, False, False]))
    assert_rounds_to(y, [0.7311, 0.2689, 0.0, 0.0])


def test_sinusoidal_positions() -> None:
    positions = ops.sinusoidal_positions(20, 16)
    assert positions.shape == (20, 16)
    assert_rounds_to(positions[1, :8], [0.8415, 0.5403, 0.3110, 0.9504, 0.0998, 0.9950, 0.0316, 0.9995])
    odd = ops.sinusoidal_positions(5, 7)
    assert odd.shape == (5, 7)
    torch.testing.assert_close(odd[:, 6], torch.sin(torch.arange(5) * 10000.0 ** (-6 / 7)))


def test_learned_positions() -> None:
    table = torch.randn(6, 3)
    assert torch.equal(ops.learned_positions(table, 4, offset=1), table[1:5])
    with pytest.raises(ValueError, match="the table has 6 positions; got 7"):
        ops.learned_positions(table, 7)


# Random123's known answers (kat_vectors): counter, key, result
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX_VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    seed = torch.tensor([(key[1] << 32 | key[0]) - (1 << 64 if key[1] >> 31 else 0)])
    words = ops.philox4x32(seed, tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in words) == result


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_right_share(p: float) -> None:
    keep = ops.dropout_keep(torch.tensor([3]), 4, 200, 301, p)
    share = keep.double().mean().item()
    deviation = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(share - (1 - p)) <= 4 * deviation
    assert keep.any(dim=-1).all() or p == 1.0


def test_attention_is_that_of_pytorch() -> None:
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads, length in ((4, 5), (2, 5), (2, 5)))
    torch.testing.assert_close(ops.attention(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ops.attention(q, k, v, causal=True), want)


def test_attention_masks_by_hand() -> None:
    visible = ops.visible_keys(3, 5, torch.device("cpu"), causal=True, window=2)[0, 0]
    assert visible.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    visible = ops.visible_keys(3, 3, torch.device("cpu"), window=1)[0, 0]
    assert visible.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_lse_is_logsumexp_and_its_gradient_the_weights() -> None:
    q, k, v = (torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = ops.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(-1, -2) / 3**0.5, -1))
    assert torch.autograd.gradcheck(lambda q, k: ops.attention(q, k, v.detach(), return_lse=True)[1], (q, k))


def test_every_operation_passes_gradcheck() -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    check = torch.autograd.gradcheck
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert check(lambda x: ops.softmax(x, mask=mask, scale=0.5), (make(2, 3),))
    assert check(lambda *t: ops.layer_norm(*t), (make(2, 5), make(5), make(5)))
    assert check(lambda *t: ops.add_layer_norm(*t), (make(2, 5), make(2, 5), make(5), make(5)))
    for approximate in ("none", "tanh"):
        assert check(lambda x, b, a=approximate: ops.bias_gelu(x, b, approximate=a), (make(2, 5), make(5)))
    assert check(ops.bias_relu, (make(2, 5), make(5)))
    tokens = torch.tensor([[1, 3, 1], [0, 2, 2]])
    embed = lambda *t: ops.embedding(tokens, *t, position_ids=tokens + 1, scale=1.5)  # noqa: E731
    assert check(embed, (make(4, 5), make(6, 5), make(5), make(5)))
    keys = torch.tensor([[True, False, True], [False, False, False]])
    attend = lambda *t: ops.attention(*t, causal=True, key_padding_mask=keys, attn_bias=None, window=2)  # noqa: E731
    assert check(attend, (make(2, 2, 4, 3), make(2, 1, 3, 3), make(2, 1, 3, 3)))


def test_layer_norm_and_gelu_are_those_of_pytorch() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 9), (9,), (9,)))
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, eps=1e-3), F.layer_norm(x, (9,), weight, bias, 1e-3))
    for approximate in ("none", "tanh"):
        torch.testing.assert_close(ops.gelu(x, approximate=approximate), F.gelu(x, approximate=approximate))
    with pytest.raises(ValueError, match="approximate must be"):
        ops.gelu(x, approximate="erf")


def test_additive_attention_by_hand() -> None:
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 5, 7)
    query_weight, key_weight, score_weight = torch.randn(8, 4), torch.randn(8, 6), torch.randn(8)
    mask = torch.tensor([[True] * 5, [True, False, True, False, False]])
    out = ops.additive_attention(q, k, v, query_weight, key_weight, score_weight, key_padding_mask=mask)
    scores = torch.stack([score_weight @ torch.tanh(query_weight @ q[1, 2] + key_weight @ k[1, j]) for j in (0, 2)])
    torch.testing.assert_close(out[1, 2], torch.softmax(scores, 0) @ v[1, [0, 2]])


def test_similarity_attention_by_hand() -> None:
    q, k, v = torch.tensor([[0.0], [10.0]]), torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    weights = torch.exp(-0.5 * torch.tensor([0.0, 1.0, 9.0]))
    gaussian = ops.similarity_attention(q, k, v)
    torch.testing.assert_close(gaussian[0, 0], (weights * v[:, 0]).sum() / weights.sum())
    boxcar = ops.similarity_attention(q, k, v, kernel="boxcar", width=1.5)
    assert boxcar.tolist() == [[1.5], [0.0]]
    with pytest.raises(ValueError, match="kernel must be"):
        ops.similarity_attention(q, k, v, kernel="cosine")
