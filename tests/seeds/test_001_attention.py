"""Document 001, attention from kernel regression to a character GPT: its worked numbers."""

import math

import pytest
import torch

import python_ref
from python_ref import ops
from transformer_kernels import ops as fused
from transformer_kernels.training import CharGPT, CharGPTConfig
from transformer_kernels.training.data.corpus import read_corpus


def rounded(values):
    return [round(value, 4) for value in values.flatten().tolist()]


@pytest.mark.parametrize("attention_weights", [ops.attention_weights, fused.attention_weights])
def test_weights_of_a_query_over_four_keys(attention_weights):
    """q . k: scores a step of 1.5 apart; softmax does not depend on a common offset."""
    q = torch.tensor([1.5]).view(1, 1, 1, 1)
    k = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
    assert rounded(attention_weights(q, k, scale=1.0)) == [0.0087, 0.0388, 0.1738, 0.7788]


@pytest.mark.parametrize("softmax", [ops.softmax, fused.softmax])
def test_causal_weights_of_three_tokens(softmax):
    """Masked scores: what may be seen of three tokens, the scores up to a constant in each row."""
    scores = torch.tensor([[0.0, 9.0, 9.0], [0.5, 0.0, 9.0], [0.05, 0.6, 0.0]])
    assert rounded(softmax(scores, causal=True)) == [1.0, 0.0, 0.0, 0.6225, 0.3775, 0.0, 0.2714, 0.4704, 0.2582]


def test_kernel_regression_of_house_prices():
    """Kernel regression: the prices of six houses at known locations, weighted by the distance to the query."""
    q, k = torch.tensor([[2.0]]), torch.tensor([1.0, 2.0, 5.0, 3.0, 10.0, 1.0]).unsqueeze(1)
    v = torch.tensor([100.0, 120.0, 75.0, 90.0, 130.0, 95.0]).unsqueeze(1)
    assert round(ops.similarity_attention(q, k, v, kernel="gaussian").item(), 3) == 103.753
    assert ops.similarity_attention(q, k, v, kernel="boxcar").item() == 120.0
    assert ops.similarity_attention(q, k, v, kernel="boxcar", width=1.001).item() == 101.25  # keys at exactly 1 count


def test_context_of_a_query_over_four_keys():
    q, k = torch.tensor([1.5]).view(1, 1, 1, 1), torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 4, 1)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]]).view(1, 1, 4, 2)
    for attention in (ops.attention, fused.attention):
        assert rounded(attention(q, k, v, scale=1.0)) == [0.5718, 0.6019]


@pytest.mark.parametrize("softmax", [ops.softmax, fused.softmax])
def test_softmax_with_valid_lengths(softmax):
    """Padding: all scores, then the first 2 and 3 of each row, without and with the scale 1/2."""
    scores = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.3, 1.4, 0.2, 0.0]])
    valid = torch.arange(4) < torch.tensor([[2], [3]])
    assert rounded(softmax(scores)) == [0.6103, 0.2245, 0.0826, 0.0826, 0.1770, 0.5317, 0.1602, 0.1311]
    assert rounded(softmax(scores, mask=valid)) == [0.7311, 0.2689, 0.0, 0.0, 0.2037, 0.6120, 0.1843, 0.0]
    assert rounded(softmax(scores, mask=valid, scale=0.5)) == [0.6225, 0.3775, 0.0, 0.0, 0.2714, 0.4704, 0.2582, 0.0]


def test_attention_of_a_batch_of_two():
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]]]).unsqueeze(1)
    k = torch.tensor(
        [[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.5]], [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [5.0, 5.0]]]
    )
    v = torch.tensor(
        [[[10.0, 0.0], [0.0, 10.0], [5.0, 5.0], [2.0, 8.0]], [[1.0, 1.0], [0.0, 2.0], [2.0, 0.0], [9.0, 9.0]]]
    )
    q, k, v = q.double(), k.double().unsqueeze(1), v.double().unsqueeze(1)
    weights = [0.3349, 0.1651, 0.3349, 0.1651, 0.1543, 0.3130, 0.3130, 0.2198]
    weights += [0.0035, 0.0017, 0.0017, 0.9931, 0.0515, 0.0254, 0.0515, 0.8716]
    context = [5.3534, 4.6466, 3.5475, 6.4525, 8.9449, 8.9449, 7.9987, 7.9464]
    for module in (ops, fused):
        assert rounded(module.attention_weights(q, k)) == weights
        found = module.attention(q, k, v).flatten()
        torch.testing.assert_close(found, torch.tensor(context).double(), rtol=0, atol=6e-5)


FOUR_TOKENS = [[2.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 1.0]]


def test_two_heads_of_two_columns():
    """Several heads: each has two columns of X as queries, keys and values."""
    x = torch.tensor(FOUR_TOKENS).view(1, 4, 2, 2).transpose(1, 2)
    first = [0.7346, 0.1786, 0.0434, 0.0434, 0.4022, 0.4022, 0.0978, 0.0978, *[0.25] * 8]
    output = [1.6477, 0.1786, 0.75, 0.25, 1.2066, 0.4022, 0.75, 0.25]
    output += [0.75, 0.25, 1.6477, 0.1786, 0.75, 0.25, 1.2066, 0.4022]
    for module in (ops, fused):
        assert rounded(module.attention_weights(x, x)[0, 0]) == first
        assert rounded(module.attention(x, x, x).transpose(1, 2).reshape(4, 4)) == output


def test_one_head_of_four_columns():
    x = torch.tensor(FOUR_TOKENS).view(1, 1, 4, 4)
    weights = [0.6103, 0.2245, 0.0826, 0.0826, 0.3655, 0.3655, 0.1345, 0.1345]
    weights += [0.0826, 0.0826, 0.6103, 0.2245, 0.1345, 0.1345, 0.3655, 0.3655]
    output = [1.4451, 0.2245, 0.2478, 0.0826, 1.0966, 0.3655, 0.4034, 0.1345]
    output += [0.2478, 0.0826, 1.4451, 0.2245, 0.4034, 0.1345, 1.0966, 0.3655]
    for module in (ops, fused):
        assert rounded(module.attention_weights(x, x)) == weights
        assert rounded(module.attention(x, x, x)) == output


def test_tokens_plus_positions():
    """Positions: of "cat", width 2, at positions 1 and 2; and of four tokens, width 6."""
    cat = torch.tensor([0.5, 1.0]) + ops.sinusoidal_positions(3, 2)[1:]
    assert [round(value, 2) for value in cat.flatten().tolist()] == [1.34, 1.54, 1.41, 0.58]
    first, second = [1.0, 0.5, 0.0, 0.2, 0.0, 0.0], [0.8, 0.1, 0.0, 0.3, 0.0, 0.0]
    x = torch.tensor([first, second, [0.9, 0.2, 0.0, 0.4, 0.0, 0.0], first])
    wanted = [1.0, 1.5, 0.0, 1.2, 0.0, 1.0, 1.6415, 0.6403, 0.0464, 1.2989, 0.0022, 1.0]
    wanted += [1.8093, -0.2161, 0.0927, 1.3957, 0.0043, 1.0, 1.1411, -0.49, 0.1388, 1.1903, 0.0065, 1.0]
    assert rounded(x + ops.sinusoidal_positions(4, 6)) == wanted


def test_layer_norm_of_width_4():
    """Add and norm: the inputs are printed with four digits, so the outputs agree to 4e-4."""
    x = torch.tensor(
        [[0.7950, 0.8551, 0.2477, 0.1848], [0.5615, 0.4827, 0.2051, 0.2255], [0.6711, 0.5925, 0.2205, 0.2327]]
    )
    wanted = torch.tensor(
        [[0.8967, 1.0931, -0.8920, -1.0978], [1.2353, 0.7299, -1.0482, -0.9170], [1.1824, 0.7984, -1.0203, -0.9605]]
    )
    for module in (ops, fused):
        y = module.layer_norm(x, torch.ones(4), torch.zeros(4), eps=1e-5)
        torch.testing.assert_close(y, wanted, rtol=0, atol=4e-4)


def test_parameters_of_the_character_gpt():
    """Training: 65 characters, width 128, 4 layers, MLP of 512."""
    config = python_ref.preset("char_gpt")
    assert (config.width, config.layers, config.vocab_size, config.ffn_width or 4 * config.width) == (128, 4, 65, 512)
    with torch.device("meta"):
        model = python_ref.build("char_gpt")
    sizes = {"char_gpt": model.num_parameters()}
    assert sizes == {"char_gpt": 807_745}


def test_sinusoidal_table():
    """Positions: P[:4, :8] of 20 positions, 16 wide."""
    wanted = [
        [(math.sin, math.cos)[column % 2](row / 10_000 ** (column // 2 * 2 / 16)) for column in range(8)]
        for row in range(4)
    ]
    table = ops.sinusoidal_positions(20, 16)[:4, :8]
    torch.testing.assert_close(table, torch.tensor(wanted), rtol=0, atol=1e-6)
    assert rounded(table[1]) == [0.8415, 0.5403, 0.3110, 0.9504, 0.0998, 0.9950, 0.0316, 0.9995]


def test_size_of_tinyshakespeare(data_folder):
    """The character GPT's data: characters, symbols, windows of 64, and batches of 64 in an epoch."""
    text = read_corpus("tinyshakespeare", str(data_folder))
    assert (len(text), len(set(text))) == (1_115_394, 65)
    config = CharGPTConfig(corpus="tinyshakespeare", data_dir=str(data_folder), split="none", context=64, batch_size=64)
    recipe = CharGPT(config)
    assert (recipe.train_length, recipe.train_length // config.batch_size) == (1_115_330, 17_427)
    assert list(recipe.validation_batches(torch.device("cpu"), None)) == []


def test_shuffling_the_tokens_permutes_the_outputs():
    """Why positions are needed: without them attention does not depend on the order of its tokens."""
    config = python_ref.preset("imdb_bert", vocab_size=50, width=16, heads=4, layers=2)
    model = python_ref.BERTClassifier(config).eval()
    with torch.no_grad():
        model.embedding.positions.zero_()
        tokens, order = torch.randint(50, (2, 9)), torch.randperm(9)
        torch.testing.assert_close(model.hidden_states(tokens)[:, order], model.hidden_states(tokens[:, order]))
        model.embedding.positions.normal_()
        moved = model.hidden_states(tokens)[:, order] - model.hidden_states(tokens[:, order])
    assert moved.abs().max() > 0.1


def test_heads_are_attention_on_slices_of_the_width():
    """Several heads: each is attention on its own columns, and their outputs are concatenated."""
    qkv = torch.randn(2, 7, 3 * 4, 5)  # 4 heads of 5
    out = ops.packed_attention(qkv, heads=4, causal=True)
    for head in range(4):
        q, k, v = (qkv[:, :, part * 4 + head].unsqueeze(1) for part in range(3))
        torch.testing.assert_close(out[..., head * 5 : head * 5 + 5], ops.attention(q, k, v, causal=True)[:, 0])
