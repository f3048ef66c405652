"""Recorded functions called or recorded by several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.backends import cpu
from transformer_kernels.graphs._host import HostGraphs

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)
THREADS = 4


def together(function):
    """The results of a function of the thread's number, started simultaneously in all threads."""
    start = threading.Barrier(THREADS)

    def begun(number):
        start.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begun, range(THREADS)))


@pytest.mark.parametrize("warm_up_calls", [0, 2])
def test_each_thread_gets_its_own_result(warm_up_calls):
    weight = torch.randn(64, 64)
    ask = tk.graphed(lambda x: tk.gelu(x @ weight, backend="cpu").cumsum(0), warm_up_calls=warm_up_calls)

    def calls(number):
        x = torch.full((64, 64), number + 1.0)
        expected = tk.gelu(x @ weight, backend="cpu").cumsum(0)
        return sum(not torch.equal(ask(x), expected) for _ in range(300))

    assert together(calls) == [0] * THREADS


def test_recordings_at_once_leave_no_recorder_behind():
    module, meet = cpu.load(), threading.Barrier(2)

    def recording(number):
        """The first starts before and ends after the start of the second."""
        calls = []
        if number == 1:
            meet.wait()
        with cpu.recorded(calls):
            tk.gelu(torch.ones(4), backend="cpu")
            if number == 0:
                meet.wait()
            meet.wait()
            assert len(calls) == 1
        return cpu.load() is module

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(recording, range(2))) == [True, True]
    assert cpu.load() is module


def test_a_thread_that_does_not_record_calls_the_kernels_themselves():
    module, calls = cpu.load(), []
    with cpu.recorded(calls), ThreadPoolExecutor(1) as pool:
        assert pool.submit(cpu.load).result() is module
        assert cpu.load() is not module


def test_functions_may_be_recorded_at_once_with_random_numbers():
    def calls(number):
        drawn = tk.graphed(lambda x: torch.rand_like(x) + number, warm_up_calls=0)
        return [drawn(torch.zeros(100)).mean().item() for _ in range(2)]

    for number, found in enumerate(together(calls)):
        assert found == pytest.approx([number + 0.5] * 2, abs=0.2)


def test_a_capture_within_a_capture_is_part_of_it():
    inner = tk.graphed(lambda x: tk.gelu(x, backend="cpu"), warm_up_calls=0)
    outer = tk.graphed(lambda x: inner(x) * 2, warm_up_calls=0)
    for _ in range(3):
        x = torch.randn(8)
        assert torch.equal(outer(x), tk.gelu(x, backend="cpu") * 2)
        assert torch.equal(inner(x), tk.gelu(x, backend="cpu"))


def test_a_failed_recording_leaves_no_recorder_behind():
    module = cpu.load()
    with pytest.raises(RuntimeError, match="reads values"):
        HostGraphs().capture(lambda: torch.ones(3).add_(torch.rand(3)).sum().item())
    assert cpu.load() is module
