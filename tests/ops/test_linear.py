"""A linear layer in every backend that supports it: forward and all gradients against the reference in float64."""

from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.operations import without_plans
from tests.support.parity import check_parity
from transformer_kernels.backends import cpu
from transformer_kernels.ops.linear import prepare

OP = "linear"
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh"]


@pytest.fixture(params=["as chosen", "PyTorch's products"], autouse=True)
def products(request, backend, monkeypatch):
    """This package's products are used for small weights; all weights of these tests are small."""
    if request.param == "PyTorch's products":
        if backend != "cpu":
            pytest.skip("only the cpu backend selects products")
        chooser = import_module("transformer_kernels.ops.linear._cpu")
        monkeypatch.setattr(chooser, "LIMITS", {})
    with without_plans():  # which keep the selection
        yield


def make(M, N, K, dtype, device, bias=True):
    return {
        "x": normal(M, K, dtype=dtype, device=device, seed=1),
        "weight": normal(N, K, dtype=dtype, device=device, seed=2),
        "bias": normal(N, dtype=dtype, device=device, seed=3) if bias else None,
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 65, 128), (97, 601, 31), (100, 96, 64), (2100, 130, 17), (256, 512, 1024)], ids=str
)
def test_matches_reference(backend, dtype, device, sizes, activation):
    check_parity("linear", backend, make(*sizes, dtype, device), {"activation": activation})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows(backend, dtype, device, rows):
    """The weight is large enough for streams, with a tail of three columns and, in depth, of two."""
    check_parity("linear", backend, make(rows, 2051, 130, dtype, device), {"activation": None if rows == 1 else "gelu"})


def test_without_a_bias(backend, dtype, device):
    check_parity("linear", backend, make(40, 33, 20, dtype, device, bias=False), {"activation": "relu"})


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_the_wanted_gradients(backend, dtype, device, wanted):
    tensors = make(40, 33, 20, dtype, device)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == wanted)
    check_parity("linear", backend, tensors, {"activation": "gelu"})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_takes_its_dtype(backend, stored, device):
    tensors = {
        name: x.detach().to(stored).requires_grad_() for name, x in make(8, 33, 20, torch.float32, device).items()
    }
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = tk.linear(**tensors, backend=backend)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and all(x.grad.dtype is stored for x in tensors.values())
    wide = {name: x.detach().float() for name, x in tensors.items()}
    torch.testing.assert_close(
        y.float(), torch.nn.functional.linear(**{"input": wide.pop("x"), **wide}), rtol=0.03, atol=0.1
    )


def test_a_nan_stays_in_its_row(backend, device):
    tensors = make(20, 33, 20, torch.float32, device)
    with torch.no_grad():
        tensors["x"][3] = float("nan")
    y = tk.linear(**tensors, activation="relu", backend=backend)
    assert y[3].isnan().all() and torch.isfinite(y[4:]).all() and torch.isfinite(y[:3]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_larger_weights_of_many_rows(backend, dtype, device):
    if backend != "cpu":
        pytest.skip("only the cpu backend has a threshold on rows")
    check_parity("linear", backend, make(520, 700, 751, dtype, device), {"activation": "relu"})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_larger_weights_than_the_limit_are_multiplied_by_pytorch(backend, device, activation, monkeypatch):
    if backend != "cpu":
        pytest.skip("only the cpu backend has a threshold on weights")
    linear_cpu = import_module("transformer_kernels.ops.linear._cpu")
    monkeypatch.setattr(linear_cpu, "LIMITS", {(torch.float32, "all", ""): ((0, 65 * 32),)})
    names = {"linear_forward", "linear_backward_data", "linear_backward_weight"}
    for columns, wanted in ((65, names), (66, set())):
        tensors, calls = make(37, columns, 32, torch.float32, device), []
        with cpu.recorded(calls):
            y = tk.linear(**tensors, activation=activation, backend=backend)
            y.sum().backward()
        assert {kernel.__name__ for kernel, _ in calls} & names == wanted
        check_parity("linear", backend, tensors, {"activation": activation})


def test_a_weight_gradient_of_more_rows_than_a_task_owns(backend, device):
    """They are computed in groups; 1,008 rows of dweight are the most of one on any number of threads."""
    if backend != "cpu":
        pytest.skip("PyTorch's products are not tested here")
    check_parity("linear", backend, make(101, 4 * 1008 + 11, 70, torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_weight_of_more_elements_than_are_packed_at_a_time(backend, dtype, device, monkeypatch):
    """1 << 20 floats: y is computed in parts of its columns, dx in parts of its sums. The bits of y do not change."""
    if backend != "cpu":
        pytest.skip("PyTorch's products are not tested here")
    linear_cpu = import_module("transformer_kernels.ops.linear._cpu")
    monkeypatch.setattr(linear_cpu, "LIMITS", {(dtype, "all", ""): ((0, 1 << 23),)})
    tensors = make(301, 4001, 301, dtype, device)  # two parts of each; with fewer rows x is packed
    check_parity("linear", backend, tensors, {"activation": "gelu"})
    y = tk.linear(**tensors, activation="gelu", backend=backend)
    for columns in (slice(0, 2000), slice(2001, None)):
        smaller = {**tensors, "weight": tensors["weight"][columns], "bias": tensors["bias"][columns]}
        assert torch.equal(tk.linear(**smaller, activation="gelu", backend=backend), y[:, columns])


def test_a_small_batch_has_the_bits_of_a_large_one(backend, device, monkeypatch):
    """Up to 64 rows, or 256 with a large weight, x is packed and not the weight."""
    if backend != "cpu":
        pytest.skip("PyTorch's products are not tested here")
    linear_cpu = import_module("transformer_kernels.ops.linear._cpu")
    monkeypatch.setattr(linear_cpu, "LIMITS", {(torch.float32, "all", ""): ((0, 1 << 20),)})
    for columns in (43, 601):
        tensors = make(300, columns, 515, torch.float32, device)
        for activation in (None, "gelu"):
            y = tk.linear(**tensors, activation=activation, backend=backend)
            for rows in (5, 16, 64, 65, 256, 257):
                smaller = {**tensors, "x": tensors["x"][:rows]}
                assert torch.equal(tk.linear(**smaller, activation=activation, backend=backend), y[:rows])


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_a_transposed_weight_is_read_in_place(backend, dtype, device, rows):
    """In float32 without an activation; of as many elements as small batches read in streams where they are rows."""
    tensors = make(rows, 2051, 130, dtype, device)
    tensors["weight"] = tensors["weight"].detach().t().contiguous().t().requires_grad_()
    for activation in (None, "gelu"):
        call = prepare(**tensors, activation=activation)
        copied = activation is not None or dtype is not torch.float32
        assert (call.weight.data_ptr() != tensors["weight"].data_ptr()) == copied
        check_parity("linear", backend, tensors, {"activation": activation})


@pytest.mark.parametrize("sizes", [(1001, 131, 71), (1001, 40, 300)], ids=str)
def test_threads_do_not_change_the_bits_of_bfloat16(backend, sizes):
    """Under autocast, with float32 weights; odd numbers of rows and columns give half a pair.

    In the second case the same rows of dweight are shared by threads.
    """
    if backend != "cpu":
        pytest.skip("PyTorch's products are not tested here")
    tensors = {name: each.requires_grad_() for name, each in make(*sizes, torch.float32, "cpu").items()}
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with torch.autocast("cpu", torch.bfloat16):
                y = tk.linear(**tensors, activation="gelu", backend=backend)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), list(tensors.values()))])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))
    x, weight, bias = (each.bfloat16().double() for each in tensors.values())
    exact = torch.nn.functional.gelu(x @ weight.t() + bias.detach())
    assert (results[0][0] - exact).abs().max() < 1e-2 * exact.abs().max()
    assert results[0][2].dtype is torch.float32


@pytest.mark.parametrize(("instruction_set", "ours"), [("avx2", True), ("avx512_bf16", True), ("amx", False)])
def test_tiles_are_left_to_pytorch(backend, request, monkeypatch, instruction_set, ours):
    if backend != "cpu" or "PyTorch's products" in request.node.name:
        pytest.skip("only the cpu backend as chosen")
    chooser = import_module("transformer_kernels.ops.linear._cpu")
    loaded = Mock(vendor="GenuineIntel", instruction_set=lambda: instruction_set)
    monkeypatch.setattr(chooser.cpu, "load", lambda: loaded)
    operation = import_module("transformer_kernels.ops.linear")
    assert chooser.fuses(operation.prepare(**make(40, 33, 20, torch.bfloat16, "cpu"))) is ours
    assert chooser.fuses(operation.prepare(**make(511, 1024, 1024, torch.bfloat16, "cpu"))) is False
    assert chooser.fuses(operation.prepare(**make(512, 1024, 1024, torch.bfloat16, "cpu"))) is ours


def test_long_sums_are_made_of_short_ones(backend, request):
    """One float32 register for 512 products would give 4.1e-7."""
    if backend != "cpu" or "PyTorch's products" in request.node.name:
        pytest.skip("the bound is that of this package's products")
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 1024, generator=generator), torch.randn(256, 1024, generator=generator)
    exact = x.double() @ weight.double().T
    error = tk.linear(x, weight, backend="cpu").double() - exact
    assert error.norm() / exact.norm() < 3.4e-7


def test_the_processor_is_that_of_the_instruction_set_in_use():
    """One module that changes its instruction set: nothing is cached for the process."""
    processor = import_module("transformer_kernels.ops.linear._cpu").processor
    levels = ("avx2", "avx512", "amx", "plain", "avx512_bf16")
    for vendor, name in (("AuthenticAMD", "AMD"), ("GenuineIntel", "Intel"), ("HygonGenuine", "")):
        kernels = SimpleNamespace(vendor=vendor, instruction_set=iter(levels).__next__)
        assert [processor(kernels) for _ in levels] == ["", name, "AMX", "", name]
