"""Document 004, a transformer by hand: positions for 5 tokens, 3 wide."""

import math

import torch

from python_ref import ops


def test_encoding_of_odd_width():
    """The 5 x 3 encoding: a sine and a cosine of t, and the sine of t / 10000^(2/3) without its cosine."""
    wanted = [[math.sin(t), math.cos(t), math.sin(t / 10_000 ** (2 / 3))] for t in range(5)]
    torch.testing.assert_close(ops.sinusoidal_positions(5, 3), torch.tensor(wanted), rtol=0, atol=1e-7)


def test_printed_encoding_and_sums():
    """The encoding to two decimals, and its sums with five random embeddings."""
    printed = [[0.0, 1.0, 0.0], [0.84, 0.54, 0.0], [0.91, -0.42, 0.0], [0.14, -0.99, 0.01], [-0.76, -0.65, 0.01]]
    embeddings = [[0.12, 0.94, 0.9], [0.14, 0.65, 0.22], [0.29, 0.58, 0.31], [0.69, 0.37, 0.62], [0.25, 0.61, 0.65]]
    sums = [[0.12, 1.94, 0.9], [0.98, 1.19, 0.22], [1.2, 0.16, 0.31], [0.83, -0.62, 0.63], [-0.51, -0.04, 0.66]]
    codes = (100 * ops.sinusoidal_positions(5, 3)).round() / 100
    torch.testing.assert_close(codes, torch.tensor(printed), rtol=0, atol=1e-6)
    torch.testing.assert_close(codes + torch.tensor(embeddings), torch.tensor(sums), rtol=0, atol=1e-6)
