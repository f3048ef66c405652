"""Ahead-of-time gates of the Triton kernels: they compile for each architecture, to the expected machine code."""

import subprocess
import sys

import pytest

from benchmarks.compilers import static
from benchmarks.compilers import triton as kernel_report
from benchmarks.compilers.row_calls import WIDTHS
from benchmarks.tune_triton import targets
from tests.support.compilations import OPERATIONS as COUNTED
from tests.support.compilations import compilations
from tests.support.day import EVERY
from tests.support.host_time import host_costs
from transformer_kernels.backends.triton import MINIMUM_VERSION

triton = pytest.importorskip("triton", reason="Triton is not installed")

"""Every n-th launch is compiled; all of them by default, which takes an hour."""

BACKWARD_QUERY = "attention_backward_query"
KNOWN_TO_FAIL = {
    ("attention any length causal bfloat16 D 64: attention_forward", (12, 0)),
    # 4, two of them among the 697 of the loop: the tile of 8.0, which has no spills there.
    ("attention any length biased bfloat16 D 64: attention_backward_key", (8, 0)),
    (f"attention any length causal biased softcap bfloat16 D 256: {BACKWARD_QUERY}", (8, 0)),
    # 20 and 4, since maximum and log of the sum are loaded separately, for gradients under large biases. The tiles were
    # selected for one statistic; smaller tiles were not evaluated.
    ("attention any length causal padded dropout bfloat16 D 64: attention_backward_key", (8, 0)),
    ("attention any length causal padded dropout float16 D 64: attention_backward_key", (8, 0)),
    # 13, all outside of the two loops.
}
"""Launches whose spills cost less than tiles without spills."""

QUICK = (
    "attention any length sequences bfloat16 D 64: attention_backward_key",
    "add_layer_norm dropout fp16 1024: layer_norm_forward",
    "bias_relu bf16 256: bias_activation_backward",
    "gelu tanh bf16 16: gelu_forward",
)


SERVED = {
    "attention": "any length causal bfloat16 D 64: attention_",
    "layer_norm": "^layer_norm bf16 1024: ",
    "softmax": "^softmax bf16 1024: ",
}
"""Launches compiled for GPUs without their own tiles."""


def test_a_sample_of_the_launches_passes_its_gates(capsys, monkeypatch):
    """By the command, which prints their table."""
    report, reports = kernel_report.report, []
    monkeypatch.setattr(kernel_report, "report", lambda *given: reports.extend(report(*given)) or reports)
    operations = [name.split(" ", 1)[0] for name in QUICK]
    assert kernel_report.main([*operations, "--matching", "|".join(QUICK), "--jobs", "1"]) == 0
    _assert_gates(reports)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*QUICK, "sm_80", "sm_90", "8 compilations, 0 failing"))


@pytest.mark.slow
@pytest.mark.parametrize("operation", kernel_report.OPERATIONS)
def test_every_launch_passes_its_gates(operation):
    reports = kernel_report.report([operation], jobs=1, every=EVERY)
    _assert_gates(reports)
    record = static.recorded("triton")
    grown = static.grown(reports, record) if record["compiler"] == static.release("triton") else []
    assert not grown, "\n".join(grown)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "matching"), SERVED.items(), ids=SERVED)
def test_a_sample_compiles_where_no_tiles_are_its_own(operation, matching):
    reports = kernel_report.report([operation], matching, jobs=1, capabilities=kernel_report.SERVED)
    assert {row.capability for row in reports} == {(8, 6), (10, 0), (12, 0)}
    _assert_gates(reports)
    assert "attention" not in operation or all(loop.classes["matrix"] for row in reports for loop in row.loops)
    record = static.recorded("triton")
    grown = static.grown(reports, record) if record["compiler"] == static.release("triton") else []
    assert not grown, "\n".join(grown)


@pytest.mark.slow
def test_the_oldest_supported_triton_compiles(tmp_path, monkeypatch):
    oldest = ".".join(map(str, (*MINIMUM_VERSION, 0)))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    if subprocess.run([*pip, f"triton=={oldest}"], capture_output=True).returncode:
        pytest.skip(f"pip cannot install Triton {oldest} here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reports = kernel_report.report(["attention"], "any length causal bfloat16 D 64: attention_forward", jobs=1)
    assert {row.capability for row in reports} == {(8, 0), (9, 0)}
    _assert_gates(reports)


@pytest.mark.parametrize(
    "shapes", ["batches", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aligned", "odd"))]
)
def test_twenty_shapes_need_no_second_compilation(shapes):
    found = compilations(shapes)
    assert found.keys() == COUNTED.keys()
    for operation, counted in found.items():
        assert counted and all(one == every for one, every in counted.values()), (operation, counted)


@pytest.mark.slow
def test_a_raw_call_costs_the_host_little():
    found = host_costs()
    limits = {"any length forward": 52, "any length backward": 85, "short forward": 52, "short backward": 53}
    assert found.keys() == limits.keys() and all(found[name] <= limits[name] for name in limits), found


@pytest.mark.parametrize("operation", kernel_report.OPERATIONS)
def test_the_calls_of_every_operation_are_known(operation):
    label, call = next(iter(kernel_report.calls_of(operation).calls(operation)))
    assert label.startswith(operation) and callable(call)


def test_the_rows_recorded_meet_every_tile():
    for target in targets():
        below = {width for width in target.tiles.widths() if width > 2 and width <= target.tiles.widest}
        assert below <= set(WIDTHS) and max(WIDTHS) > target.tiles.widest, target


def test_a_gate_that_fails_is_named():
    report = kernel_report.KernelReport(
        "sample", (8, 0), registers=255, spills=2, shared=170_000, programs=1, in_flight=0, loops=(), num_warps=4,
        stack=8, matrix=0, loads=3, wide_loads=0, wide_stores=0, instructions=100, failures=(),
    )  # fmt: skip
    found = kernel_report.failures(report, {"no_spills", "matrix", "wide_loads", "wide_stores"})
    assert found == (
        "170000 bytes of shared memory",
        "no matrix instruction",
        "2 spill instructions, 8 bytes of stack",
        "no 16-byte load",
        "no 16-byte store",
    )
    assert "sample" in kernel_report.table([report]) and "170000" in kernel_report.table([report])


def test_an_operand_wider_than_its_tile_is_named():
    operand = "tensor<{}xf16, #ttg.dot_op<{{opIdx = {}, parent = #mma, kWidth = {}}}>>"
    layouts = [("128x16", 0, 4), ("16x64", 1, 4), ("64x32", 0, 8), ("16x128", 0, 8)]
    assert kernel_report.too_wide("\n".join(operand.format(*each) for each in layouts)) == ()
    assert kernel_report.too_wide(operand.format("128x16", 0, 8)) == ("an operand with kWidth 8 of a product over 16",)
    assert kernel_report.too_wide(operand.format("16x128", 1, 8)) == ("an operand with kWidth 8 of a product over 16",)


def _assert_gates(reports):
    """Exactly the listed launches fail: a fixed launch must be removed from the list."""
    assert reports
    failing = [row for row in reports if row.failures]
    unknown = [row for row in failing if (row.name, row.capability) not in KNOWN_TO_FAIL]
    assert not unknown, "\n" + kernel_report.table(unknown)
    mended = [row for row in reports if not row.failures and (row.name, row.capability) in KNOWN_TO_FAIL]
    assert not mended, "no longer failing:\n" + kernel_report.table(mended)
