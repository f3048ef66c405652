"""One row: a workload by a candidate on this device, checked, then timed; or the reason why it has no time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.correctness import WrongResult, as_list, check
from benchmarks.environment import STAMP, environment
from benchmarks.peers import Candidate, Skipped
from benchmarks.workloads import Workload
from transformer_kernels import BackendUnavailable, UnsupportedByBackend

Row = dict[str, Any]

SAMPLES = "all_samples"
"""The key of a new row's samples; a written row has their quartiles."""
IDENTITY = ("kind", "op", "case", "direction", "candidate", "dtype", "shape")
"""The keys that identify a measurement."""


def identity(row: Row) -> str:
    shape = ",".join(f"{name}={size}" for name, size in row["shape"].items())
    return "|".join([*(str(row[name]) for name in IDENTITY[:-1]), shape])


class BeyondLimit(Exception):
    """A measurement exceeds the device's limits: a limit or a count of bytes or FLOPs is wrong."""


@dataclass
class Bench:
    """A device, the seconds per row, and the device limits measured in this run."""

    device: torch.device
    seconds: float = 0.3
    limits: timing.Limits | None = None
    stamp: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stamp:
            described = environment(self.device)
            self.stamp = {name: described[name] for name in STAMP}

    def row(self, kind: str, op: str, case: str, direction: str, candidate: str, dtype: str, **more: Any) -> Row:
        """A row without a result."""
        named = {"kind": kind, "op": op, "case": case, "direction": direction, "candidate": candidate, "dtype": dtype}
        return {**named, "shape": {}, **more, **self.stamp}

    def judged(self, row: Row, measured: timing.Timing, bytes: int, flops: float) -> Row:
        """The row with its time, its rates and its fraction of the device's limit.

        Work that fits in the cache has no fraction of the memory bandwidth.

        Raises:
            BeyondLimit: the fraction exceeds what noise explains.
        """
        seconds = measured.median
        judged = row | measured_columns(measured) | {"bytes": bytes, "flops": flops}
        judged |= {"gbps": bytes / seconds / 1e9, "tflops": flops / seconds / 1e12}
        if self.limits is not None:
            shortest, bound = self.limits.shortest(bytes, flops, row["dtype"])
            if bound == "compute" or timing.leaves_cache(self.device, bytes):
                judged |= {"bound": bound, "fraction": shortest / seconds}
            if judged.get("fraction", 0.0) > timing.MAX_FRACTION:
                raise BeyondLimit(f"{seconds:.3g} s is {judged['fraction']:.0%} of the {bound} limit")
        return judged

    def attempt(self, row: Row, work: Callable[[], Row]) -> Row:
        """The result of `work`, or the row with the reason why there is none. A lost device is raised."""
        try:
            return work()
        except Skipped as error:
            return row | {"status": "skipped", "reason": str(error)}
        except (BackendUnavailable, UnsupportedByBackend) as error:
            return row | {"status": "skipped", "reason": str(error)}
        except WrongResult as error:
            return row | {"status": "wrong", "reason": str(error)}
        except (torch.OutOfMemoryError, MemoryError) as error:
            return row | {"status": "out of memory", "reason": _first_line(error)}
        except Exception as error:
            if is_device_lost(error):
                raise
            return row | {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
        finally:
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def measured_columns(measured: timing.Timing) -> Row:
    """The timing fields of a row."""
    low, high = measured.quartiles
    columns = {"status": "ok", "seconds": measured.median, "low": low, "high": high, "spread": measured.spread}
    return columns | {SAMPLES: list(measured.samples), "samples": len(measured.samples), "method": measured.method}


DEVICE_LOST = 3
"""Exit status of a worker that lost its device."""
SIGNS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "invalid address space",
    "hardware stack error",
    "launch timed out",
    "restart the process",
)


def is_device_lost(error: object) -> bool:
    """Whether a CUDA error, or its text, makes this process unusable; a new one then continues."""
    text = str(error).lower()
    return any(sign in text for sign in SIGNS)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def measure(workload: Workload, candidate: Candidate, bench: Bench) -> Row:
    """The row of one workload and one candidate."""
    row = bench.row(
        "operation",
        workload.op,
        workload.case,
        workload.direction,
        candidate.name,
        workload.dtype_name,
        shape=dict(workload.shape),
        axis=workload.axis,
    )

    def work() -> Row:
        with timing.work_stream(bench.device):
            checked = workload.without_dropout()
            function = candidate.make(checked, bench.device)
            row["error"] = check(checked, function, bench.device)
            if checked is not workload:
                function = candidate.make(workload, bench.device)
            return _timed(row, workload, function, bench)

    return bench.attempt(row, work)


def _timed(row: Row, workload: Workload, function: Callable[..., Any], bench: Bench) -> Row:
    sets = timing.input_sets(bench.device, workload.bytes)
    drawn = workload.inputs(bench.device)
    copies = [{name: tensor.clone() for name, tensor in drawn.items()} for _ in range(sets)]
    calls = [prepared(workload, function, tensors) for tensors in copies]
    row["input_sets"] = sets
    measured = timing.time_calls(bench.device, calls, bench.seconds)
    row["peak_memory"] = timing.peak_memory(bench.device, calls[0])
    return bench.judged(row, measured, workload.bytes, workload.flops)


def prepared(workload: Workload, function: Callable[..., Any], tensors: dict[str, Tensor]) -> timing.Call:
    """The timed call: the operation without gradients, its backward pass alone, or both."""
    if workload.direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return function(**tensors)

        return forward
    leaves = {name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()}
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if workload.direction == "backward":
        outputs = as_list(function(**leaves))
        dout = [_cotangent(output) for output in outputs]
        return lambda: torch.autograd.grad(outputs, wanted, dout, retain_graph=True)
    with torch.no_grad():
        cotangents = [_cotangent(output) for output in as_list(function(**leaves))]
    return lambda: torch.autograd.grad(as_list(function(**leaves)), wanted, cotangents)


def _cotangent(output: Tensor) -> Tensor:
    """The incoming gradient: 1 for a loss, as in training."""
    return torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output)
