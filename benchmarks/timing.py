"""The timing harness: time per call, peak memory without the inputs, and the device's limits.

On a GPU the calls are captured in a CUDA graph and its replays are timed by events, so that launch gaps are excluded. A
call that cannot be captured is timed by events alone, and its row records that. On a CPU the clock is `perf_counter`.
Several input sets rotate, so that none is in the cache. For host time per call see calls.py.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer_kernels.backends import cpu
from transformer_kernels.training.step import matrix_products

Call = Callable[[], object]

MIN_SAMPLE_SECONDS = 1e-3
"""Seconds; faster calls are timed in groups."""
MIN_SAMPLES, MAX_SAMPLES = 5, 101
MAX_INPUT_SETS = 256
CPU_CACHE_BYTES = 32 * 2**20
"""The size of a last-level cache if the system does not report it."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MAX_FRACTION = 1.1
"""Largest fraction of a limit, noise included; beyond it the limit or the count of the work is wrong."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, sample by sample, and how they were measured: by "graph", "events" or "clock"."""

    samples: tuple[float, ...]
    method: str

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """The interquartile range as a fraction of the median."""
        low, high = self.quartiles
        return (high - low) / self.median


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """The size of the cache that must not contain the data: the largest that the system reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max([int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units], default=CPU_CACHE_BYTES)


def input_sets(device: torch.device, bytes_per_call: int) -> int:
    """The number of input sets such that two cache sizes of data are read between two uses of one."""
    return max(1, min(MAX_INPUT_SETS, math.ceil(2 * cache_bytes(device) / max(bytes_per_call, 1))))


def leaves_cache(device: torch.device, bytes_per_call: int) -> bool:
    """Whether the input sets of such a call exceed the cache."""
    return input_sets(device, bytes_per_call) * bytes_per_call >= 2 * cache_bytes(device)


def work_stream(device: torch.device) -> AbstractContextManager[object]:
    """The stream on which calls are prepared, warmed up and captured: backward runs on the stream of its forward."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def time_calls(device: torch.device, calls: Sequence[Call], seconds: float) -> Timing:
    """Time the calls in rotation for about `seconds` after a warm-up; must run inside `work_stream`."""
    for call in [*calls, calls[0]]:
        call()
    synchronize(device)
    if device.type != "cuda":
        return _time_by_clock(calls, seconds)
    estimate = _by_events(lambda: _turn(calls), 1, len(calls))[0]
    try:
        return _time_by_graph(calls, seconds, estimate)
    except RuntimeError as error:
        if not _refused_capture(error):
            raise
        torch.cuda.synchronize(device)
    repeats = max(1, math.ceil(MIN_SAMPLE_SECONDS / (estimate * len(calls))))

    def turns() -> None:
        for _ in range(repeats):
            _turn(calls)

    samples = _by_events(turns, _sample_count(seconds, estimate * len(calls) * repeats), len(calls) * repeats)
    return Timing(tuple(samples), "events")


def _time_by_clock(calls: Sequence[Call], seconds: float) -> Timing:
    start = time.perf_counter()
    for call in calls:
        call()
    estimate = (time.perf_counter() - start) / len(calls)
    batch = max(1, math.ceil(MIN_SAMPLE_SECONDS / estimate))
    samples, turn = [], 0
    kept: deque[object] = deque(maxlen=len(calls))  # so that outputs rotate in memory like the inputs
    for _ in range(_sample_count(seconds, estimate * batch)):
        chosen = [calls[(turn + i) % len(calls)] for i in range(batch)]
        turn += batch
        start = time.perf_counter()
        for call in chosen:
            kept.append(call())
        samples.append((time.perf_counter() - start) / batch)
    return Timing(tuple(samples), "clock")


def time_steps(device: torch.device, step: Call, seconds: float) -> Timing:
    """Time whole steps by wall clock, one by one, each to completion: the user-visible latency."""
    synchronize(device)
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < seconds and len(samples) < MAX_SAMPLES):
        start = time.perf_counter()
        step()
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return Timing(tuple(samples), "wall clock")


def _sample_count(seconds: float, one: float) -> int:
    return max(MIN_SAMPLES if one < 1.0 else 3, min(MAX_SAMPLES, int(seconds / one)))


def _time_by_graph(calls: Sequence[Call], seconds: float, estimate: float) -> Timing:
    turns = max(1, math.ceil(MIN_SAMPLE_SECONDS / (estimate * len(calls))))
    turns = min(turns, max(1, 256 // len(calls)))  # larger graphs take longer to create than to time
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(turns):
            _turn(calls)
    graph.replay()
    count = turns * len(calls)
    samples = _by_events(graph.replay, _sample_count(seconds, estimate * count), count)
    return Timing(tuple(samples), "graph")


def _turn(calls: Sequence[Call]) -> None:
    """Call each once and keep the results until the end, so that outputs rotate in memory like the inputs."""
    kept = [call() for call in calls]
    del kept


def _refused_capture(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "captur" in text or "graph" in text


def _by_events(work: Call, samples: int, calls: int) -> list[float]:
    """Seconds per call of `work`, which makes `calls` calls, measured `samples` times."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 / calls for start, end in events]


def peak_memory(device: torch.device, call: Call) -> int:
    """Peak bytes allocated by PyTorch during a call, beyond those allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_memory_on_cpu(call)


def _peak_memory_on_cpu(call: Call) -> int:
    """From the profiler's record of allocations and releases."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _standard_error_silenced(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
        del result
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextmanager
def _standard_error_silenced() -> Iterator[None]:
    """The profiler writes a message there, from C++."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@dataclass(frozen=True)
class Limits:
    """The device's limits measured in this run: bytes/s of a large copy, FLOP/s by dtype."""

    memory: float
    compute: dict[str, float]

    def shortest(self, bytes: int, flops: float, dtype: str) -> tuple[float, str]:
        """The least time that the work can take, and the limit that determines it."""
        moving, computing = bytes / self.memory, flops / self.compute.get(dtype, math.inf)
        return (moving, "memory") if moving >= computing else (computing, "compute")


def copied_transfers(device: torch.device) -> int:
    """How often each byte of a copy crosses the memory bus: read, written, and on a CPU read before it is written.

    The latter is the write-allocate of a cache line. Non-temporal stores avoid it, so work whose bytes are counted
    without it stays within the measured rate.
    """
    return 3 if device.type == "cpu" else 2


def _memory_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second over the memory bus in the fastest copy or sum of tensors larger than the cache."""
    source = torch.randn(max(2 * cache_bytes(device), MIN_COPY_BYTES[device.type]) // 4, device=device)
    target = torch.empty_like(source)
    copied = min(time_calls(device, [lambda: target.copy_(source)], seconds).samples)
    read = min(time_calls(device, [source.sum], seconds).samples)
    return max(copied_transfers(device) * source.nbytes / copied, source.nbytes / read)


def _product_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the fastest square matrix product; the largest is not always the fastest.

    On a CPU the multiply-add rate of all threads from registers is also considered, because no library product reaches
    it. An in-place build (python setup.py build_ext --inplace) can measure it.
    """
    measured = device.type == "cpu" and cpu.unavailable(device) is None and hasattr(cpu.load(), "register_rate")
    rates = [_register_rate(dtype, seconds)] if measured else []
    for side in PRODUCT_SIDES[device.type]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        fastest = min(time_calls(device, [functools.partial(torch.matmul, left, right)], seconds).samples)
        rates.append(2.0 * side**3 / fastest)
    return max(rates)


def _register_rate(dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of multiply-adds without memory traffic (csrc/cpu/measures/register_rate.cpp).

    The best of a second or more: a moment in which one of several threads is preempted would give a limit that is too
    low.
    """
    flops = torch.zeros(1, dtype=torch.int64)
    rounds = 4 * 10**5  # about two milliseconds, long compared with waking the threads
    once = functools.partial(cpu.load().register_rate, cpu.DTYPE_CODES[dtype], rounds, flops.data_ptr())
    shortest, end = math.inf, time.perf_counter() + max(seconds, REGISTER_SECONDS)
    while (start := time.perf_counter()) < end:
        once()
        shortest = min(shortest, time.perf_counter() - start)
    return flops.item() / shortest


REGISTER_SECONDS = 1.0
MIN_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
PRODUCT_SIDES = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 8192, 16384)}


def measure_limits(device: torch.device, dtypes: Sequence[torch.dtype], seconds: float) -> Limits:
    """Measure the limits on random data; every fraction in this run refers to them."""
    with work_stream(device):
        memory = _memory_rate(device, seconds)
        compute = {str(dtype).removeprefix("torch."): _product_rate(device, dtype, seconds) for dtype in dtypes}
        if device.type == "cuda":
            with matrix_products("tf32"):
                compute["tf32"] = _product_rate(device, torch.float32, seconds)
    return Limits(memory, compute)
