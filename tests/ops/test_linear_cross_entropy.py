"""The output layer and its loss in every backend: in one chunk, as a linear layer and a loss, and in several."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import python_ref
import transformer_kernels as tk
from python_ref import ops as reference
from tests.support.arguments import normal
from tests.support.parity import check_parity
from transformer_kernels.backends import dispatch
from transformer_kernels.ops.loss import _calls

OP = "linear_cross_entropy"


@pytest.fixture(params=[None, 16], ids=["at once", "in chunks"])
def rows_at_once(request, monkeypatch, unplanned):
    if request.param is not None:
        monkeypatch.setattr(_calls, "rows_at_once", lambda *_: request.param)
    yield request.param


@pytest.fixture
def in_chunks(monkeypatch, unplanned):
    monkeypatch.setattr(_calls, "rows_at_once", lambda *_: 16)


def make(dtype, device, rows, classes, width=24, bias=True):
    generator = torch.Generator().manual_seed(rows + classes)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    hidden = torch.rand(rows, generator=generator) < 0.2
    return {
        "x": normal(rows, width, dtype=dtype, device=device, seed=1),
        "weight": normal(classes, width, dtype=dtype, device=device, seed=2).detach().mul_(0.3).requires_grad_(),
        "targets": targets.masked_fill(hidden, -100).to(device),
        "bias": normal(classes, dtype=dtype, device=device, seed=3) if bias else None,
    }


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (17, 65), (40, 128), (33, 1001)])
def test_matches_reference_over_shapes(backend, dtype, device, rows, classes, smoothing):
    check_parity(OP, backend, make(dtype, device, rows, classes), {"label_smoothing": smoothing})


OPTIONS: dict[str, dict[str, Any]] = {
    "class_weight": {"class_weight": torch.linspace(0.0, 0.02, 65)},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 4.0},
    "all": {"class_weight": torch.linspace(0.0, 2.0, 65), "z_loss": 0.01, "softcap": 4.0, "label_smoothing": 0.1},
}


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", OPTIONS)
def test_options_match_the_reference(backend, device, given, reduction):
    """Also class weights with a sum below 1: the denominator of a mean is not a number of rows."""
    options = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in OPTIONS[given].items()}
    check_parity(OP, backend, make(torch.float32, device, 37, 65), {**options, "reduction": reduction})


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("classes", [33001, 50257])
def test_wide_vocabularies(backend, device, classes):
    check_parity(OP, backend, make(torch.float32, device, 20, classes, width=8), {"reduction": "sum"})


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_bias(backend, dtype, device, reduction):
    check_parity(OP, backend, make(dtype, device, 37, 30, bias=False), {"reduction": reduction})


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("only", ["x", "weight", "bias"])
def test_only_the_wanted_gradients(backend, device, only):
    tensors = make(torch.float32, device, 37, 30)
    for name in {"x", "weight", "bias"} - {only}:
        tensors[name].requires_grad_(False)
    check_parity(OP, backend, tensors)


@pytest.mark.usefixtures("in_chunks")
def test_losses_without_gradients_are_the_same(backend, dtype, device):
    tensors = make(dtype, device, 37, 65)
    with torch.no_grad():
        without = tk.linear_cross_entropy(**tensors, backend=backend)
    torch.testing.assert_close(without, tk.linear_cross_entropy(**tensors, backend=backend).detach())


@pytest.mark.usefixtures("rows_at_once")
def test_matches_pytorch_over_batched_rows_of_any_layout(backend, device):
    tensors = make(torch.float32, device, 42, 50)
    tensors["x"] = normal(24, 6, 7, dtype=torch.float32, device=device).detach().permute(1, 2, 0).requires_grad_()
    tensors["weight"] = normal(24, 50, dtype=torch.float32, device=device).detach().T.requires_grad_()
    tensors["targets"] = tensors["targets"].view(6, 7).int()
    results = []
    for ours in (True, False):
        leaves = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in tensors.items()}
        if ours:
            loss = tk.linear_cross_entropy(**leaves, label_smoothing=0.1, backend=backend)
        else:
            logits = F.linear(leaves["x"], leaves["weight"], leaves["bias"]).flatten(0, 1)
            loss = F.cross_entropy(logits, leaves["targets"].flatten().long(), label_smoothing=0.1)
        (3.0 * loss).backward()
        results.append([loss.detach(), *(leaves[name].grad for name in ("x", "weight", "bias"))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("rows_at_once")
def test_all_rows_ignored(backend, device):
    tensors = make(torch.float32, device, 37, 30)
    tensors["targets"].fill_(-100)
    loss = tk.linear_cross_entropy(**tensors, backend=backend)
    loss.backward()
    assert math.isnan(loss.item())
    assert all((tensors[name].grad == 0).all() for name in ("x", "weight", "bias"))


@pytest.mark.usefixtures("rows_at_once")
def test_a_nan_gradient_of_an_ignored_row_does_not_get_out(backend, device):
    tensors = make(torch.float32, device, 37, 30)
    tensors["targets"][-1] = -100
    ignored = tensors["targets"] == -100
    loss = tk.linear_cross_entropy(**tensors, reduction="none", backend=backend)
    loss.backward(torch.where(ignored, math.nan, 1.0))
    assert all(torch.isfinite(tensors[name].grad).all() for name in ("x", "weight", "bias"))


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(backend, dtype, device, reduction):
    tensors = make(dtype, device, 0, 30)
    loss = tk.linear_cross_entropy(**tensors, reduction=reduction, backend=backend)
    loss.sum().backward()
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert math.isnan(loss.item()) if reduction == "mean" else not loss.any()
    assert tensors["x"].grad.shape == (0, 24) and (tensors["weight"].grad == 0).all()


@pytest.mark.usefixtures("in_chunks")
def test_chunks_are_summed_in_float32(device):
    """512 chunks add seven each to dbias and dweight, which bfloat16 rounds away above 2048."""
    rows, dtype = 16 * 512, torch.bfloat16
    x = torch.ones(rows, 8, dtype=dtype, device=device)
    weight, bias = (torch.zeros(*shape, dtype=dtype, device=device, requires_grad=True) for shape in ((2, 8), (2,)))
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    targets[::16] = 1
    tk.linear_cross_entropy(x, weight, targets, bias, reduction="sum", backend="torch").backward()
    assert bias.grad.tolist() == [-rows / 2 + 512, rows / 2 - 512]
    assert torch.equal(weight.grad, bias.grad[:, None].expand(2, 8))


@pytest.mark.usefixtures("rows_at_once")
def test_retain_graph_and_a_second_backward(backend, device):
    tensors = make(torch.float32, device, 37, 30)
    inputs = [tensors[name] for name in ("x", "weight", "bias")]
    loss = tk.linear_cross_entropy(**tensors, backend=backend)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, inputs)
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(2.0 * one, two)


@pytest.mark.usefixtures("rows_at_once")
def test_double_backward_is_right(device, unplanned):
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = make(torch.float32, device, 37, 30)
        leaves = {
            name: x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in tensors.items()
        }
        function = tk.linear_cross_entropy if dtype is torch.float32 else python_ref.ops.linear_cross_entropy
        (dx,) = torch.autograd.grad(function(**leaves), leaves["x"], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves["weight"])[0].double())
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("rows_at_once")
def test_float16_gradients_survive_loss_scaling(device):
    """A mean over many rows of a wide vocabulary: 1 / (rows * classes) underflows in float16 unless scaled."""
    tensors = make(torch.float16, device, 1000, 3000)
    tensors["weight"].data.mul_(0.01)
    tk.linear_cross_entropy(**tensors, backend="torch").mul(2.0**16).backward()
    exact = {name: value if value is None else value.detach().double() for name, value in tensors.items()}
    exact["targets"] = tensors["targets"]
    exact["bias"].requires_grad_()
    reference.linear_cross_entropy(**exact).mul(2.0**16).backward()
    torch.testing.assert_close(tensors["bias"].grad.double(), exact["bias"].grad, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype(device, dtype):
    tensors = make(torch.float32, device, 37, 65)
    with torch.autocast(device.type, dtype=dtype):
        loss = tk.linear_cross_entropy(**tensors, backend="torch")
    loss.backward()
    low = {name: value if name == "targets" else value.detach().to(dtype) for name, value in tensors.items()}
    expected = tk.linear_cross_entropy(**low, backend="torch")
    assert loss.dtype is torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name in ("x", "weight", "bias"):
        gradient = tensors[name].grad
        assert gradient.dtype is torch.float32
        exact = make(torch.float32, device, 37, 65)
        reference.linear_cross_entropy(**exact).backward()
        torch.testing.assert_close(gradient, exact[name].grad, atol=2e-3, rtol=5e-2)


class LargestResult(TorchDispatchMode):
    """Records the largest number of bytes allocated by an operator."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [value.numel() * value.element_size() for value in tree_leaves(result) if isinstance(value, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


@pytest.mark.parametrize("wanted", [True, False], ids=["with gradients", "without"])
def test_never_holds_all_the_logits(device, wanted):
    rows, classes, width = 1100, 16411, 8
    tensors = make(torch.float32, device, rows, classes, width)
    module = dispatch.kernels_of(dispatch.OPERATIONS[OP], "torch")  # the chunks are the same in every backend
    leaves = [tensors[name].detach() for name in ("x", "weight", "targets", "bias")]
    call = _calls.LinearCrossEntropyCall(*leaves, -100, 0.0, "mean", torch.float32, [wanted] * 3)
    chunk = _calls.rows_at_once(classes, torch.float32, torch.device("cpu"))
    assert chunk < rows // 2
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, LargestResult() as seen:
        patch.setattr(_calls, "rows_at_once", lambda *_: chunk)
        module(call).forward(call)
    aligned = -(-classes // 4) * 4
    assert chunk * classes * 4 <= seen.bytes <= chunk * aligned * 4


@pytest.mark.parametrize(("classes", "dtype"), [(65, torch.float32), (50257, torch.bfloat16), (262144, torch.float32)])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_chunks_are_bounded(classes, dtype, device_type):
    rows = _calls.rows_at_once(classes, dtype, torch.device(device_type))
    within = rows * classes * dtype.itemsize <= _calls.CHUNK_BYTES[device_type]
    assert within or rows == _calls.MIN_ROWS


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_in_float64(device, reduction):
    tensors = make(torch.float64, device, 19, 5, width=3)
    options = {"label_smoothing": 0.1, "reduction": reduction, "backend": "torch"}
    options |= {"class_weight": torch.linspace(0.2, 2.0, 5, device=device), "z_loss": 0.1, "softcap": 3.0}
    function = lambda x, weight, bias: tk.linear_cross_entropy(  # noqa: E731
        x, weight, tensors["targets"], bias, **options
    )
    assert torch.autograd.gradcheck(function, (tensors["x"], tensors["weight"], tensors["bias"]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("rows_at_once")
def test_compiles_into_one_graph(device, dynamic, reduction):
    def step(x, weight, targets, bias):
        options = {"reduction": reduction, "backend": "torch", "class_weight": bias.detach().square(), "softcap": 5.0}
        return (2.0 * tk.linear_cross_entropy(torch.tanh(x), weight, targets, bias, **options)).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for function in (step, compiled):
        tensors = make(torch.float32, device, 37, 30)
        loss = function(**tensors)
        loss.backward()
        results.append([loss.detach(), *(tensors[name].grad for name in ("x", "weight", "bias"))])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
