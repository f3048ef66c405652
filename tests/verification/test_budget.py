"""The rounding bound of the budget, against the errors of sums in float32."""

import math

import pytest
import torch

from transformer_kernels.verification.budget import RandomRounding


def errors(x, weight):
    """Of x @ weight.T, in units of 2^-24 sqrt(sum of squared terms): of sums in tiles of 192, and random ones."""
    x, weight = x.double(), weight.double()
    exact, unit = x @ weight.T, (x.square() @ weight.T.square()).sqrt() * 2.0**-24
    tiles = []
    for start in range(0, x.shape[1], 192):
        tile = torch.zeros(exact.shape)
        for k in range(start, min(start + 192, x.shape[1])):
            tile = (tile.double() + x[:, k, None] * weight[:, k]).float()  # one rounding, as by fused multiply-add
        tiles.append(tile)
    with RandomRounding():
        rounded = x @ weight.T
    return (torch.stack(tiles).sum(0).double() - exact) / unit, (rounded - exact) / unit


@pytest.mark.parametrize("terms", ["random sign", "one sign"])
@pytest.mark.parametrize("length", [64, 192, 768])
def test_products_have_the_rounding_of_sequential_tiles(length, terms):
    """For terms of one sign, whose partial sums grow, as for those of random sign."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, length), torch.randn(64, length)
    if terms == "one sign":
        x, weight = x.abs(), weight.abs()
    sequential, rounded = errors(x, weight)
    ratio = float(rounded.square().mean().sqrt() / sequential.square().mean().sqrt())
    assert 1.0 < ratio < 2.0, ratio  # roundings below half an ulp of the partial sum are less than u times it


def test_the_largest_error_of_many_sums_is_in_the_tail():
    """Normal, not uniform: of 65,536 elements of one size, one of four standard deviations."""
    torch.manual_seed(0)
    _, rounded = errors(torch.randn(1, 256).repeat(256, 1), torch.randn(1, 256).repeat(256, 1))
    assert 3.5 < float(rounded.abs().max() / rounded.std()) < 5.5


@pytest.mark.parametrize("length", [1, 2])
def test_few_roundings_bound_the_error(length):
    """n of one sign: of a product of one term by sqrt(1 / 2), of two equal ones by sqrt(2) sqrt(5 / 3)."""
    torch.manual_seed(0)
    _, rounded = errors(1.0 + 0.01 * torch.randn(512, length), 1.0 + 0.01 * torch.randn(512, length))
    bound = math.sqrt(1.0 / 2.0) if length == 1 else math.sqrt(10.0 / 3.0)
    assert 0.5 < float(rounded.abs().max()) <= 1.01 * (bound + math.sqrt(length))  # and the rounding of the result
