"""Correctness before timing: each candidate is compared with python_ref in float64 before it is timed.

Attention is compared on the first and the last group of heads and, if a score matrix is too large, on the last queries.
The cotangents of all other queries are zero, so that dk and dv are still complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import Workload
from python_ref import ops as reference
from transformer_kernels.verification.budget import RELATIVE_RMS

GRADIENT_FACTOR = 2.0
MAX_FACTOR = 16.0
"""Limit of the largest element error, in units of the RMS limit and of the largest element."""
MAX_SCORES = 2**26
"""Largest score matrix of the reference, in elements."""
SEED = 20_000


class WrongResult(Exception):
    """A candidate's result is wrong; it is not timed."""


class Part:
    """One key head with its query heads in one sequence, restricted to the last `queries` queries; or everything."""

    def __init__(self, workload: Workload, last: bool = False) -> None:
        self.whole = workload.op != "attention"
        if self.whole:
            return
        size = workload.shape
        batch, key_head, group = size["B"] - 1 if last else 0, size["Hk"] - 1 if last else 0, size["H"] // size["Hk"]
        self.sequence = slice(batch, batch + 1)
        self.key_heads = slice(key_head, key_head + 1)
        self.heads = slice(key_head * group, (key_head + 1) * group)
        self.queries = slice(size["Lq"] - compared_queries(workload), None)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The slice of an argument that belongs to this part; outputs are sliced like q."""
        if self.whole:
            return tensor
        if name == "key_padding_mask":
            return tensor[self.sequence]
        if name in ("k", "v"):
            return tensor[self.sequence, self.key_heads]
        return tensor[self.sequence, self.heads, self.queries]


def compared_queries(workload: Workload) -> int:
    """Number of last queries for which the reference can be computed."""
    size = workload.shape
    return max(1, min(size["Lq"], MAX_SCORES // (size["L"] * (size["H"] // size["Hk"]))))


def check(workload: Workload, function: Callable[..., Any], device: torch.device) -> float:
    """Compare outputs and, for a backward workload, gradients; return the largest relative RMS error.

    Raises:
        WrongResult: an error beyond the limit of the dtype, or a non-finite value.
    """
    tensors = workload.inputs(device, SEED)
    backward = workload.direction != "forward"
    _poison_free_memory(workload, device)
    outputs, gradients, cotangents = evaluate(function, tensors, None, backward, workload)
    operation = getattr(reference, workload.op)
    worst = 0.0
    for part in [Part(workload)] if workload.op != "attention" else [Part(workload), Part(workload, last=True)]:
        exact_outputs, exact_gradients, _ = evaluate(
            lambda **given: operation(**given, **workload.options),
            {name: _double(part.of(name, tensor)) for name, tensor in tensors.items()},
            [part.of("q", cotangent).double() for cotangent in cotangents],
            backward,
            workload,
        )
        for i, exact in enumerate(exact_outputs):
            worst = max(worst, compare(f"output {i}", part.of("q", outputs[i]), exact, workload.dtype))
        for name, exact in exact_gradients.items():
            got = part.of(name, gradients[name])
            worst = max(worst, compare(f"gradient of {name}", got, exact, workload.dtype, GRADIENT_FACTOR))
    return worst


def evaluate(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    cotangents: Sequence[Tensor] | None,
    backward: bool,
    workload: Workload,
) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Outputs, the gradient of each floating input, and the cotangents (random unless given)."""
    leaves = {name: _leaf(tensor, backward) for name, tensor in tensors.items()}
    outputs = as_list(function(**leaves))
    if cotangents is None:
        cotangents = draw_cotangents(outputs, workload)
    named = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(outputs, list(named.values()), list(cotangents)) if backward else ()
    return [output.detach() for output in outputs], dict(zip(named, gradients, strict=False)), list(cotangents)


def as_list(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def draw_cotangents(outputs: Sequence[Tensor], workload: Workload) -> list[Tensor]:
    """Standard normal gradients of the outputs; for attention, zero except for the compared queries."""
    generator = torch.Generator(outputs[0].device).manual_seed(SEED + 1)
    drawn = []
    for output in outputs:
        cotangent = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        if workload.op == "attention":
            cotangent[:, :, : workload.shape["Lq"] - compared_queries(workload)] = 0.0
        drawn.append(cotangent)
    return drawn


def compare(name: str, got: Tensor, exact: Tensor, dtype: torch.dtype, factor: float = 1.0) -> float:
    """The relative RMS error of `got`; raises WrongResult beyond the limit of the dtype."""
    if got.shape != exact.shape:
        raise WrongResult(f"{name} has shape {tuple(got.shape)} instead of {tuple(exact.shape)}")
    error = got.double() - exact
    relative = (error.square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30)).item()
    largest = (error.abs().max() / exact.abs().max().clamp_min(1e-30)).item()
    limit = factor * RELATIVE_RMS[dtype]
    if not relative <= limit:  # also true for NaN
        raise WrongResult(f"{name}: relative RMS error {relative:.2e} exceeds {limit:.1e}")
    if not largest <= MAX_FACTOR * limit:
        raise WrongResult(f"{name}: largest error {largest:.2e} of the largest element exceeds {16 * limit:.1e}")
    return relative


def _leaf(tensor: Tensor, backward: bool) -> Tensor:
    return tensor.detach().requires_grad_(backward and tensor.is_floating_point())


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _poison_free_memory(workload: Workload, device: torch.device) -> None:
    """Fill the memory that the outputs are likely to reuse with NaN, so that an unwritten element is detected."""
    if device.type == "cuda":
        size = min(workload.bytes, torch.cuda.mem_get_info(device)[0] // 2)
        torch.full((size // 4,), float("nan"), device=device)
