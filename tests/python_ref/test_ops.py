"""The definitions themselves: published numbers, PyTorch's own functions, and the generator's test vectors."""

import math

import pytest
import torch
from torch.nn import functional as F

from python_ref import ops


def assert_rounds_to(values, wanted):
    assert [round(value, 4) for value in values.flatten().tolist()] == wanted


def test_masked_softmax_with_two_valid_entries():
    y = ops.softmax(torch.tensor([2.0, 1.0, 0.0, 0.0]), mask=torch.tensor([True, True, False, False]))
    assert_rounds_to(y, [0.7311, 0.2689, 0.0, 0.0])


def test_sinusoidal_positions():
    assert ops.sinusoidal_positions(20, 16).shape == (20, 16)
    odd = ops.sinusoidal_positions(5, 7)
    assert odd.shape == (5, 7)
    torch.testing.assert_close(odd[:, 6], torch.sin(torch.arange(5) * 10000.0 ** (-6 / 7)))


def test_learned_positions():
    table = torch.randn(6, 3)
    assert torch.equal(ops.learned_positions(table, 4, offset=1), table[1:5])
    with pytest.raises(ValueError, match="the table has 6 positions; got 7"):
        ops.learned_positions(table, 7)


# Random123's known answers for seven rounds (kat_vectors, philox4x32 7): counter, key, result
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX_VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, result):
    seed = torch.tensor([(key[1] << 32 | key[0]) - (1 << 64 if key[1] >> 31 else 0)])
    words = ops.philox4x32(seed, tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in words) == result


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_right_share(p):
    keep = ops.dropout_keep(torch.tensor([3]), 4, 200, 301, p)
    share = keep.double().mean().item()
    deviation = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(share - (1 - p)) <= 4 * deviation
    assert keep.any(dim=-1).all() or p == 1.0


def test_dropout_takes_sixteen_bits_of_the_words_in_turn():
    """The contract by hand: column c takes half c % 2 of word c // 2 % 4 of the counter (c // 8, row, head, 0)."""
    seed, heads, rows, columns = torch.tensor([0x1234567890ABCDEF]), 2, 3, 21
    elements = [(head, row, column) for head in range(heads) for row in range(rows) for column in range(columns)]
    taken = []
    for head, row, column in elements:
        words = ops.philox4x32(seed, tuple(torch.tensor([value]) for value in (column // 8, row, head, 0)))
        taken.append(int(words[column // 2 % 4]) >> 16 * (column % 2) & 0xFFFF)
    for p in (0.1, 0.5, 2**-16, 1 - 2**-16):
        wanted = torch.tensor([half >= round(p * 65536) for half in taken]).view(heads, rows, columns)
        assert torch.equal(ops.dropout_keep(seed, heads, rows, columns, p), wanted)


@pytest.mark.parametrize("p", [0.1, 0.3, 2**-17, 1 - 2**-17, 1.0])
def test_the_mean_stays_for_probabilities_between_two_of_sixteen_bits(p):
    """What is kept of 2^16 equally likely values, times the scale, is one; nothing where all are dropped."""
    kept = 65536 - round(p * 65536)
    scaled = ops._dropout(torch.ones(1, dtype=torch.float64), torch.tensor([True]), p)
    assert float(scaled) * kept == pytest.approx(65536 if kept else 0, rel=1e-15)


def test_attention_is_that_of_pytorch():
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads, length in ((4, 5), (2, 5), (2, 5)))
    torch.testing.assert_close(ops.attention(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ops.attention(q, k, v, causal=True), want)


def test_attention_masks_by_hand():
    visible = ops.visible_keys(3, 5, torch.device("cpu"), causal=True, window=2)[0, 0]
    assert visible.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    visible = ops.visible_keys(3, 3, torch.device("cpu"), window=1)[0, 0]
    assert visible.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_lse_is_logsumexp_and_its_gradient_the_weights():
    q, k, v = (torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = ops.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.transpose(-1, -2) / 3**0.5, -1))
    assert torch.autograd.gradcheck(lambda q, k: ops.attention(q, k, v.detach(), return_lse=True)[1], (q, k))


def test_every_operation_passes_gradcheck():
    def make(*shape):
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
    assert check(lambda *t: ops.add_rms_norm(*t), (make(2, 5), make(2, 5), make(5)))
    assert check(ops.swiglu, (make(2, 5), make(2, 5))) and check(ops.geglu, (make(2, 6),))
    table = ops.rotary_table(torch.arange(3), 4, dtype=torch.float64)
    assert check(lambda q, k: ops.rotary(q, k, *table), (make(1, 2, 3, 5), make(1, 1, 3, 5)))
    assert check(
        lambda *t: ops.linear_attention(*t, causal=True, chunk=2), (make(1, 1, 3, 2),) * 2 + (make(1, 1, 3, 4),)
    )
    keys = torch.tensor([[True, False, True], [False, False, False]])
    attend = lambda *t: ops.attention(*t, causal=True, key_padding_mask=keys, attn_bias=None, window=2)  # noqa: E731
    assert check(attend, (make(2, 2, 4, 3), make(2, 1, 3, 3), make(2, 1, 3, 3)))


def test_layer_norm_and_gelu_are_those_of_pytorch():
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 9), (9,), (9,)))
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, eps=1e-3), F.layer_norm(x, (9,), weight, bias, 1e-3))
    for approximate in ("none", "tanh"):
        torch.testing.assert_close(ops.gelu(x, approximate=approximate), F.gelu(x, approximate=approximate))
    with pytest.raises(ValueError, match="approximate must be"):
        ops.gelu(x, approximate="erf")


def test_additive_attention_by_hand():
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 5, 7)
    query_weight, key_weight, score_weight = torch.randn(8, 4), torch.randn(8, 6), torch.randn(8)
    mask = torch.tensor([[True] * 5, [True, False, True, False, False]])
    out = ops.additive_attention(q, k, v, query_weight, key_weight, score_weight, key_padding_mask=mask)
    scores = torch.stack([score_weight @ torch.tanh(query_weight @ q[1, 2] + key_weight @ k[1, j]) for j in (0, 2)])
    torch.testing.assert_close(out[1, 2], torch.softmax(scores, 0) @ v[1, [0, 2]])


def test_similarity_attention_by_hand():
    q, k, v = torch.tensor([[0.0], [10.0]]), torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    weights = torch.exp(-0.5 * torch.tensor([0.0, 1.0, 9.0]))
    gaussian = ops.similarity_attention(q, k, v)
    torch.testing.assert_close(gaussian[0, 0], (weights * v[:, 0]).sum() / weights.sum())
    boxcar = ops.similarity_attention(q, k, v, kernel="boxcar", width=1.5)
    assert boxcar.tolist() == [[1.5], [0.0]]
    with pytest.raises(ValueError, match="kernel must be"):
        ops.similarity_attention(q, k, v, kernel="cosine")


def test_attention_with_values_of_another_width():
    q, k, v = (torch.randn(2, heads, 5, width, dtype=torch.float64) for heads, width in ((4, 8), (2, 8), (2, 3)))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = ops.attention(q, k, v, causal=True)
    assert out.shape == (2, 4, 5, 3)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(ops.attention_weights(q, k, causal=True) @ v.repeat_interleave(2, dim=1), want)
    assert ops.attention(q, k[:, :, :0], v[:, :, :0]).shape == (2, 4, 5, 3)


def test_attention_weights_of_a_query_that_sees_nothing_are_zero():
    q, k = torch.randn(2, 1, 1, 3, 4)
    k[:, :, 2] = torch.nan
    weights = ops.attention_weights(q, k, key_padding_mask=torch.tensor([[True, True, False]]), window=1)
    assert weights.sum(-1).tolist() == [[[1.0, 1.0, 0.0]]]


def test_rms_norm_is_that_of_pytorch():
    x, residual, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 9), (4, 9), (9,)))
    torch.testing.assert_close(ops.rms_norm(x, weight, eps=1e-3), F.rms_norm(x, (9,), weight, 1e-3))
    normed, total = ops.add_rms_norm(x, residual, weight, eps=1e-3)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (9,), weight, 1e-3))
    torch.testing.assert_close(total, x + residual)
    assert not ops.add_rms_norm(x, residual, weight, dropout_p=1.0)[1].sub(residual).any()


def test_gated_activations_by_hand():
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64)
    packed = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(ops.swiglu(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(ops.swiglu(packed), F.silu(gate) * up)
    for approximate in ("none", "tanh"):
        want = F.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(ops.geglu(gate, up, approximate=approximate), want)
        torch.testing.assert_close(ops.geglu(packed, approximate=approximate), want)


def rotated_as_complex(x, angle, interleaved):
    """Pairs as complex numbers, multiplied by exp(i angle)."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return rotated.flatten(-2) if interleaved else rotated.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_rotary_multiplies_complex_numbers(interleaved):
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2))
    angle = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    cos, sin = ops.rotary_table(torch.arange(5), 6, base=100.0, dtype=torch.float64)
    for x, rotated in zip((q, k), ops.rotary(q, k, cos, sin, interleaved=interleaved), strict=True):
        torch.testing.assert_close(rotated[..., :6], rotated_as_complex(x[..., :6], angle, interleaved))
        assert torch.equal(rotated[..., 6:], x[..., 6:])


def test_scores_of_rotated_heads_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 4, 8, dtype=torch.float64)
    scores = []
    for positions in (torch.arange(4), torch.tensor([[100, 101, 102, 103]])):
        rotated = ops.rotary(q, k, *ops.rotary_table(positions, 8, dtype=torch.float64))
        scores.append(rotated[0] @ rotated[1].transpose(-1, -2))
    torch.testing.assert_close(*scores)


def test_llama_scaling_of_rotary_frequencies():
    """Frequencies of 4 or more rotations in 8192 tokens are kept, below 1 divided by 8, in between interpolated."""
    position, base = torch.tensor([1]), 500_000.0
    scaling = ops.RotaryScaling(factor=8.0, low=1.0, high=4.0, context=8192)
    plain, scaled = (ops.rotary_table(position, 64, base=base, scaling=s, dtype=torch.float64) for s in (None, scaling))
    before, after = (torch.atan2(sin, cos)[0] for cos, sin in (plain, scaled))
    turns = 8192 * before / (2 * math.pi)
    torch.testing.assert_close(after[turns >= 4], before[turns >= 4])
    torch.testing.assert_close(after[turns <= 1], before[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    blend = ((turns - 1) / 3)[between]
    assert between.any()
    torch.testing.assert_close(after[between], before[between] * (blend + (1 - blend) / 8))


def test_odd_rotary_width_is_refused():
    with pytest.raises(ValueError, match="width must be even and positive; got 5"):
        ops.rotary_table(torch.arange(3), 5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [2, 3, 64])
def test_linear_attention_is_its_formula(causal, chunk):
    q, k, v = (torch.randn(2, 3, 7, width, dtype=torch.float64) for width in (4, 4, 5))
    mask = torch.tensor([[True] * 7, [False, False, True, True, True, True, False]])
    k[1, :, 6], v[1, :, 6] = torch.nan, torch.inf
    weights = torch.einsum("bhid,bhjd->bhij", F.elu(q) + 1, F.elu(k) + 1)
    weights = weights.masked_fill(~mask[:, None, None], 0.0)
    weights = weights.tril() if causal else weights
    sums = weights.sum(-1, keepdim=True)
    want = weights @ v.nan_to_num(posinf=0.0) / sums.masked_fill(sums == 0, 1)
    out = ops.linear_attention(q, k, v, causal=causal, key_padding_mask=mask, chunk=chunk)
    torch.testing.assert_close(out, want)
    if causal:
        assert not out[1, :, :2].any()
        with pytest.raises(ValueError, match="causal needs as many queries as keys; got 3 and 7"):
            ops.linear_attention(q[:, :, :3], k, v, causal=True)


def performer_error(features, causal):
    """RMS error of `performer_attention` against `attention`, over the RMS of the latter, over 8 projections."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 128, 16, generator=generator, dtype=torch.float64).unbind()
    q, k = 0.25 * q, 0.25 * k  # the variance of the estimate grows with exp(|q|^2 + |k|^2)
    exact = ops.attention(q, k, v, causal=causal)
    errors = []
    for _ in range(8):
        projection = ops.orthogonal_projection(features, 16, generator=generator)
        errors.append(ops.performer_attention(q, k, v, projection, causal=causal) - exact)
    return (torch.stack(errors).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("causal", [False, True])
def test_performer_error_falls_with_the_square_root_of_its_features(causal):
    errors = [performer_error(features, causal) for features in (64, 1024)]
    assert errors[1] < 0.02
    assert 3.0 < errors[0] / errors[1] < 5.0  # sqrt(1024 / 64) = 4


def test_random_features_estimate_the_exponential_without_bias():
    x, y = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.25
    projection = ops.orthogonal_projection(400_000, 8, generator=torch.Generator().manual_seed(0))
    products = ops.positive_random_features(x, projection) @ ops.positive_random_features(y, projection).T
    torch.testing.assert_close(products, torch.exp(x @ y.T), rtol=0.03, atol=0)


def test_orthogonal_projection_has_orthogonal_rows_of_normal_length():
    rows = ops.orthogonal_projection(4000, 16, generator=torch.Generator().manual_seed(0))
    block = torch.nn.functional.normalize(rows[:16], dim=-1)
    torch.testing.assert_close(block @ block.T, torch.eye(16, dtype=torch.float64))
    assert rows.square().sum(-1).mean().item() == pytest.approx(16.0, rel=0.02)


def test_performer_attention_takes_masks():
    q, k, v = torch.randn(3, 2, 2, 6, 8, dtype=torch.float64).unbind()
    projection = ops.orthogonal_projection(32, 8)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    out = ops.performer_attention(q, k, v, projection, key_padding_mask=mask)
    part = ops.performer_attention(q[1:], k[1:, :, :4], v[1:, :, :4], projection)
    torch.testing.assert_close(out[1:], part)
    chunked = ops.performer_attention(q, k, v, projection, causal=True, chunk=2)
    torch.testing.assert_close(chunked, ops.performer_attention(q, k, v, projection, causal=True))
