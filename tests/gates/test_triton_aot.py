"""Ahead-of-time gates of the Triton kernels: they compile for sm_80 and sm_90, to the machine code they should."""

from __future__ import annotations

import pytest

from tests.support.compilations import OPERATIONS as COUNTED
from tests.support.compilations import compilations
from transformer_kernels.reports import triton as kernel_report

pytest.importorskip("triton", reason="Triton is not installed")

QUICK = {
    "attention": "key gradient packed sequences bf16 D <= 64",
    "softmax": "forward bf16 <= 4096",
    "layer_norm": "backward bf16 <= 4096",
    "add_layer_norm": "forward dropout fp16 <= 1024",
    "gelu": "backward none bf16",
    "bias_gelu": "forward none fp32 wider",
    "bias_relu": "backward bf16 <= 256",
    "cross_entropy": "in place bf16 <= 4096",
    "embedding": "forward norm bf16 <= 256",
}


@pytest.mark.parametrize(("operation", "matching"), QUICK.items(), ids=QUICK)
def test_a_sample_of_the_tables_passes_its_gates(operation: str, matching: str) -> None:
    _assert_gates(kernel_report.report([operation], matching, jobs=1))


@pytest.mark.slow
@pytest.mark.parametrize("operation", kernel_report.OPERATIONS)
def test_every_configuration_passes_its_gates(operation: str) -> None:
    if not kernel_report.configurations([operation]):
        pytest.skip(f"triton has no {operation} kernel of its own")
    _assert_gates(kernel_report.report([operation], jobs=2))


VARIANTS = {
    "cross_entropy_forward_kernel": 2,  # with statistics, and in place
    "softmax_forward_kernel": 3,
    "layer_norm_forward_kernel": 2,
    "layer_norm_backward_kernel": 2,
    "bias_activation_forward_kernel": 2,  # gelu and relu
    "bias_activation_backward_kernel": 2,
    "attention_forward_kernel": 5,
    "attention_backward_query_kernel": 4,
    "attention_backward_key_kernel": 4,
    "attention_short_forward_kernel": 2,
    "attention_short_backward_kernel": 2,
}
"""How many compilations the counted calls of each kernel ask for by their options; one where it is not named."""


@pytest.mark.parametrize("operation", COUNTED)
@pytest.mark.parametrize("shapes", ["batches", "aligned", "odd"])
def test_twenty_shapes_need_no_second_compilation(operation: str, shapes: str) -> None:
    counted = compilations(f"{operation}-{shapes}")
    assert counted and counted == {name: VARIANTS.get(name, 1) for name in counted}


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_report.main(["gelu", "--matching", "forward tanh bf16", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "gelu forward tanh bf16" in printed and "sm_80" in printed and "2 compilations, 0 failing" in printed


def test_a_gate_that_fails_is_named() -> None:
    report = kernel_report.KernelReport(
        "sample", (8, 0), 4, registers=255, stack=8, spills=2, shared=170_000, matrix=0, loads=3, wide_loads=0,
        wide_stores=0, instructions=100, failures=(),
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


def _assert_gates(reports: list[kernel_report.KernelReport]) -> None:
    assert reports, "no configuration matches"
    failing = [row for row in reports if row.failures]
    assert not failing, "\n" + kernel_report.table(failing)
