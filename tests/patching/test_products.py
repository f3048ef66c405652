"""Products of patched layers by csrc/cpu/products: those of torch, in values, gradients and second derivatives."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.support.transformers_models import inputs, make, one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.backends import cpu
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.patching import _products
from transformer_kernels.patching._output import OutputLayer
from transformer_kernels.patching._swap import swap
from transformer_kernels.patching._transformers import Conv1D

ROWS = linear_cpu.MIN_ROWS_ON_AMX + 87
PRODUCTS = ["linear_forward", "linear_backward_data", "linear_backward_weight"]

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


@pytest.fixture(autouse=True)
def fresh_decisions():
    """Of other processors and limits."""
    linear_cpu.few_rows.cache_clear()
    yield
    linear_cpu.few_rows.cache_clear()


class ByColumns(nn.Module):
    """x W + b as transformers' Conv1D computes it."""

    def __init__(self, K: int, N: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def layers(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = ByColumns(37, 70) if kind == "Conv1D" else nn.Linear(37, 70)
    ours = copy.deepcopy(eager)
    swap(ours, Conv1D if kind == "Conv1D" else OutputLayer, "cpu")
    return eager, ours


def exact(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return copy.deepcopy(layer).double(), x.detach().double().requires_grad_()


@pytest.mark.parametrize("kind", ["Conv1D", "output"])
def test_values_and_gradients_are_the_layers_own(kind: str) -> None:
    eager, ours = layers(kind)
    x = torch.randn(32, 67, 37, requires_grad=True)
    dy = torch.randn(32, 67, 70)
    exact_layer, exact_x = exact(eager, x)
    with cpu.recorded(calls := []):
        results = [
            (y := layer(given), *torch.autograd.grad(y, [given, *layer.parameters()], dy.to(y.dtype)))
            for layer, given in ((ours, x), (eager, x), (exact_layer, exact_x))
        ]
    for mine, theirs, wanted in zip(*results, strict=True):
        assert (mine - wanted).abs().max() <= 2 * (theirs - wanted).abs().max() + 1e-6
    by_columns = [PRODUCTS[1], PRODUCTS[0], PRODUCTS[2]]
    assert [kernel.__name__ for kernel, _ in calls] == (by_columns if kind == "Conv1D" else PRODUCTS)


@pytest.mark.parametrize("kind", ["Conv1D", "output"])
def test_second_derivatives(kind: str) -> None:
    outcomes = []
    for layer in layers(kind):
        x = torch.randn(2, ROWS, 37, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dx, dweight = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight], create_graph=True)
        outcomes.append(torch.autograd.grad(dx.square().sum() + dweight.square().sum(), [x, layer.weight]))
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_linear_layers_of_a_patched_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six in each of BERT's two layers, one before the output layer, and the output layer; unpatched, PyTorch's own."""
    monkeypatch.setattr(linear_cpu, "MIN_ROWS", 1)
    monkeypatch.setattr(linear_cpu, "MIN_ROWS_ON_AMX", 1)
    eager, batch = make("bert"), inputs("bert", padding=None)
    ours, counts, losses = copy.deepcopy(eager), [], []
    report = tk.patch(ours, backend="cpu")
    assert not any(row.kind == "Linear" for row in report.rows if row.operation == "linear")
    for model in (ours, eager):
        with cpu.recorded(calls := []):
            losses.append(model(**batch).loss)
            losses[-1].backward()
        counts.append(sum(kernel.__name__ == "linear_forward" for kernel, _ in calls))
    assert counts == [14, 0]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    tk.unpatch(ours)
    assert {type(each) for each in ours.modules() if isinstance(each, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize(("processor", "expected"), [("", 0), ("AMD", 1)])
def test_inference_is_ours_where_mkl_is_slow(monkeypatch: pytest.MonkeyPatch, processor: str, expected: int) -> None:
    monkeypatch.setattr(linear_cpu, "processor", lambda kernels: processor)
    layer, x = nn.Linear(37, 70), torch.randn(ROWS, 37)
    swap(layer, _products.Linear, "cpu")
    with torch.no_grad(), cpu.recorded(calls := []):
        given = layer(x)
    assert sum(kernel.__name__ == "linear_forward" for kernel, _ in calls) == expected
    torch.testing.assert_close(given, nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("vendor", "level", "recorded", "fewest"),
    [
        ("GenuineIntel", "avx512", True, 256),
        ("GenuineIntel", "amx", True, 2048),
        ("GenuineIntel", "avx512", False, linear_cpu.ANY),
        ("AuthenticAMD", "avx2", True, 256),
        ("AuthenticAMD", "avx512", True, 32),
        ("AuthenticAMD", "avx512", False, 64),
    ],
)
def test_few_rows(monkeypatch: pytest.MonkeyPatch, vendor: str, level: str, recorded: bool, fewest: int) -> None:
    monkeypatch.setattr(cpu, "_module", Mock(vendor=vendor, instruction_set=lambda: level))
    weight = torch.empty(256, 64)
    assert linear_cpu.few_rows(weight.numel(), recorded) == fewest
    assert linear_cpu.few_rows(1024, recorded) == max(fewest, 256)  # 2^18 products with 256 rows
    for rows in (fewest - 1, fewest):
        x = torch.empty(min(rows, 4096), 64)
        found = linear_cpu.multiplies(x, weight, recorded)
        assert found == (rows == fewest < linear_cpu.ANY)


@pytest.mark.parametrize("change", ["few rows", "another type", "autocast", "torch", "a view"])
def test_what_goes_to_pytorch(change: str) -> None:
    x, weight, backend = torch.randn(ROWS, 37), torch.randn(37, 70), "cpu"
    assert _products.are_ours(x, weight, backend)
    if change == "few rows":
        x = x[: linear_cpu.MIN_ROWS_ON_AMD - 1]
    elif change == "another type":
        x, weight = x.double(), weight.double()
    elif change == "a view":
        weight = weight.t()
    elif change == "torch":
        backend = "torch"
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        assert not _products.are_ours(x, weight, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_under_autocast(dtype: torch.dtype) -> None:
    """As exact as PyTorch's to bfloat16's rounding, in its dtypes; the gradient of the weight is not rounded."""
    torch.manual_seed(0)
    layer, dy = nn.Linear(37, 70), torch.randn(ROWS, 70)
    x = torch.randn(ROWS, 37).to(dtype).requires_grad_()
    outcomes = []
    with cpu.recorded(calls := []):
        for block in (tk.accelerate(backend="cpu"), nullcontext()):
            with block, torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            outcomes.append((y, *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))))
    if linear_cpu.processor(cpu.load()) != "AMX":  # where oneDNN multiplies, all but the gradient of the weight
        assert [kernel.__name__ for kernel, _ in calls] == PRODUCTS
    exact_layer, exact_x = exact(layer, x)
    y = exact_layer(exact_x)
    wanted = (y, *torch.autograd.grad(y, [exact_x, *exact_layer.parameters()], dy.bfloat16().double()))
    for mine, theirs, true in zip(*outcomes, wanted, strict=True):
        assert mine.dtype is theirs.dtype
        assert (mine - true).abs().max() <= 1.1 * (theirs - true).abs().max() + 1e-6


def test_which_products_under_autocast_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cpu, "processor", lambda kernels: "")
    x, weight = torch.randn(ROWS, 37), torch.randn(70, 37)
    cases = {
        "few rows": (x[: linear_cpu.MIN_ROWS - 1], weight),
        "float64": (x.double(), weight),
        "integers": (x.long(), weight),
    }
    cases |= {"a view": (x, torch.randn(37, 70).t()), "another weight": (x, weight.bfloat16())}
    with torch.autocast("cpu", torch.bfloat16):
        assert _products.linear_is_ours(x, weight, "auto") and _products.linear_is_ours(x.bfloat16(), weight, "auto")
        assert not [name for name, case in cases.items() if _products.linear_is_ours(*case, "auto")]
        with torch.no_grad():  # PyTorch's forward alone is the faster one where MKL is not slow
            assert not _products.linear_is_ours(x, weight, "auto")
        monkeypatch.setattr(linear_cpu, "processor", lambda kernels: "AMX")
        assert not _products.linear_is_ours(x, weight, "auto")
    with torch.autocast("cpu", torch.float16):
        assert not _products.linear_is_ours(x, weight, "auto")


def test_which_products_without_gradients_under_autocast_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cpu, "processor", lambda kernels: "AMD")
    linear_cpu.few_rows.cache_clear()
    x, small, large = torch.randn(512, 128), torch.randn(256, 128), torch.randn(1024, 128)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for rows, weight in ((64, small), (512, large)):
                assert _products.linear_is_ours(x[:rows], weight, "auto")
                assert _products.linear_is_ours(x[:rows].bfloat16(), weight, "auto")
                assert not _products.linear_is_ours(x[1:rows], weight, "auto")
    finally:
        linear_cpu.few_rows.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "level", "rows", "largest"),
    [
        ("GenuineIntel", "avx512", 31, 1 << 16),
        ("GenuineIntel", "avx512", 32, 1 << 17),
        ("GenuineIntel", "avx2", 256, 1 << 19),
        ("AuthenticAMD", "avx512", 31, 1 << 19),
        ("AuthenticAMD", "avx512", 32, 1 << 26),
        ("AuthenticAMD", "avx2", 256, 1 << 19),
        ("AuthenticAMD", "avx512_bf16", 256, 1 << 26),
        ("", "plain", 256, 1 << 19),
    ],
)
def test_the_largest_weight(monkeypatch: pytest.MonkeyPatch, vendor: str, level: str, rows: int, largest: int) -> None:
    monkeypatch.setattr(cpu, "_module", Mock(vendor=vendor, instruction_set=lambda: level))
    x = torch.empty(rows, 8)
    assert linear_cpu._limit(x, "all") == largest


@pytest.mark.parametrize("wanted", [("weight",), ("bias",), ("weight", "bias"), ("x",)])
def test_gradients_of_a_part_of_conv1d(wanted: tuple[str, ...]) -> None:
    """Among them the weight's, of a layer on inputs that need none: the first one on frozen embeddings."""
    gradients = []
    for layer in layers("Conv1D"):
        x = torch.randn(2, ROWS, 37, generator=torch.Generator().manual_seed(1))
        leaves = {"x": x, "weight": layer.weight, "bias": layer.bias}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in wanted)
        layer(x).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves.values()])
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
