"""Document 004, a transformer by hand: positions for 5 tokens, 3 wide."""

import math

import torch

from python_ref import ops


def test_encoding_of_odd_width():
    """The 5 x 3 encoding: a sine and a cosine of t, and the sine of t / 10000^(2/3) without its cosine."""
    wanted = [[math.sin(t), math.cos(t), math.sin(t / 10_000 ** (2 / 3))] for t in range(5)]
    torch.testing.assert_close(ops.sinusoidal_positions(5, 3), torch.tensor(wanted), rtol=0, atol=1e-7)
