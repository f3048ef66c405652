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


def test_boxcar_leaves_out_what_is_a_whole_width_away():
    """Kernel regression: 120.0 with |q - k| < 1; counting keys at exactly 1 would make 101.25. The keys are made up."""
    q, k = torch.tensor([[0.0]]), torch.tensor([[0.2], [1.0], [-1.0], [1.0]])
    v = torch.tensor([[120.0], [95.0], [100.0], [90.0]])
    assert ops.similarity_attention(q, k, v, kernel="boxcar").item() == 120.0
    assert ops.similarity_attention(q, k, v, kernel="boxcar", width=1.001).item() == 101.25


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
