"""The error budget: a backend against python_ref in float64, next to eager PyTorch in the tested dtype.

The budget is `transformer_kernels/verification/budget.py`, which derives its rounding bound.
"""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from python_ref import ops as reference
from transformer_kernels.backends import dispatch
from transformer_kernels.verification.budget import GRADIENT_FACTOR, OUTPUT_FACTOR, RandomRounding, measure

PYTORCH_UNIT = {torch.float32: 2.0**-17}
"""The torch backend's unit of rounding in float32: PyTorch's fused attention has exponentials of 20 bits, its LayerNorm
rounds x * rstd and mean * rstd separately. The RMS limit applies to it unchanged."""


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


def assert_within_budget(name, ours, exact, eager, factor, dtype, magnitude=None, unit=None, excess=None, rounded=None):
    """Check one tensor against the exact one, with a budget from the eager one; returns the fraction that is used.

    With `excess` the largest error must be between the budget and that multiple, or between two multiples; the other
    arguments are those of `budget.measure`.
    """
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)} instead of {tuple(exact.shape)}"
    unusual = ~torch.isfinite(exact)
    torch.testing.assert_close(ours.double()[unusual], exact[unusual], equal_nan=True, msg=lambda m: f"{name}: {m}")
    assert torch.isfinite(ours.masked_fill(unusual, 0.0)).all(), f"{name}: not finite where the exact result is"
    if exact.numel() == 0:
        return 0.0
    rounded = rounded if excess is None else None
    error, budget, rms, limit, eager_error = measure(ours, exact, eager, factor, dtype, magnitude, unit, rounded)
    range_of_budgets = (0.0, 1.0) if excess is None else excess if isinstance(excess, tuple) else (1.0, excess)
    least, most = (share * budget if share else 0.0 for share in range_of_budgets)  # the budget may be infinite
    assert error <= most, f"{name}: largest error {error:.3e} exceeds its budget {most:.3e} (eager {eager_error:.3e})"
    assert error >= least, f"{name}: largest error {error:.3e} no longer exceeds its budget {least:.3e}"
    assert rms <= limit, f"{name}: RMS error {rms:.3e} exceeds {limit:.3e}"
    return max(error / budget, rms / limit)


def dropout_boundary(seed, device):
    """The largest p whose dropout keeps the first element, and the smallest that drops it: adjacent thresholds."""
    torch.manual_seed(seed)
    zeros = (torch.zeros(1, dtype=torch.int64, device=device),) * 4
    bits = int(reference.philox4x32(reference.draw_seed(device), zeros)[0]) & 0xFFFF
    return bits / 2**16, (bits + 1) / 2**16


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
