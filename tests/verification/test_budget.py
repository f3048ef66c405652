"""The rounding bound of matrix products, against sums in float32, PyTorch's products and a uniform error."""

import math

import pytest
import torch

from transformer_kernels.verification.budget import SEQUENTIAL, TILE, RandomRounding

SIGNS = ["random sign", "one sign"]


def factors(rows, length, columns, signs):
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, length), (length, columns)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(x.abs() if signs == "one sign" else x).float().double() for x in made]


def rounded(x, weight):
    """The error of x @ weight by the bound, and in units of it: 2^-24 sqrt(sum of squared terms)."""
    with RandomRounding():
        found = x @ weight
    return found - x @ weight, (x.square() @ weight.square()).sqrt() * 2.0**-24


def rms(x):
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("length", [16, 64, 384, 768, 1536])
def test_products_have_the_rounding_of_sums_in_sequence(length, signs):
    """Of tiles, and of them: each addition of a fused multiply-add is rounded once."""
    x, weight = factors(64, length, 64, signs)
    total = torch.zeros(64, 64)
    for start in range(0, length, SEQUENTIAL):
        tile = torch.zeros(64, 64)
        for k in range(start, min(start + SEQUENTIAL, length)):
            tile = (tile.double() + x[:, k, None] * weight[k]).float()
        total += tile
    error, unit = rounded(x, weight)
    ratio = rms(error / unit) / rms((total.double() - x @ weight) / unit)
    assert 0.9 < ratio < (1.15 if length > TILE else 1.5), ratio  # of few terms the uniform error is larger


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("length", [64, 256, 768, 4096])
def test_products_of_pytorch_are_within_the_bound(length, signs, device):
    """RMS errors of every library that was measured: not a budget, which is twice the largest."""
    if device.type != "cpu":
        pytest.skip("tiles of CPU libraries")
    x, weight = factors(64, length, 64, signs)
    error, unit = rounded(x, weight)
    eager = (x.float() @ weight.float()).double() - x @ weight
    assert rms(eager / unit) < 1.25 * rms(error / unit)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (64, 64)], ids=str)
def test_no_error_is_less_than_the_uniform_one(shape, signs):
    """Whatever the shape: each element is drawn once, from the distribution with the larger error."""
    for length in (1, 2, 3, 8, 64, 65, 100, 192, 384, 385, 1000, 3000):
        x, weight = factors(shape[0], length, shape[1], signs)
        error, unit = rounded(x, weight)
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2.0 - 1.0
        size = unit * math.sqrt(min(length, TILE) / 2 + max(0.0, math.log2(length / TILE)))
        exact = x @ weight
        uniform = (exact + noise * size).float().double() - exact
        represented = exact.float().double() == exact
        assert torch.all((error.abs() >= uniform.abs()) | represented), length


def test_the_largest_error_of_many_products_is_in_the_tail():
    """Of 65,536 elements of one distribution, one of four standard deviations."""
    x, weight = factors(1, 512, 1, "random sign")
    error, _ = rounded(x.expand(256, 512), weight.expand(512, 256))
    assert 3.5 < float(error.abs().max()) / rms(error) < 6.0


@pytest.mark.parametrize("length", [1, 2])
def test_few_roundings_are_bounded(length):
    """By n of one sign, each at most u times the sum of the terms' magnitudes, and the rounding of the result."""
    x, weight = factors(256, length, 256, "one sign")
    error, _ = rounded(x, weight)
    assert float((error.abs() / (x.abs() @ weight.abs())).max()) <= (length + 1) * 2.0**-24
