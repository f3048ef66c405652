"""What a call costs the host, in microseconds, when there is next to nothing to compute.

The routes of an operation: raw (nothing needs a gradient), recorded (forward with gradients), and there and back. The
registration comparison puts the same do-nothing kernel behind each way that PyTorch offers; README.md has the verdict.
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
    """A workload with nothing to wait for."""
    if op == "attention":
        return attention(dtype, "forward", B=1, H=1, L=16, D=16)
    if op == "linear_cross_entropy":
        return output_layer(dtype, "forward", M=4, E=16, V=32)
    return rows(op, dtype, "forward", M=4, N=32)


def route_call(function: Callable[..., Any], tensors: dict[str, Tensor], route: str) -> timing.Call:
    """One call of an operation by one of `ROUTES`."""
    recorded = route != "raw"
    tensors = {
        name: each.detach().requires_grad_(recorded and each.is_floating_point()) for name, each in tensors.items()
    }
    if route != "there and back":
        return functools.partial(function, **tensors)
    cotangents = [torch.randn_like(output) for output in as_list(function(**tensors))]
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return lambda: torch.autograd.grad(as_list(function(**tensors)), leaves, cotangents)


def host_time(call: timing.Call, device: torch.device) -> timing.Timing:
    """Seconds that the host spends in a call; on a GPU the launched work runs meanwhile and is not waited for."""

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
    """The host's time in one call of an operation."""
    workload = tiny(op)
    row = bench.row("call", op, "host", route, candidate.name, workload.dtype_name, shape=dict(workload.shape))

    def work() -> Row:
        function = candidate.make(workload, bench.device)
        call = route_call(function, workload.inputs(bench.device), route)
        return _with_time(row, host_time(call, bench.device))

    return bench.attempt(row, work)


def call_candidates(op: str) -> list[Candidate]:
    """Ours and PyTorch's own, where one call does the whole operation."""
    wanted = {"ours torch", "ours triton", "ours cuda", "eager", "sdpa flash"}
    return [candidate for candidate in candidates(op) if candidate.name in wanted]


def _with_time(row: Row, measured: timing.Timing) -> Row:
    return row | measured_columns(measured)


# The ways to register an operation, each around the same kernel

REGISTRATIONS = ("autograd.Function", "torch.library.custom_op", "torch.library.Library", "split route")


def _kernel(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _kernel(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _kernel(ctx.saved_tensors[0])


@functools.cache
def registrations() -> dict[str, Callable[[Tensor], Tensor]]:
    """The do-nothing operation behind autograd.Function, custom_op, Library, and the split route of this package."""

    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _kernel(ctx.saved_tensors[0])

    custom = torch.library.custom_op("transformer_kernels_bench::custom", _kernel, mutates_args=(), schema=SCHEMA)
    custom.register_fake(_kernel)
    custom.register_autograd(backward, setup_context=setup_context)

    library = torch.library.Library("transformer_kernels_bench", "FRAGMENT")
    library.define(f"library{SCHEMA}")
    library.impl("library", _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("transformer_kernels_bench::library", _kernel, lib=library)
    torch.library.register_autograd(
        "transformer_kernels_bench::library", backward, setup_context=setup_context, lib=library
    )
    registered = torch.ops.transformer_kernels_bench.library.default
    _libraries.append(library)

    def split(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return registered(x)
        if x.requires_grad and torch.is_grad_enabled():
            return _Function.apply(x)
        return _kernel(x)

    return dict(zip(REGISTRATIONS, (_Function.apply, custom, registered, split), strict=True))


SCHEMA = "(Tensor x) -> Tensor"
_libraries: list[torch.library.Library] = []


def measure_registration(name: str, route: str, bench: Bench) -> Row:
    """The host's time in one call of an operation that does nothing, registered in the way called `name`."""
    row = bench.row("call", "registration", "host", route, name, "float32", shape={"N": 32})

    def work() -> Row:
        function = registrations()[name]
        x = torch.randn(32, device=bench.device, requires_grad=route != "raw")
        if route == "there and back":
            dy = torch.randn_like(x)
            return _with_time(row, host_time(lambda: torch.autograd.grad(function(x), x, dy), bench.device))
        return _with_time(row, host_time(lambda: function(x), bench.device))

    return bench.attempt(row, work)
