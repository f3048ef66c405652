"""Every CUDA kernel compiles for sm_80 and sm_90a, without spills and with the instructions it is written for."""

from __future__ import annotations

import pytest

from tests.support.operations import row_operations
from transformer_kernels.backends import build as _build
from transformer_kernels.reports import cuda as cuda_report

pytestmark = pytest.mark.slow

# Kernels that read rows by 16-byte vectors where the rows allow it. sum_partials reads single floats, 128 bytes a warp.
VECTOR_KERNELS = (
    "softmax_forward_kernel",
    "softmax_backward_kernel",
    "cross_entropy_forward_kernel",
    "cross_entropy_forward_any_width_kernel",
    "cross_entropy_backward_kernel",
    "layer_norm_forward_kernel",
    "layer_norm_backward_kernel",
    "gelu_forward_kernel",
    "gelu_backward_kernel",
    "bias_activation_forward_kernel",
    "bias_activation_backward_kernel",
    "embedding_rows_kernel",
    "gated_forward_kernel",
    "gated_backward_kernel",
    "rotary_kernel",
)


@pytest.fixture(autouse=True)
def needs_nvcc() -> None:
    if _build.find_toolkit() is None:
        pytest.skip("no nvcc in CUDA_HOME, PATH or the pip package nvidia-cuda-nvcc")


@pytest.mark.parametrize("architecture", cuda_report.DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize("operation", row_operations("cuda"))
def test_row_kernels(operation: str, architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = cuda_report.compile_reports(operation, architecture)
    with capsys.disabled():
        print("\n" + cuda_report.table(kernels))
    assert kernels
    spilling = [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.stack]
    assert not spilling, spilling
    by_vectors = {kernel.name for kernel in kernels if kernel.loads_16_bytes}
    expected = {kernel.name for kernel in kernels} & set(VECTOR_KERNELS)
    assert expected <= by_vectors, f"no 16-byte loads in {expected - by_vectors}"


ATTENTION_SOURCES = ("attention_bfloat16", "attention_float16", "attention_short_bfloat16", "attention_short_float16")


@pytest.mark.parametrize("architecture", cuda_report.DEFAULT_ARCHITECTURES)
@pytest.mark.parametrize("source", ATTENTION_SOURCES)
def test_attention_kernels(source: str, architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = cuda_report.compile_reports(source, architecture)
    with capsys.disabled():
        print("\n" + cuda_report.table(kernels))
    spilling = [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.stack]
    assert not spilling, spilling
    assert any(kernel.mma for kernel in kernels)


def test_the_hopper_kernel_multiplies_by_warp_groups(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = cuda_report.compile_reports("attention_sm90", "90a")
    with capsys.disabled():
        print("\n" + cuda_report.table(kernels))
    assert kernels and all(kernel.wgmma for kernel in kernels)
    assert not [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.serialised]
    # setmaxnreg waits for ever for registers that the launch did not bring: 128 threads keep 24, 256 take 240.
    assert all(kernel.register_moves == 2 and 384 * kernel.registers >= 128 * 24 + 256 * 240 for kernel in kernels)
