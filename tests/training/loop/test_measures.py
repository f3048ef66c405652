import pytest
import torch

from transformer_kernels.training.loop.measures import Stopwatch, peak_flops

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "dtype, precision, expected",
    [
        ("float32", "highest", 67e12),
        ("float32", "high", 494.5e12),
        ("tf32", "highest", 494.5e12),
        ("bfloat16", "highest", 989e12),
        ("float16", "highest", 989e12),
    ],
)
def test_the_peak_is_that_of_the_precision(monkeypatch, dtype, precision, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert peak_flops(CUDA, dtype) == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_unknown_device_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert peak_flops(CUDA, "float32") is None
    assert peak_flops(torch.device("cpu"), "float32") is None


def test_the_first_step_is_counted_apart(monkeypatch):
    """It captures or compiles; the speed is that of the others."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    for seconds in (7.0, 1.0, 1.0):
        now[0] += seconds
        watch.add_step(50)
    assert watch.first_step_seconds == 7.0 and watch.pause() == 50.0
    assert (watch.steps, watch.tokens, watch.seconds) == (2, 100, 2.0)
