"""Every CUDA kernel compiles for every architecture, without spills and with the expected instructions."""

import re

import pytest

from benchmarks.compilers import cuda as cuda_report
from benchmarks.compilers import cuda_launches, static
from benchmarks.compilers.machine_code import Flow, bytes_in_flight, disassembler
from tests.gates.machine_code import dropout_instructions, overlapped_loop, registers_by_role
from tests.support.day import EVERY, in_turn
from tests.support.operations import row_operations
from transformer_kernels.backends import build as _build
from transformer_kernels.backends import cuda as _extension

pytestmark = pytest.mark.slow

# Kernels that read aligned rows in 16-byte vectors. sum_partials reads single floats, 128 bytes per warp.
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


ARCHITECTURES = ("75", "80", "86", "90a", "100", "120")
TWINS = {
    "attention_float16": ("75", "100"),
    "attention_short_float16": ("86", "120"),
    "attention_float32": ("80",),
    "geglu": ("75", "120"),
}
"""Architectures of a source if CI requests fewer: its templates are also in another file, which is compiled for sm_80
or sm_90a, or use no instruction that is specific to an architecture."""
ON_THIS_DAY = in_turn(cuda_report.DEFAULT_ARCHITECTURES)
"""Architectures of the other sources if CI requests fewer."""

LOADS_OF_A_VECTOR = {
    "softmax_forward_kernel": 1,
    "softmax_backward_kernel": 2,
    "cross_entropy_forward_kernel": 1,
    "cross_entropy_backward_kernel": 1,
}
"""Kernels that issue all loads of a row before using one, with the number of loads per vector of a thread. For sm_80,
and for eight vectors of float32, ptxas interleaves some."""


def targets(sources):
    """Each source with each of its architectures."""
    return [
        (source, architecture)
        for source in sources
        for architecture in (ARCHITECTURES if EVERY == 1 else TWINS.get(source, ON_THIS_DAY))
    ]


@pytest.fixture(autouse=True)
def needs_nvcc():
    if _build.find_toolkit() is None:
        pytest.skip("no nvcc in CUDA_HOME, PATH or the pip package nvidia-cuda-nvcc")


def compiled(source, architecture, capsys):
    """The kernels of a source, printed, checked for spills and against the record."""
    run_by = [each for each in cuda_launches.run_by(architecture) if source in cuda_launches.sources(each)]
    kernels = cuda_report.compile_reports(source, architecture, disassemble=bool(run_by))
    with capsys.disabled():
        print("\n" + cuda_report.table(kernels))
    assert kernels
    spilling = [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.stack]
    assert not spilling, spilling
    record = static.recorded("cuda")
    comparable = disassembler() and _extension.emulating() and record["compiler"] == static.release("cuda")
    if run_by and comparable:
        reports = [report for each in run_by for report in cuda_launches.reports(source, each, kernels)]
        unknown = dict(map(static.figures, reports)).keys() - record["launches"].keys()
        assert not unknown, f"not recorded: {unknown}; run python -m benchmarks.compilers.static cuda"
        grown = static.grown(reports, record)
        assert not grown, "\n".join(grown)
    return kernels


@pytest.mark.parametrize(("operation", "architecture"), targets(row_operations("cuda")))
def test_row_kernels(operation, architecture, capsys):
    kernels = compiled(operation, architecture, capsys)
    by_vectors = {kernel.name for kernel in kernels if kernel.loads_16_bytes}
    expected = {kernel.name for kernel in kernels} & set(VECTOR_KERNELS)
    assert expected <= by_vectors, f"no 16-byte loads in {expected - by_vectors}"
    for kernel in kernels:
        layout = re.search(r"RowLayout<\S+, (\d+), (\d+), ", kernel.arguments)
        together = architecture == "90a" and kernel.code and kernel.name in LOADS_OF_A_VECTOR
        if together and layout and int(layout[1]) == 8:
            wanted = int(layout[2]) // int(layout[1]) * LOADS_OF_A_VECTOR[kernel.name]
            loads = bytes_in_flight(Flow(kernel.code)) // 16
            assert loads >= wanted - wanted // 4, kernel  # the compiler may use one early


TENSOR_CORE_SOURCES = ("attention_bfloat16", "attention_float16", "attention_short_bfloat16", "attention_short_float16")
ATTENTION_SOURCES = (*TENSOR_CORE_SOURCES, "attention_float32")


@pytest.mark.parametrize(("source", "architecture"), targets(ATTENTION_SOURCES))
def test_attention_kernels(source, architecture, capsys):
    kernels = compiled(source, architecture, capsys)
    assert any(kernel.mma for kernel in kernels) == (source in TENSOR_CORE_SOURCES)


def test_the_hopper_kernel_multiplies_by_warp_groups(capsys):
    kernels = compiled("attention_sm90", "90a", capsys)
    assert all(kernel.wgmma and not kernel.serialised for kernel in kernels)
    for kernel in kernels:
        head_dim, extras, bias, persistent = re.findall(r", (\w+)", kernel.arguments)
        kept, taken = (40, 232) if persistent == "true" else (24, 240)
        # setmaxnreg deadlocks if the launch has too few registers: 128 threads keep some, 256 take more.
        assert kernel.register_moves == 2 and 384 * kernel.registers >= 128 * kept + 256 * taken
        if not kernel.code:
            continue  # no cuobjdump
        producer, consumer = registers_by_role(kernel.code).items()
        assert producer[0] == kept >= producer[1] > 0 and consumer[0] == taken >= consumer[1] > 0, (producer, consumer)
        loop = overlapped_loop(kernel.code)
        print(kernel.arguments, loop)
        narrow = head_dim == "256" or bias == "true" or (head_dim, extras, persistent) == ("128", "true", "true")
        scores = 32 if narrow else 64  # per thread
        # plus two rescaling factors; the tanh of a softcap is an exponential too
        assert loop.overlapped == loop.exponentials == (2 * scores if extras == "true" else scores) + 2
        if extras == "false":
            most = (550, 100, 750) if persistent == "true" else (500, 60, 700)
            assert loop.instructions <= most[0] and loop.uniform <= most[1] and loop.instructions + loop.mask <= most[2]
            continue
        assert dropout_instructions(kernel.code) <= 8
        if scores == 32:
            asks_late = head_dim == "256" and bias == "true"
            most = (950, 108, 96) if asks_late else (870, 95, 100)
            assert loop.instructions <= most[0] and loop.uniform <= most[1] and loop.mask <= most[2]
