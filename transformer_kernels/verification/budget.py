"""The error budget: a result against float64, next to PyTorch in the same dtype; the tests' and the certificate's.

An output passes when its largest error is at most twice that of eager PyTorch (three times for gradients) plus the
rounding of one element, and its relative RMS error is below the limit of its dtype.

In float32 the error of eager PyTorch is the larger of its error on this host and the rounding bound of the operation:
the summation order of its libraries depends on the host's instruction set, and an error that happens to be a tenth of
the rounding would be too strict a budget. The bound depends on the operation and its arguments only. python_ref runs in
float64, forward and backward, and the result of each step is perturbed by a random amount within the rounding error of
that step and rounded to float32 (random rounding: D. S. Parker, "Monte Carlo arithmetic", 1997). With u = 2^-24, the
error of

- a sum, product, quotient, square root, tanh or erf is half an ulp; saturated tanh and erf, and results that float32
  represents exactly, have none;
- exp, log and 1 / sqrt is one ulp; the logistic function and derivatives from stored results, three steps each, have
  sqrt(3) / 2 ulp;
- a sum of n terms assumes pairwise or blocked summation: each term passes through log2(n) additions with errors of
  random sign, sqrt(1 + log2(n)) u sqrt(result^2 + sum of squared terms);
- softmax (relative) and log_softmax (absolute) is the relative error of the sum of n exponentials;
- a dot product of length n is at least uniform within sqrt(min(n, 64) / 2 + log2(n / 64)) u sqrt(Q), with Q the sum of
  squared terms: sequential summation in tiles of 64 terms of random sign and pairwise summation of tiles;
- beyond that it is normal, as a sum of many roundings, whose largest of many elements is in the tail. The order is the
  one of MKL: tiles of t = min(n, 384), the longest measured, each summed in sequence and added in sequence, n / t of
  them. Given the result r, m of its n terms in random order have a sum with the mean square (m / n)^2 r^2 +
  m / n (1 - m / n) Q. Over all additions that is S = t / 2 Q + t^2 / (3 n) (r^2 - Q) within the tiles and, of several,
  n / (2 t) Q + n / (3 t) (r^2 - Q) of tiles; r^2 is about Q for terms of random sign, up to n Q for terms of one sign.
  A rounding of s is uniform within half an ulp, u |s| / mantissa, and mantissas in [1, 2) have the density
  1 / (ln(2) mantissa), so its variance is u^2 s^2 / 3 times 3 / (8 ln 2): the standard deviation is
  u sqrt(S / (8 ln 2)). n roundings of one sign are at most sqrt(3 n) standard deviations. RMS errors of MKL (AVX-512,
  float32, 512 x 512 results) are 0.82 to 1.05 of it for n of 16 to 65,536 and terms of random sign, and 0.51 (n = 400,
  two equal tiles) to 1.07 for terms of one sign. A product of a single row has longer tiles, and up to 2.3 of it.

Copies, selections and maxima are exact. The random numbers are the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RELATIVE_RMS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""The limit of the RMS of an error divided by the RMS of the exact result."""
OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
"""The limit of the largest error divided by the largest error of eager PyTorch."""

ROUNDINGS = {  # of one element, in half ulp
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "sqrt", "pow", "erf", "tanh"), 1.0),
    **dict.fromkeys(("exp", "log", "rsqrt"), 2.0),
    **dict.fromkeys(("sigmoid", "sigmoid_backward", "tanh_backward"), math.sqrt(3.0)),
}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
TILE, SEQUENTIAL = 64, 384
"""Terms of a dot product that are summed in sequence: of the least error, and by PyTorch's libraries (see above)."""


class RandomRounding(TorchDispatchMode):
    """Adds float32 rounding errors of random sign to operations in float64; see the module.

    Factors and results of matrix products are rounded to `dtype`, the dtype of a call.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.dtype, self.seed = dtype, seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype is not torch.float64:
            return result
        name = func.overloadpacket.__name__
        multiplies = name in PRODUCTS and args[-1].shape[-2] > 0
        size = None if multiplies else self._size(name, result, args, kwargs or {})
        if size is None and not multiplies:
            return result
        generator = self.generators.setdefault(result.device, torch.Generator(result.device).manual_seed(self.seed))
        noise = torch.rand(result.shape, generator=generator, dtype=result.dtype, device=result.device) * 2.0 - 1.0
        error = self._product_error(noise, name, result, args) if size is None else _finite(noise * size)
        represented = result.float().double() == result
        return result.copy_(torch.where(represented, result, (result + error).float().double()))

    def _size(self, name: str, result: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """The bound on the rounding error of each element of this step's result; None if exact."""
        u = 2.0**-24
        if (halves := ROUNDINGS.get(name.rstrip("_"))) is not None:
            return torch.ldexp(torch.full_like(result, halves * u / 2.0), torch.frexp(result).exponent)
        if name in ("_softmax", "_log_softmax"):
            size = u * math.sqrt(1.0 + math.log2(max(1, result.shape[args[1]])))
            return result * size if name == "_softmax" else torch.full_like(result, size)
        if name in ("sum", "mean") and args[0].numel() > result.numel() > 0:
            squares = torch.ops.aten.sum(args[0].square(), *args[1:], **kwargs)
            length = args[0].numel() / result.numel()
            squares = squares / length**2 if name == "mean" else squares
            return (squares + result.square()).sqrt() * u * math.sqrt(1.0 + math.log2(length))
        return None

    def _product_error(self, noise: Tensor, name: str, result: Tensor, args: Any) -> Tensor:
        """The uniform error of each dot product, or the normal one of the same probability if that is larger."""
        u, length = 2.0**-24, args[-1].shape[-2]
        squares = torch.matmul(args[-2].square(), args[-1].square())
        size = squares.sqrt() * u * math.sqrt(min(length, TILE) / 2 + max(0.0, math.log2(length / TILE)))
        if self.dtype is not torch.float32:
            size = size + torch.finfo(self.dtype).eps / 2.0 * (2.0 * squares.sqrt() + result.abs())
        product = result if name in ("mm", "bmm") else torch.matmul(args[-2], args[-1])
        tile = min(length, SEQUENTIAL)
        tiles = length / tile if length > tile else 0.0
        excess = product.square() - squares
        summed = (tile + tiles) / 2 * squares + (tile**2 / length + tiles) / 3 * excess
        deviations = (math.sqrt(2.0) * torch.erfinv(noise)).clamp(-math.sqrt(3 * length), math.sqrt(3 * length))
        normal = _finite(deviations * (summed.clamp_(min=0.0) / (8.0 * math.log(2.0))).sqrt() * u)
        uniform = _finite(noise * size)
        return torch.where(normal.abs() > uniform.abs(), normal, uniform)


def _finite(error: Tensor) -> Tensor:
    return error.nan_to_num(0.0, 0.0, 0.0)


class Errors(NamedTuple):
    """The largest error and its limit, the RMS error and its limit, and the largest error of eager PyTorch."""

    error: float
    budget: float
    rms: float
    limit: float
    eager: float

    @property
    def share(self) -> float:
        """The share of the budget that is used; above 1.0 the result is wrong, and NaN where it is not finite."""
        return max(self.error / self.budget, self.rms / self.limit)


def measure(
    got: Tensor,
    exact: Tensor,
    eager: Tensor,
    factor: float,
    dtype: torch.dtype,
    magnitude: float | None = None,
    unit: float | None = None,
    rounded: Callable[[], Tensor] | None = None,
) -> Errors:
    """The errors of a result, and their budget from the errors of eager PyTorch.

    The floor is one unit of rounding at `magnitude`, the largest element unless given: a gradient may be the difference
    of far larger terms (dq for a single key is 0), and then the limits are the rounding of its terms and the RMS error
    of eager. Elements that are not finite in the exact result count as 0 in all.

    Args:
        got, exact, eager: of one shape, any dtype; `exact` in float64.
        factor: OUTPUT_FACTOR or GRADIENT_FACTOR.
        dtype: of the call.
        magnitude: size of the terms.
        unit: the unit of rounding, by default of `dtype`.
        rounded: returns the result with random rounding, whose error is used where eager's is too small.
    """
    if exact.numel() == 0:
        return Errors(0.0, 1.0, 0.0, 1.0, 0.0)
    unusual = ~torch.isfinite(exact)
    exact, got, eager = (tensor.double().masked_fill(unusual, 0.0) for tensor in (exact, got, eager))
    unit = torch.finfo(dtype).eps if unit is None else unit
    floor = unit * (exact.abs().max().item() if magnitude is None else magnitude) + 1e-30
    error = (got - exact).abs().max().item()
    eager_error = (eager - exact).abs().max().item()
    if rounded is not None and not error <= factor * eager_error + floor:
        bound = (rounded().double().masked_fill(unusual, 0.0) - exact).abs().max().item()
        eager_error = max(eager_error, bound)
    budget = factor * eager_error + floor if math.isfinite(eager_error) else math.inf  # then only the RMS limit applies
    rms, eager_rms = (rms_of(result - exact) for result in (got, eager))
    limit = max(RELATIVE_RMS[dtype] * rms_of(exact), eager_rms if math.isfinite(eager_rms) else 0.0) + floor
    return Errors(error, budget, rms, limit, eager_error)


def rms_of(x: Tensor) -> float:
    """The root mean square of the elements."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0
