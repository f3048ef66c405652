"""Document 002, from self-attention to Llama: its first computation, and what makes sinusoidal positions relative."""

import pytest
import torch

from python_ref import ops
from transformer_kernels import ops as fused


@pytest.fixture
def x():
    """Four tokens, 512 wide: `manual_seed(123); rand(4, 512)`."""
    return torch.rand(4, 512, generator=torch.Generator().manual_seed(123))


def test_softmax_of_unscaled_scores_sees_one_token(x):
    """Chapter 1, scores and their softmax: the third token's, whose score with itself is 43 above the others."""
    scores = x[2] @ x.T
    torch.testing.assert_close(scores, torch.tensor([134.1449, 129.8451, 177.2513, 130.5724]), rtol=0, atol=1e-4)
    wanted = torch.tensor([1.9016e-19, 2.5808e-21, 1.0, 5.3406e-21])
    for softmax in (ops.softmax, fused.softmax):
        torch.testing.assert_close(softmax(scores), wanted, rtol=1e-4, atol=0)


def test_all_unscaled_scores(x):
    wanted = """
        172.0800 126.5615 134.1449 126.5499
        126.5615 169.7253 129.8451 128.4887
        134.1449 129.8451 177.2513 130.5724
        126.5499 128.4887 130.5724 168.5083"""
    wanted = torch.tensor([[float(word) for word in line.split()] for line in wanted.splitlines()[1:]])
    torch.testing.assert_close(x @ x.T, wanted, rtol=0, atol=2e-4)


def test_scores_divided_by_the_square_root_of_the_width():
    """Chapter 1, scaling: -69.67 and 40.90 divided by sqrt(512)."""
    assert [round(score / 512**0.5, 2) for score in (-69.67, 40.90)] == [-3.08, 1.81]


@pytest.mark.parametrize("attention", [ops.attention, fused.attention])
def test_context_is_then_the_token_itself(x, attention):
    """Chapter 1, the context vector: with such weights the third token's own values."""
    q = k = v = x.view(1, 1, 4, 512)
    torch.testing.assert_close(attention(q, k, v, scale=1.0)[0, 0, 2], x[2], rtol=1e-5, atol=1e-6)


def test_positions_shift_by_a_rotation():
    """Chapter 1, positions: P[t + s] is P[t] with each pair of columns rotated by an angle that depends on s only."""
    width, shift = 16, 5
    table = ops.sinusoidal_positions(40, width, dtype=torch.float64)
    cos, sin = ops.rotary_table(torch.tensor(shift), width, dtype=torch.float64)
    sines, cosines = table[:-shift, ::2], table[:-shift, 1::2]
    torch.testing.assert_close(table[shift:, ::2], sines * cos + cosines * sin, rtol=0, atol=1e-12)
    torch.testing.assert_close(table[shift:, 1::2], cosines * cos - sines * sin, rtol=0, atol=1e-12)
