"""Fast paths with the path on and off: they launch different kernels or tiles, and results are compared."""

import math
from contextlib import nullcontext

import pytest
import torch

from benchmarks import fast_paths, timing
from benchmarks.fast_paths import Case, FastPath
from transformer_kernels.backends import triton as backend
from transformer_kernels.ops.attention import _compiled

PATHS = fast_paths.paths(backend.INTERPRETED_CAPABILITY)
TRITON = [path for path in PATHS if path.backend == "triton"]
SHORT = next(path for path in PATHS if path.backend == "cuda" and path.name == "short sequences")


def launches(path, case, monkeypatch):
    """The kernels of a call with their tiles and numbers, none of which runs."""
    found: set[object] = set()

    def record(launch, *pointers):
        found.add((launch._kernel, launch._grid, launch._arguments, tuple(launch._options.items())))

    with monkeypatch.context() as context:
        context.setattr(torch, "randn", torch.empty)
        context.setattr(backend.Launch, "__call__", record)
        case.call(path.backend, torch.device("cpu"))()
    return found


@pytest.mark.parametrize("path", TRITON, ids=lambda path: path.name)
def test_a_path_that_is_off_launches_something_else(path, monkeypatch):
    for case in path.cases:
        on = launches(path, case, monkeypatch)
        with path.off():
            off = launches(path, case, monkeypatch)
        assert on and off and on != off, case
        assert launches(path, case, monkeypatch) == on


@pytest.mark.parametrize(("slower", "verdict"), [(1.2, "keep"), (1.05, "delete")])
def test_the_verdict(slower, verdict, monkeypatch, device):
    times = iter((1.0, slower, 1.01))
    monkeypatch.setattr(timing, "time_calls", lambda *_: timing.Timing((next(times),), "clock"))
    row = fast_paths.measure(SHORT, Case(1, 2, 16, 32, backward=True), device)
    assert row["verdict"] == verdict and row["gain"] == slower and row["error"] < 1e-2
    assert fast_paths.line(row).startswith(verdict)


def test_a_path_that_is_off_by_default_is_measured_while_on(monkeypatch, device):
    selected = []

    def timed(*_):
        selected.append(_compiled.path)
        return timing.Timing((1.0,), "clock")

    monkeypatch.setattr(timing, "time_calls", timed)
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "90")
    row = fast_paths.measure(fast_paths.PERSISTENT, Case(1, 5, 140, 64, options=("causal",)), device)
    assert selected == ["sm90_persistent", "auto", "sm90_persistent"] and row["verdict"] == "delete"


def test_results_that_differ_are_wrong(monkeypatch, device):
    monkeypatch.setattr(timing, "time_calls", lambda *_: timing.Timing((1.0,), "clock"))
    outputs = iter((1.0, math.nan))
    monkeypatch.setattr(Case, "call", lambda *_: lambda: (torch.full((2,), next(outputs)),))
    path = FastPath("", "cuda", nullcontext, ())
    assert fast_paths.measure(path, Case(1, 1, 1, 8), device)["verdict"] == "wrong"
