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


def is_recording():
    """Whether kernel calls of this thread are recorded."""
    recorder = cpu.load().record_with(None)
    cpu.load().record_with(recorder)
    return recorder is not None


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
    meet = threading.Barrier(2)

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
        return is_recording()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(recording, range(2))) == [False, False]
    assert not is_recording()


def test_a_recording_belongs_to_its_thread():
    x, calls = torch.ones(4), []
    tk.gelu(x, backend="cpu"), tk.softmax(x, backend="cpu")  # with bound kernels, whose calls are recorded too
    with cpu.recorded(calls), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_recording).result() and is_recording()
        pool.submit(tk.softmax, x, backend="cpu").result()
        y = tk.softmax(x, backend="cpu")
    ((kernel, arguments),) = calls
    assert kernel.__name__ == "softmax_forward" and (arguments.x, arguments.y) == (x.data_ptr(), y.data_ptr())
    kernel(*arguments._replace(scale=0.0))
    assert torch.equal(y, torch.full((4,), 0.25))


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
    with pytest.raises(RuntimeError, match="reads values"):
        HostGraphs().capture(lambda: torch.ones(3).add_(torch.rand(3)).sum().item())
    assert not is_recording()
