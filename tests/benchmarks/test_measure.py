"""Correctness before timing: a wrong kernel is not timed; a correct one gets a consistent row."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import python_ref.ops as reference
import transformer_kernels as tk
from benchmarks import other_models, timing, workloads
from benchmarks.correctness import WrongResult
from benchmarks.measure import Bench, measure
from benchmarks.peers import Candidate, candidates
from benchmarks.results import RESULTS, load_rows
from benchmarks.steps import Recipe, Rung, check_step, ladder, measure_step, rungs
from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import unavailable

CPU = torch.device("cpu")
STAMP = dict.fromkeys(("device", "torch", "triton", "driver", "commit", "date"))


@pytest.fixture
def bench():
    return Bench(CPU, seconds=0.005, limits=timing.Limits(1e30, {"float32": 1e14}), stamp=dict(STAMP))


def attention_work(direction, **options):
    return workloads.attention(torch.float32, direction, B=2, H=4, Hk=2, L=40, D=16, **options)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


WRONG: dict[str, tuple[workloads.Workload, Callable[..., Tensor]]] = {
    "scale": (
        attention_work("forward", causal=True),
        lambda **given: reference.attention(**given, causal=True, scale=0.26),
    ),
    "gradient": (
        workloads.rows("gelu", torch.float32, "backward", M=8, N=16),
        lambda x: reference.gelu(_WrongGradient.apply(x)),
    ),
    "one element, a little": (  # too little to show in the RMS error of 400,000
        workloads.rows("gelu", torch.float32, "forward", M=400, N=1000),
        lambda x: torch.nn.functional.gelu(x).index_put(
            (torch.tensor(3), torch.tensor(7)), torch.tensor(2e-3), accumulate=True
        ),
    ),
    "not a number": (
        workloads.rows("softmax", torch.float32, "forward", M=8, N=16),
        lambda x: torch.softmax(x, -1).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(float("nan"))),
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_refused_a_time(bench, fault):
    workload, function = WRONG[fault]
    row = measure(workload, Candidate("wrong", lambda *_: function), bench)
    assert row["status"] == "wrong" and row["reason"], row
    assert "seconds" not in row


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("op", workloads.OPERATIONS)
def test_each_operation_is_measured_in_each_direction(bench, op, direction):
    if op == "attention":
        workload = attention_work(direction, causal=True) if direction == "both" else attention_work(direction)
    elif op == "linear_cross_entropy":
        workload = workloads.output_layer(torch.float32, direction.replace("backward", "both"), M=16, E=8, V=32)
    else:
        workload = workloads.rows(op, torch.float32, direction, M=16, N=32)
    named = {candidate.name: candidate for candidate in candidates(op)}
    for name in ("ours torch", "eager"):
        row = measure(workload, named[name], bench)
        assert row["status"] == "ok", row
        assert row["low"] <= row["seconds"] <= row["high"] and row["error"] < 2e-5
        assert row["gbps"] == pytest.approx(workload.bytes / row["seconds"] / 1e9)
        assert row["bound"] == "compute"
        assert row["fraction"] == pytest.approx(workload.flops / 1e14 / row["seconds"])
        assert row["peak_memory"] > 0 and row["method"] == "clock"


def test_a_failure_is_a_row_and_a_lost_device_is_not(bench):
    workload = workloads.rows("softmax", torch.float32, "forward", M=4, N=8)

    def fails(x):
        raise RuntimeError("no such thing")

    def loses(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    row = measure(workload, Candidate("fails", lambda *_: fails), bench)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no such thing")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(workload, Candidate("loses", lambda *_: loses), bench)


@pytest.mark.skipif(
    cpu.unavailable(CPU) is not None or not hasattr(cpu.load(), "register_rate"), reason="needs an in-place build"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_product_is_faster_than_registers(dtype, monkeypatch):
    """One thread, in processor time, which passes only while it runs; it may share a core: the best of some attempts.

    Where PyTorch has no fast product of this dtype, the package's own has to reach a tenth of the limit.
    """
    monkeypatch.setattr(timing.time, "perf_counter", time.thread_time)
    left, threads = torch.randn(256, 256).to(dtype), torch.get_num_threads()
    products = [lambda: left @ left, lambda: tk.linear(left, left, backend="cpu")]
    limit = fastest = 0.0
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            limit = max(limit, timing._register_rate(dtype, 0.1))
            samples = [min(timing.time_calls(CPU, [product], 0.1).samples) for product in products]
            fastest = max(fastest, 2.0 * 256**3 / min(samples))
            if 0.1 * limit < fastest < timing.MAX_FRACTION * limit:
                return
    finally:
        torch.set_num_threads(threads)
    pytest.fail(f"the fastest product has {fastest:.3e} FLOP/s, the registers {limit:.3e}")


def test_a_row_faster_than_its_limit_fails(bench):
    workload = workloads.rows("gelu", torch.float32, "forward", M=64, N=64)
    bench.limits = timing.Limits(1e10, {"float32": 1.0})
    row = measure(workload, {each.name: each for each in candidates("gelu")}["eager"], bench)
    assert row["status"] == "failed" and "of the compute limit" in row["reason"] and "fraction" not in row


@pytest.mark.parametrize("record", sorted(RESULTS.glob("*/rows.jsonl")), ids=lambda path: path.parent.name)
def test_no_recorded_row_is_faster_than_its_limit(record):
    beyond = [row for row in load_rows(record) if row.get("fraction", 0.0) > timing.MAX_FRACTION]
    assert not beyond, beyond[:3]


def test_a_copy_is_counted_with_its_write_allocate(monkeypatch):
    copied = []

    def timed(device, calls, seconds):
        copied.append(calls[0]())
        return timing.Timing((2.0, 1.0, 3.0), "clock")

    monkeypatch.setattr(timing, "time_calls", timed)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 2**19)
    monkeypatch.setitem(timing.MIN_COPY_BYTES, "cpu", 2**18)
    assert timing._memory_rate(CPU, 0.1) == 3 * 2**20  # read, allocated, written in the fastest second
    assert copied[0].nbytes == 2**20  # twice the cache


def test_peak_memory_is_the_most_at_one_time():
    x = torch.randn(1000, 250)  # 1 MB

    def call():
        y = x + 1.0
        z = y * 2.0
        del y
        return z + 1.0  # z and the result

    assert 2_000_000 <= timing.peak_memory(CPU, call) < 2_010_000


SMALL = Recipe("char_gpt", 2, 8)


def test_a_training_step_is_checked_and_timed(bench):
    named = {rung.name: rung for rung in rungs(CPU)}
    timed = ("reference, fp32", "SDPA + fused AdamW, fp32", "ours torch, bf16")
    rows = {
        name: measure_step(SMALL, named[name], bench)
        for name in (*timed, "reference, TF32", "ours auto + one graph, bf16")
    }
    for name in timed:
        assert rows[name]["status"] == "ok" and rows[name]["tokens_per_second"] > 0, rows[name]
    assert rows["ours auto + one graph, bf16"]["reason"] == "CUDA graphs require a GPU"
    recorded = measure_step(SMALL, named["ours cpu + one graph, fp32"], bench)
    assert recorded["status"] == "ok" if unavailable("cpu", CPU) is None else recorded["status"] == "skipped"
    assert rows["reference, TF32"]["status"] == "skipped"


@pytest.mark.parametrize("name", other_models.MODELS)
def test_a_patched_model_of_transformers_is_held_against_itself(name, bench, monkeypatch):
    pytest.importorskip("transformers")
    bert = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    for sizes, small in ((other_models.BERT, bert), (other_models.GPT2, {"n_layer": 1, "n_embd": 32, "n_head": 2})):
        for key, value in {**small, "vocab_size": 50}.items():
            monkeypatch.setitem(sizes, key, value)
    for operations in ("pytorch", "torch"):
        row = measure_step(Recipe(name, 2, 16, dropout=0.0), Rung(operations, "float32"), bench)
        assert row["status"] == "ok" and row["case"] == "training step, dropout 0", row


def test_a_step_that_learns_something_else_is_refused(monkeypatch):
    only_values = lambda qkv, heads, **options: qkv[:, :, -heads:].flatten(2)  # noqa: E731
    monkeypatch.setattr("benchmarks.pytorch.packed_attention", only_values)
    rung = next(rung for rung in ladder() if rung.operations == "pytorch")
    with pytest.raises(WrongResult, match=r"loss|gradient norm"):
        check_step(SMALL, rung, CPU)
