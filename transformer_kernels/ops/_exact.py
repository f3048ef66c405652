"""Functions of float64 tensors by additions, products and roundings alone, which every processor computes to the same
bits; PyTorch's own are vectorised in ways that differ. Errors are a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LN2 = float.fromhex("0x1.62E42FEFA38p-1"), float.fromhex("0x1.EF35793C7673p-45")
"""In parts whose products with small integers are exact, or small."""
HALF_PI = tuple(map(float.fromhex, ("0x1.921FB544p0", "0x1.0B4611A6p-34", "0x1.3198A2E03707p-69")))

EXP = [1.0 / math.factorial(n) for n in range(14)]
LOG = [2.0 / (2 * n + 1) for n in range(12)]
SIN = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(9)]
COS = [(-1.0) ** n / math.factorial(2 * n) for n in range(10)]


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(x).add_(coefficient)
    return total


def _reduced(x: Tensor, count: Tensor, parts: Sequence[float]) -> Tensor:
    """x - count * the sum of the parts."""
    for part in parts:
        x = x - count * part
    return x


def exp(x: Tensor) -> Tensor:
    """e^x; below -708 it is 0."""
    within = x.clamp(-708.0, 709.0)
    count = (within * (1.0 / math.log(2.0))).round()
    power = (count.long() + 1023).bitwise_left_shift(52).view(torch.float64)
    y = _polynomial(_reduced(within, count, LN2), EXP) * power
    return torch.where(x < -708.0, 0.0, torch.where(x > 709.0, x.abs() * math.inf, y))


def log(x: Tensor) -> Tensor:
    """The natural logarithm; NaN below 0."""
    mantissa, exponent = torch.frexp(x)
    is_small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_small, mantissa * 2.0, mantissa)
    count = (exponent - is_small.int()).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    y = count * LN2[0] + (count * LN2[1] + s * _polynomial(s * s, LOG))
    return torch.where(x > 0.0, torch.where(x == math.inf, x, y), torch.where(x == 0.0, -math.inf, math.nan))


def _quarters(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sin and cos of x less a multiple of pi / 2, and which multiple of it, modulo 4; for |x| < 2^20."""
    count = (x * (2.0 / math.pi)).round()
    r = _reduced(x, count, HALF_PI)
    square = r * r
    return r * _polynomial(square, SIN), _polynomial(square, COS), count.long().remainder(4)


def sin(x: Tensor) -> Tensor:
    sine, cosine, quarter = _quarters(x)
    y = torch.where(quarter % 2 == 1, cosine, sine)
    return torch.where(quarter >= 2, -y, y)


def cos(x: Tensor) -> Tensor:
    sine, cosine, quarter = _quarters(x)
    y = torch.where(quarter % 2 == 1, sine, cosine)
    return torch.where((quarter == 1) | (quarter == 2), -y, y)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent for a positive base."""
    return exp(exponent * log(base))


def sqrt(x: Tensor) -> Tensor:
    """The square root, correctly rounded for x from 2^-900 to 2^900.

    PyTorch calls MKL's, which may be off by a unit in the last place and depends on the processor. It is corrected by
    the remainder x - y^2, which is exact (T. J. Dekker 1971).
    """
    y = x.sqrt()
    scaled = y * (2.0**27 + 1.0)
    high = scaled - (scaled - y)
    low = y - high
    remainder = ((x - high * high) - 2.0 * high * low) - low * low
    return torch.where((x > 2.0**-900) & (x < 2.0**900), y + remainder / (y + y), y)


def rounded(function: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """The function of float64 copies, in the dtype of the first tensor."""
    return function(*(value.double() for value in x)).to(x[0].dtype)


def uniform(shape: Sequence[int], bits: int, generator: torch.Generator | None = None) -> Tensor:
    """Multiples of 2^-bits in [0, 1), in float64."""
    return torch.empty(shape, dtype=torch.int64).random_(0, 1 << bits, generator=generator).double() * 2.0**-bits


def normal(shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers in float64 (Box and Muller 1958)."""
    radius = sqrt(log(1.0 - uniform(shape, 53, generator)) * -2.0)
    return radius * cos(uniform(shape, 53, generator) * (2.0 * math.pi))


def total(x: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    """The sum over these dimensions, or all, one element after the other (a cumulative sum; float32 in float64)."""
    axes = sorted(dim % x.dim() for dim in dims) or list(range(x.dim()))
    kept = [dim for dim in range(x.dim()) if dim not in axes]
    sizes = [x.shape[dim] for dim in kept]
    count = math.prod(x.shape[dim] for dim in axes)
    rows = x.permute(*kept, *axes).reshape(*sizes, count)
    y = rows.cumsum(-1)[..., -1].clone() if count else rows.new_zeros(sizes)
    return y.reshape([1 if dim in axes else size for dim, size in enumerate(x.shape)]) if keepdim else y
