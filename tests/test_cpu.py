"""The CPU kernels: vector functions, instruction sets, threads and processes, and loading of the module."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support import fresh
from tests.support.arguments import DTYPES, dtype_id
from tests.support.day import EVERY
from tests.support.operations import EXAMPLES, row_operations
from tests.support.parity import assert_within_budget
from transformer_kernels.backends import build, cpu

if cpu.unavailable(torch.device("cpu")) is not None:
    pytest.skip("the CPU kernels are not built", allow_module_level=True)

KERNELS = cpu.load()

INFINITY = 0x7F800000


@pytest.fixture(params=KERNELS.instruction_sets)
def instruction_set(request):
    used = KERNELS.instruction_set()
    KERNELS.use(request.param)
    yield request.param
    KERNELS.use(used)


# Indices

LARGEST = 2**63 - 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_indices_within_a_range(count, dtype):
    inside = torch.arange(count).remainder(5).to(dtype)
    assert cpu.within(inside, 5) and not cpu.within(inside, int(inside.max()))
    assert cpu.within(inside.repeat_interleave(2)[::2], 5)
    for stray in (5, -1, 2**31 - 1, -(2**31), *((LARGEST, -LARGEST - 1) if dtype is torch.int64 else ())):
        for place in (0, count // 2, count - 1):
            given = inside.clone()
            given[place] = stray
            assert not cpu.within(given, 5), (stray, place)
            if dtype is torch.int64:
                assert cpu.within(given, 5, stray) and not cpu.within(given, 5, stray ^ 1)


FIELDS = {"dtype": 0, "rows": 2, "columns": 4, "scale": 1.0, "device": 0, "stream": 0}


def test_a_kernel_is_bound_to_all_fields_but_addresses():
    dy, y, dx = torch.randn(2, 4), torch.rand(2, 4), torch.empty(2, 4)
    bound = KERNELS.softmax_backward(**FIELDS)
    bound(dy, y.data_ptr(), dx)
    torch.testing.assert_close(dx, y * (dy - (dy * y).sum(-1, keepdim=True)))
    KERNELS.softmax_backward(**FIELDS | {"rows": 0})(None, None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": 0, "columns": 4, "rows": 2}, "softmax_backward: rows is missing, or not in its position"),
        (FIELDS | {"rows": 2.5}, "'float' object cannot be interpreted as an integer"),
        (FIELDS | {"row": 2}, "softmax_backward: 6 of 7 arguments are fields in order"),
        ({**FIELDS, "scale": None}, "must be real number, not NoneType"),
    ],
)
def test_fields_of_a_kernel_are_checked_by_name(fields, message):
    with pytest.raises(TypeError, match=message):
        KERNELS.softmax_backward(**fields)


@pytest.mark.parametrize(
    ("addresses", "error", "message"),
    [
        ((0, 0), TypeError, "softmax_backward takes 3 addresses, got 2"),
        ((0, 0, "0"), AttributeError, "'str' object has no attribute 'data_ptr'"),
        ((0, 0, -1), OverflowError, "negative"),
    ],
)
def test_addresses_of_a_bound_kernel_are_checked(addresses, error, message):
    with pytest.raises(error, match=message):
        KERNELS.softmax_backward(**FIELDS | {"rows": 0})(*addresses)


def test_the_widest_range_of_indices():
    ends = torch.tensor([0, LARGEST - 1])
    assert cpu.within(ends, LARGEST) and not cpu.within(ends, LARGEST - 1)
    assert not cpu.within(torch.zeros(1, dtype=torch.int64), 0)


# Vector functions

FUNCTIONS: dict[str, tuple[int, Callable[[Tensor], Tensor], float, float, float, int, int]] = {
    # index, exact function, error bounds: absolute, relative, in ulp; the range of exponents of a full check
    "exp": (0, torch.exp, 0.0, 0.0, 1.0, 0x32800000, 0x42D80000),
    "normal cumulative": (1, lambda x: 0.5 * torch.special.erfc(-x * 0.5**0.5), 0.0, 5e-6, 2.0, 0x32800000, 0x41700000),
    "normal density": (
        2,
        lambda x: torch.exp(-0.5 * x * x) * 0.3989422804014327,
        0.0,
        5e-6,
        2.0,
        0x32800000,
        0x41700000,
    ),
    "tanh": (3, torch.tanh, 0.0, 0.0, 2.0, 0x38800000, 0x41200000),
}


EXCEEDED = {
    **{("normal cumulative", name): (0x41400000, 4e-48) for name in ("plain", "avx2", "avx512")},  # subnormal results
    **{("normal density", name): (0x41400000, 3e-46) for name in ("plain", "avx2", "avx512")},
}
"""Floats that exceed a bound, found by the check of every float but not of every 4,099th, and their excess."""

BLOCK = 1 << 22
"""Every n-th block of floats is checked, and the known excesses; all by default."""


def largest_excess(name, bits):
    """By how much a function exceeds its bound, over the floats with these bits; 0 within."""
    number, exact, _, relative, places, _, _ = FUNCTIONS[name]
    x = bits.view(torch.float32)
    y = torch.empty_like(x)
    KERNELS.vector_function(number, x.data_ptr(), y.data_ptr(), x.numel())
    wide = exact(x.double())
    want = wide.float()
    finite = torch.isfinite(want)
    torch.testing.assert_close(y[~finite], want[~finite], equal_nan=True, rtol=0, atol=0)
    unit = torch.nextafter(want.abs(), torch.tensor(torch.inf)).double() - want.abs().double()
    excess = (y.double() - wide).abs() - torch.maximum(relative * wide.abs(), places * unit)
    return excess[finite].max().item() if finite.any() else 0.0


needs_measures = pytest.mark.skipif(not hasattr(KERNELS, "vector_function"), reason="needs an in-place build")


@needs_measures
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vector_functions_keep_their_bounds(name, instruction_set):
    magnitudes = torch.arange(0, INFINITY + 2**20, 4099, dtype=torch.int64)
    for bits in (magnitudes, magnitudes - 2**31):
        assert largest_excess(name, bits.to(torch.int32)) <= 0.0


@needs_measures
@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vector_functions_keep_their_bounds_everywhere(name, instruction_set):
    """Every float whose value differs from those at 0 and infinity, which the test above covers."""
    if instruction_set not in ("plain", "avx2", "avx512"):
        pytest.skip("uses the row kernels of avx512")
    *_, first, last = FUNCTIONS[name]
    known, excess = EXCEEDED.get((name, instruction_set), (first, 0.0))
    for start in {*range(first, last, BLOCK)[::-EVERY], known}:
        bits = torch.arange(start, start + BLOCK, dtype=torch.int64)
        found = max(largest_excess(name, signed.to(torch.int32)) for signed in (bits, bits - 2**31))
        assert (0.0 < found <= excess) if start == known and excess else found <= 0.0, hex(start)


# Instruction sets and threads


def results(op, tensors, options, backend):
    """Outputs and gradients."""
    leaves = {
        name: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in tensors.items()
    }
    torch.manual_seed(3)
    outputs = getattr(tk, op)(**leaves, **options, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(4)
    cotangents = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs]
    torch.autograd.backward(outputs, cotangents)
    gradients = [x.grad for x in leaves.values() if isinstance(x, Tensor) and x.grad is not None]
    return [*(each.detach() for each in outputs), *gradients]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(6, 1), (10, 37), (150, 128), (4, 515)], ids=str)
@pytest.mark.parametrize("op", row_operations("cpu"))
def test_each_instruction_set_is_within_the_budget(op, shape, dtype, instruction_set):
    rows, columns = shape
    tensors, options = (
        EXAMPLES[op].make(rows, max(columns, 2) if op == "rotary" else columns, dtype),
        EXAMPLES[op].options,
    )
    if op == "cross_entropy":
        tensors["targets"] = tensors["targets"].clamp(max=columns - 1)
    wide = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    ours = results(op, tensors, options, "cpu")
    exact, eager = results(op, wide, options, "torch"), results(op, tensors, options, "torch")
    size = max(each.abs().max().item() for each in exact)
    for i, (got, want, plain) in enumerate(zip(ours, exact, eager, strict=True)):
        assert_within_budget(f"{op} result {i}", got, want, plain, 3.0, dtype, magnitude=size)


@pytest.mark.parametrize("op", row_operations("cpu"))
def test_threads_do_not_change_the_bits(op, instruction_set):
    tensors, threads = EXAMPLES[op].make(700, 264), torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            seen.append(results(op, tensors, EXAMPLES[op].options, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("op", ["softmax", "gelu", "layer_norm"])
def test_results_past_the_caches_have_the_bits_of_small_ones(op, instruction_set):
    """A result of 8 MiB is written by other instructions than one of its rows."""
    x = torch.randn(33, 1 << 16, requires_grad=True)
    dy = torch.randn_like(x)
    options = {"weight": dy[0], "bias": dy[1]} if op == "layer_norm" else {}
    y = getattr(tk, op)(x, **options, backend="cpu")
    (dx,) = torch.autograd.grad(y, x, dy)
    for row in (0, 32):
        one = x[row : row + 1].detach().requires_grad_()
        expected = getattr(tk, op)(one, **options, backend="cpu")
        assert torch.equal(y[row], expected[0])
        assert torch.equal(dx[row], torch.autograd.grad(expected, one, dy[row : row + 1])[0][0])


def test_an_unknown_instruction_set_is_refused():
    used = KERNELS.instruction_set()
    with pytest.raises(ValueError, match=r"that this processor has and that was built \(plain.*\); got avx9000"):
        KERNELS.use("avx9000")
    assert KERNELS.instruction_set() == used


def test_a_level_that_the_processor_lacks_is_refused():
    levels = list(build.CPU_LEVELS)
    if KERNELS.processor == levels[-1]:
        pytest.skip("this processor has every level")
    lacking = levels[levels.index(KERNELS.processor) + 1]
    with pytest.raises(ValueError, match=f"got {lacking}, which this processor lacks: unset TRANSFORMER_"):
        KERNELS.use(lacking)


# Processes


def test_the_environment_names_the_instruction_set():
    code = "from transformer_kernels.backends import cpu; print(cpu.load().instruction_set())"
    assert fresh.python(code, TRANSFORMER_KERNELS_CPU_ISA="plain").stdout == "plain\n"
    refused = fresh.python(code, TRANSFORMER_KERNELS_CPU_ISA="mmx")
    assert refused.returncode != 0 and "got mmx" in refused.stderr


def test_a_forked_process_computes_the_same():
    """GNU's OpenMP has no threads in the child; a parallel region would deadlock."""
    code = """
import os, torch, transformer_kernels as tk
torch.set_num_threads(2)
x = torch.randn(2000, 512)
want = tk.gelu(x, backend="cpu")
child = os.fork()
if child == 0:
    same = tk.gelu(x, backend="cpu").numpy().tobytes() == want.numpy().tobytes()  # PyTorch itself would wait here
    os._exit(0 if same else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    fresh.checked(code)


# The module


def test_kernels_leave_nothing_that_the_linker_could_share(tmp_path):
    """The linker keeps one copy of an inline function: one compiled for AVX-512 would crash other processors."""
    source = build.CSRC / "cpu" / "rows" / "norm.cpp"
    if not source.is_file():
        pytest.skip("no sources")
    weak = defined_weakly(source, tmp_path)
    shared = [symbol for symbol in weak if "transformer_kernels::avx512::" not in symbol]
    assert not [symbol for symbol in shared if not symbol.startswith("DW.ref.")]  # those are addresses, not code


def defined_weakly(source, folder):
    compiler = build.find_host_compiler().split()
    flags = ["-std=c++17", "-O0", "-fPIC", "-c", "-DTK_LEVEL=avx512", *build.CPU_LEVELS["avx512"].split()]
    target = folder / "kernel.o"
    if "avx512" not in build._levels_of(compiler):
        pytest.skip("the compiler has no AVX-512")
    subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True, capture_output=True)
    listed = subprocess.run(["nm", "-C", "--defined-only", str(target)], check=True, capture_output=True, text=True)
    return [line.split(" ", 2)[2] for line in listed.stdout.splitlines() if line.split(" ", 2)[1] in "WVu"]


def test_attention_fetches_while_it_multiplies():
    """A compiler may remove calls of functions that only prefetch: GCC did, in the whole backward pass."""
    fetches = instructions_of_functions(Path(KERNELS.__file__), "prefetch")
    for level in KERNELS.instruction_sets:
        products = {name: count for name, count in fetches.items() if f"transformer_kernels::{level}::strip<" in name}
        assert len(products) >= 4, level
        assert all(products.values()), [name for name, count in products.items() if not count]
        inlined = re.compile(rf"::{level}::.*(::fetch_ahead\(|::backward_task<)")  # where it may be inlined
        assert max(count for name, count in fetches.items() if inlined.search(name)) >= 10, level


def test_ends_of_rows_stay_in_registers():
    """Without mask registers, GCC copied the tail of each row with calls of memcpy."""
    calls = instructions_of_functions(Path(KERNELS.__file__), "memcpy")
    kernels = re.compile(r"::avx\w+::.*(norm_|softmax_|cross_entropy_|embedding_|::strip<)")
    found = {name: count for name, count in calls.items() if kernels.search(name)}
    if KERNELS.instruction_sets == ["plain"]:
        pytest.skip("no vectors beyond those of every processor")
    assert len(found) >= 20
    assert not any(found.values()), [name for name, count in found.items() if count]


def instructions_of_functions(module, kind):
    """The number of occurrences of `kind` in the code of each function of a library; the minimum for equal names."""
    if platform.machine() not in ("x86_64", "AMD64") or not shutil.which("objdump"):
        pytest.skip("no objdump for this processor")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--demangle", str(module)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions: dict[str, int] = {}
    for text in re.split(r"^[0-9a-f]+ <", listed, flags=re.MULTILINE)[1:]:
        name, _, code = text.partition(">:\n")
        functions[name] = min(functions.get(name, sys.maxsize), code.count(kind))
    if not any("transformer_kernels::" in name for name in functions):
        pytest.skip("the module was stripped of its symbols")
    return functions


def test_a_module_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "_module", None)
    monkeypatch.setattr(cpu, "_failure", None)
    monkeypatch.setattr(cpu._build, "cpu_source_hash", lambda: "0" * 64)
    with pytest.raises(tk.BackendUnavailable, match=r"built from other sources .* run pip install") as error:
        tk.gelu(torch.ones(3), backend="cpu")
    assert isinstance(error.value.__cause__, ImportError)
    assert tk.explain("gelu", torch.ones(3)).chosen == "torch"


def test_a_missing_module_is_no_error_for_auto(monkeypatch):
    monkeypatch.setattr(cpu, "_module", None)
    monkeypatch.setattr(cpu, "_failure", None)
    monkeypatch.setitem(sys.modules, "transformer_kernels._cpu", None)
    torch.testing.assert_close(tk.gelu(torch.ones(3)), tk.gelu(torch.ones(3), backend="torch"))
    with pytest.raises(tk.BackendUnavailable, match="CPU kernels are not built"):
        tk.gelu(torch.ones(3), backend="cpu")


def test_auto_asks_the_cpu_kernels_first():
    assert tk.explain("gelu", torch.ones(3)).chosen == "cpu"
    assert tk.explain("gelu", torch.ones(3).double()).chosen == "torch"


def test_a_bias_gradient_of_many_rows_is_a_sum_in_blocks():
    """Its error is a unit of rounding for rows of one sign, and an infinity stays one."""
    generator = torch.Generator().manual_seed(0)
    x, weight, rows = (torch.randn(*shape, generator=generator) for shape in ((4096, 8), (256, 8), (4096, 256)))
    rows.abs_()
    bias = torch.zeros(256, requires_grad=True)

    def gradient():
        return torch.autograd.grad(tk.linear(x, weight, bias, backend="cpu"), bias, rows)[0]

    exact = rows.double().sum(0)
    assert float(((gradient() - exact) / exact).abs().max()) < 2.0**-23
    rows[7, 3] = torch.inf
    found = gradient()
    assert found.isinf().nonzero().tolist() == [[3]] and not found.isnan().any()
