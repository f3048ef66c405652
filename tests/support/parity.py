"""The error budget: a backend against python_ref in float64, next to eager PyTorch in the tested dtype.

An output passes when its largest error is at most twice that of eager PyTorch (three times for gradients) plus the
rounding of one element, and its relative RMS error is below the limit of its dtype.

In float32 the error of eager PyTorch is the larger of its error on this host and the rounding bound of the operation:
the summation order of its libraries depends on the host's instruction set, and an error that happens to be a tenth of
the rounding would be too strict a budget. The bound depends on the operation and its arguments only. python_ref runs in
float64, forward and backward, and the result of each step is perturbed by a random amount within the rounding error of
that step and rounded to float32 (random rounding: D. S. Parker, "Monte Carlo arithmetic", 1997). With u = 2^-24, the
error of

- a sum, product, quotient or square root is half an ulp, and so is that of tanh and erf, which are exact at saturation;
  a result that float32 represents exactly has none;
- exp, log and 1 / sqrt is one ulp; that of the logistic function, and of derivatives from stored results, which are
  three steps, is sqrt(3) / 2 ulp;
- a sum of n terms is that of pairwise or blocked summation: each term passes through log2(n) additions with errors of
  random sign, sqrt(1 + log2(n)) u sqrt(result^2 + sum of squared terms);
- a dot product of length n is that of sequential summation in tiles of 64, and pairwise summation of tiles. After k of
  n terms of random sign the partial sum is sqrt(k / n) times the root of the sum of squared terms, and the mean of its
  square is one half: sqrt(min(n, 64) / 2 + log2(n / 64)) u times that root.

Copies, selections and maxima are exact. The random numbers are the same each time.
"""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from python_ref import ops as reference
from transformer_kernels.backends import dispatch
from transformer_kernels.verification import RELATIVE_RMS

PYTORCH_UNIT = {torch.float32: 2.0**-17}
"""The torch backend's unit of rounding in float32: PyTorch's fused attention has exponentials of 20 bits, its LayerNorm
rounds x * rstd and mean * rstd separately. The RMS limit applies to it unchanged."""
OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


def require(op, backend, device, dtype):
    """Skip, with the reason, a backend that cannot run this operation here."""
    if (reason := dispatch.unavailable(backend, device)) is not None:
        pytest.skip(f"{backend}: {reason}")
    if dispatch.kernels_of(dispatch.OPERATIONS[op], backend) is None:
        pytest.skip(f"{backend} has no {op} kernel")
    if backend == "triton" and op == "attention" and device.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 products wrongly; they are tested on a GPU")


def tested_operation(request):
    """The tested operation: the parameter `op`, or the OP of the test's module."""
    return request.node.callspec.params.get("op") or request.module.OP


def backend_fixture(*backends, op=""):
    """A fixture `backend`: each of `backends` that runs here and supports the tested operation (or `op`)."""

    @pytest.fixture(params=backends)
    def backend(request, device):
        require(op or tested_operation(request), request.param, device, torch.float32)
        return request.param

    return backend


@dataclass
class Run:
    """The results of one call: outputs, and the gradient of each tensor input (None if not required)."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def run(function, tensors, options, cotangents=None, dtype=None, seed=0):
    """Call `function(**tensors, **options)` on leaf copies (in `dtype`), and run backward from `cotangents`, if any."""
    leaves = {name: _leaf(value, dtype) for name, value in tensors.items()}
    torch.manual_seed(seed)
    result = function(**leaves, **options)
    outputs = list(result) if isinstance(result, tuple) else [result]
    if cotangents is not None:
        pairs = [
            (output, cotangent.to(output.dtype))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if output.requires_grad and cotangent is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [cotangent for _, cotangent in pairs])
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    return Run([output.detach() for output in outputs], gradients)


@contextmanager
def unwritten_is_nan(backend):
    """In the backend torch on a CPU, new tensors hold NaN: a part of a result that is not written is seen."""
    if backend != "torch" or torch.cuda.is_available():
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _leaf(value, dtype):
    """The tensor as a leaf, with the same strides and storage offset unless a dtype is given."""
    if value is None or not value.is_floating_point():
        return value
    if dtype is not None:
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    return value.detach().requires_grad_(value.requires_grad)


ROUNDINGS = {  # of one element, in half ulp
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "sqrt", "pow", "erf", "tanh"), 1.0),
    **dict.fromkeys(("exp", "log", "rsqrt"), 2.0),
    **dict.fromkeys(("sigmoid", "sigmoid_backward", "tanh_backward"), math.sqrt(3.0)),
}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
TILE = 64


class RandomRounding(TorchDispatchMode):
    """Adds float32 rounding errors of random sign to operations in float64; see the module.

    Factors and results of matrix products are rounded to `dtype`, the dtype of a call.
    """

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        self.dtype, self.seed = dtype, seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype is not torch.float64:
            return result
        if (size := self._size(func.overloadpacket.__name__, result, args, kwargs or {})) is None:
            return result
        generator = self.generators.setdefault(result.device, torch.Generator(result.device).manual_seed(self.seed))
        noise = torch.rand(result.shape, generator=generator, dtype=result.dtype, device=result.device) * 2.0 - 1.0
        error = (noise * size).nan_to_num(0.0, 0.0, 0.0)
        represented = result.float().double() == result
        return result.copy_(torch.where(represented, result, (result + error).float().double()))

    def _size(self, name, result, args, kwargs):
        """The bound on the rounding error of each element of this step's result; None if exact."""
        u = 2.0**-24
        if (halves := ROUNDINGS.get(name.rstrip("_"))) is not None:
            return torch.ldexp(torch.full_like(result, halves * u / 2.0), torch.frexp(result).exponent)
        if name in PRODUCTS and (length := args[-1].shape[-2]) > 0:
            squares = torch.matmul(args[-2].square(), args[-1].square())
            added = squares.sqrt() * u * math.sqrt(min(length, TILE) / 2 + max(0.0, math.log2(length / TILE)))
            if self.dtype is torch.float32:
                return added
            return added + torch.finfo(self.dtype).eps / 2.0 * (2.0 * squares.sqrt() + result.abs())
        if name in ("sum", "mean") and args[0].numel() > result.numel() > 0:
            squares = torch.ops.aten.sum(args[0].square(), *args[1:], **kwargs)
            length = args[0].numel() / result.numel()
            squares = squares / length**2 if name == "mean" else squares
            return (squares + result.square()).sqrt() * u * math.sqrt(1.0 + math.log2(length))
        return None


def assert_within_budget(name, ours, exact, eager, factor, dtype, magnitude=None, unit=None, excess=None, rounded=None):
    """Check one tensor against the exact one, with a budget from the eager one; returns the fraction that is used.

    The floor is one unit of rounding at `magnitude`, the largest element unless given: a gradient may be the difference
    of far larger terms (that of q for a single key is 0), and then the limits are the rounding of its terms and the RMS
    error of eager. With `excess` the largest error must be between the budget and that multiple, or between two
    multiples. `rounded` returns the result with random rounding, whose error is used where eager's is too small.
    """
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)} instead of {tuple(exact.shape)}"
    unusual = ~torch.isfinite(exact)
    torch.testing.assert_close(ours.double()[unusual], exact[unusual], equal_nan=True, msg=lambda m: f"{name}: {m}")
    exact, got, eager = (tensor.double().masked_fill(unusual, 0.0) for tensor in (exact, ours, eager))
    assert torch.isfinite(got).all(), f"{name}: not finite where the exact result is"
    if exact.numel() == 0:
        return 0.0
    unit = torch.finfo(dtype).eps if unit is None else unit
    floor = unit * (exact.abs().max().item() if magnitude is None else magnitude) + 1e-30
    error = (got - exact).abs().max().item()
    eager_error = (eager - exact).abs().max().item()
    if rounded is not None and excess is None and error > factor * eager_error + floor:
        bound = (rounded().double().masked_fill(unusual, 0.0) - exact).abs().max().item()
        eager_error = max(eager_error, bound)
    budget = factor * eager_error + floor if math.isfinite(eager_error) else math.inf  # then only the RMS limit applies
    range_of_budgets = (0.0, 1.0) if excess is None else excess if isinstance(excess, tuple) else (1.0, excess)
    least, most = (share * budget if share else 0.0 for share in range_of_budgets)  # the budget may be infinite
    assert error <= most, f"{name}: largest error {error:.3e} exceeds its budget {most:.3e} (eager {eager_error:.3e})"
    assert error >= least, f"{name}: largest error {error:.3e} no longer exceeds its budget {least:.3e}"
    rms, eager_rms = (_rms(result - exact) for result in (got, eager))
    limit = max(RELATIVE_RMS[dtype] * _rms(exact), eager_rms if math.isfinite(eager_rms) else 0.0) + floor
    assert rms <= limit, f"{name}: RMS error {rms:.3e} exceeds {limit:.3e}"
    return max(error / budget, rms / limit)


def dropout_boundary(seed, device):
    """The largest p whose dropout keeps the first element, and the smallest that drops it: adjacent thresholds."""
    torch.manual_seed(seed)
    zeros = (torch.zeros(1, dtype=torch.int64, device=device),) * 4
    bits = int(reference.philox4x32(reference.draw_seed(device), zeros)[0]) & 0xFFFF
    return bits / 2**16, (bits + 1) / 2**16


def _rms(x):
    return x.square().mean().sqrt().item()


@torch.no_grad()
def _poison_hidden_keys(k=None, v=None, key_padding_mask=None, **_):
    """Overwrite keys and values behind the padding mask with NaN, in the last sequence of the batch."""
    if k is not None and key_padding_mask is not None:
        for heads in (k, v):
            if heads is not None:
                heads[-1].masked_fill_(~key_padding_mask[-1][:, None], math.nan)


def check_parity(op, backend, tensors, options=None, *, seed=0, transform=None, excess=None):
    """Forward and every gradient of `op` in `backend` against python_ref in float64, within the budget.

    Returns the largest fraction of a budget that was used.

    Args:
        op: the operation. backend: the backend that runs it.
        tensors: the tensor arguments, in the tested dtype; the exact run sees their rounded values.
        options: the other arguments.
        seed: of torch's generator before each call, for dropout.
        transform: applied to each cotangent (an expanded or strided view of the same values).
        excess: tensors whose gradient is known to exceed its budget, with the multiple that it does not exceed; a pair
            if it exceeds the budget on some hosts only, since eager's error depends on the host's library.
    """
    options = options or {}
    if backend != "torch":  # whose fused kernels would leave such a call to the chunks
        _poison_hidden_keys(**tensors)
    definition = getattr(reference, op)
    wanted = run(definition, tensors, options, dtype=torch.float64, seed=seed).outputs
    first = next(value for value in tensors.values() if value is not None and value.is_floating_point())
    generator = torch.Generator().manual_seed(1234)
    cotangents = []
    for output in wanted:
        values = torch.randn(output.shape, generator=generator).to(first.dtype).to(first.device)
        cotangents.append(values if transform is None else transform(values))
    exact = run(definition, tensors, options, cotangents, dtype=torch.float64, seed=seed)
    eager = run(definition, tensors, options, cotangents, seed=seed)

    @functools.cache
    def rounded():
        with RandomRounding():
            return run(definition, tensors, options, cotangents, dtype=torch.float64, seed=seed)

    float32 = first.dtype is torch.float32
    eps = torch.finfo(first.dtype).eps
    unit = PYTORCH_UNIT.get(first.dtype, eps) if backend == "torch" else eps
    with unwritten_is_nan(backend):
        ours = run(getattr(tk, op), tensors, {**options, "backend": backend}, cotangents, seed=seed)
    shares = [
        assert_within_budget(
            f"{op} output {i}",
            got,
            want,
            plain,
            OUTPUT_FACTOR,
            first.dtype,
            unit=unit,
            rounded=(lambda i=i: rounded().outputs[i]) if float32 else None,
        )
        for i, (got, want, plain) in enumerate(zip(ours.outputs, exact.outputs, eager.outputs, strict=True))
    ]
    assert ours.gradients.keys() == exact.gradients.keys()
    sizes = [gradient.abs().max().item() for gradient in exact.gradients.values() if gradient is not None]
    magnitude = max(sizes, default=None)
    for name, want in exact.gradients.items():
        got, plain = ours.gradients[name], eager.gradients[name]
        assert got is not None and want is not None and plain is not None, f"{op}: no gradient for {name}"
        assert got.dtype == tensors[name].dtype, f"{op}: the gradient of {name} has dtype {got.dtype}"
        shares.append(
            assert_within_budget(
                f"{op} gradient of {name}",
                got,
                want,
                plain,
                GRADIENT_FACTOR,
                first.dtype,
                magnitude,
                unit,
                (excess or {}).get(name),
                (lambda name=name: rounded().gradients[name]) if float32 else None,
            )
        )
    return max(shares)
