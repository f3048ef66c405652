"""Documents 001 to 004: the rows of docs/corrections.md that are numbers or shapes, and properties that are not."""

import math

import pytest
import torch

from python_ref import ops
from tests.seeds.page import corrections
from tests.seeds.test_000_corrections import chain
from transformer_kernels import nn as kernels
from transformer_kernels import ops as fused

ROWS = {
    "001": ["valid lengths"],
    "002": ["shape of query @ key.T", "scale", "wavelength of a pair of columns"],
    "003": ["largest weights of a map"],
    "004": ["constant of the denominator", "scale", "sum of the dot product", "parameters of several heads"],
}


@pytest.mark.parametrize("document", ROWS)
def test_rows_of_the_page(document):
    assert list(corrections(document)) == ROWS[document]
    assert all(printed != correct for printed, correct in corrections(document).values())


def test_a_score_of_zero_is_not_padding():
    """001: counting the scores that are not 0 hides the last of three real keys."""
    scores = torch.tensor([[2.0, 0.0, 1.0]])
    counted = torch.arange(3) < torch.count_nonzero(scores, dim=-1).unsqueeze(1)
    assert fused.softmax(scores, mask=counted)[0, 2] == 0.0
    assert fused.softmax(scores)[0, 2] > 0.2


def test_shape_of_the_scores():
    """002: one score for each pair of tokens, whatever the width."""
    q, k = torch.randn(2, 1, 1, 7, 512).unbind()
    assert fused.attention_weights(q, k).shape[-2:] == (7, 7)


def test_the_scale_is_of_the_width_of_a_key():
    """002 and 004: 8 heads of 16 columns divide by sqrt(16), not by the square root of the model's width of 128."""
    q, k = torch.randn(2, 1, 8, 5, 16, dtype=torch.float64).unbind()
    wanted = (q @ k.mT / math.sqrt(16)).softmax(-1)
    for attention_weights in (ops.attention_weights, fused.attention_weights):
        torch.testing.assert_close(attention_weights(q, k), wanted)


def test_wavelength():
    """002: the columns of pair i repeat after 2 pi 10000^(2i/d) positions; 10000^(2i/d) is the ratio to pair 0."""
    width = 16
    for pair in range(width // 2):
        wavelength = 2 * math.pi * 10_000 ** (2 * pair / width)
        cos, sin = ops.rotary_table(torch.tensor([1.0 + wavelength, 1.0]), width, dtype=torch.float64)
        torch.testing.assert_close(cos[0, pair], cos[1, pair], rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[0, pair], sin[1, pair], rtol=0, atol=1e-6)
    assert f"{2 * math.pi:.2f}" in corrections("002")["wavelength of a pair of columns"][1]


def test_attention_is_not_largest_on_the_diagonal():
    """003: in the chain of 000 each token attends most to the last."""
    assert chain()["weights"].argmax(1).tolist() == [4] * 5


def test_constant_of_the_denominator():
    column = ops.sinusoidal_positions(5, 3, dtype=torch.float64)[1, 2].item()
    assert f"{column:.4f}" in corrections("004")["constant of the denominator"][1]
    assert math.sin(1 / 1e-4 ** (2 / 3)) != pytest.approx(column, abs=0.1)


def test_heads_share_the_projections():
    """004: Q, K and V have as many parameters for 1 head as for 4; the output projection is one more matrix."""
    one, four = (kernels.MultiHeadAttention(32, heads) for heads in (1, 4))
    sizes = [sorted(parameter.numel() for parameter in module.parameters()) for module in (one, four)]
    assert sizes[0] == sizes[1] and sum(sizes[0]) == 4 * 32 * 32 + 4 * 32
