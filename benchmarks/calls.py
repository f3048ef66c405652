"""Host time of one call, in microseconds, for inputs with negligible computation.

The routes of an operation: raw (no gradients), recorded (forward with gradients), and there and back (with backward).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.correctness import as_list
from benchmarks.measure import Bench, Row, measured_columns
from benchmarks.peers import Candidate, candidates
from benchmarks.workloads import Workload, attention, output_layer, rows

ROUTES = ("raw", "recorded", "there and back")
CALLS_PER_SAMPLE = 100
SAMPLES = 21


def tiny(op: str, dtype: torch.dtype = torch.float32) -> Workload:
    """A workload with negligible computation."""
    if op == "attention":
        return attention(dtype, "forward", B=1, H=1, L=16, D=16)
    if op == "linear_cross_entropy":
        return output_layer(dtype, "forward", M=4, E=16, V=32)
    return rows(op, dtype, "forward", M=4, N=32)


def route_call(function: Callable[..., Any], tensors: dict[str, Tensor], route: str) -> timing.Call:
    """One call of an operation by one of `ROUTES`."""
    recorded = route != "raw"
    tensors = {name: x.detach().requires_grad_(recorded and x.is_floating_point()) for name, x in tensors.items()}
    if route != "there and back":
        return functools.partial(function, **tensors)
    cotangents = [torch.randn_like(output) for output in as_list(function(**tensors))]
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return lambda: torch.autograd.grad(as_list(function(**tensors)), leaves, cotangents)


def host_time(call: timing.Call, device: torch.device) -> timing.Timing:
    """Host seconds per call; on a GPU, launched work runs asynchronously and is not included."""

    for _ in range(CALLS_PER_SAMPLE):
        call()
    samples = []
    for _ in range(SAMPLES):
        timing.synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS_PER_SAMPLE):
            call()
        samples.append((time.perf_counter() - start) / CALLS_PER_SAMPLE)
    timing.synchronize(device)
    return timing.Timing(tuple(samples), "host clock")


def measure_call(op: str, candidate: Candidate, route: str, bench: Bench) -> Row:
    """The host time of one call of an operation."""
    workload = tiny(op)
    row = bench.row("call", op, "host", route, candidate.name, workload.dtype_name, shape=dict(workload.shape))

    def work() -> Row:
        function = candidate.make(workload, bench.device)
        call = route_call(function, workload.inputs(bench.device), route)
        return row | measured_columns(host_time(call, bench.device))

    return bench.attempt(row, work)


def call_candidates(op: str) -> list[Candidate]:
    """This package's backends, and PyTorch's operator if one call computes the whole operation."""
    return [candidate for candidate in candidates(op) if candidate.ours or candidate.name in ("eager", "sdpa flash")]
