"""Cross-entropy in every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import python_ref
import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.operations import backward
from tests.support.parity import backend_fixture, check_parity
from transformer_kernels import UnsupportedByBackend, nn
from transformer_kernels.backends import dispatch
from transformer_kernels.ops.loss import _calls
from transformer_kernels.ops.loss import _torch as torch_backend
from transformer_kernels.ops.loss._calls import CrossEntropyCall

OP = "cross_entropy"
gpu_backend = backend_fixture("triton", "cuda")


def make(dtype, device, *shape, ignored=0.2, spread=3.0):
    """Logits (..., V), and targets of which a part is ignored."""
    generator = torch.Generator().manual_seed(sum(shape))
    targets = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    hidden = torch.rand(shape[:-1], generator=generator) < ignored
    logits = normal(*shape, dtype=dtype, device=device, seed=1).detach().mul_(spread).requires_grad_()
    return {"logits": logits, "targets": targets.masked_fill(hidden, -100).to(device)}


def theirs(tensors, **options):
    """PyTorch's loss of float64 logits, and its gradient."""
    logits = tensors["logits"].detach().double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, -2), tensors["targets"].flatten().long(), **options)
    loss.sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [1, 2, 17, 65, 128, 1000])
@pytest.mark.parametrize("rows", [1, 17, 150])
def test_matches_reference_over_shapes(backend, dtype, device, rows, classes, smoothing):
    check_parity(OP, backend, make(dtype, device, rows, classes), {"label_smoothing": smoothing, "reduction": "sum"})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [4099, 33000, 50257])
def test_matches_reference_over_wide_rows(backend, dtype, device, classes, smoothing):
    check_parity(OP, backend, make(dtype, device, 5, classes), {"label_smoothing": smoothing})


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "classes"), [(4096, 65), (4096, 2), (3, 131072), (2, 128257)])
def test_matches_reference_over_many_rows_and_classes(backend, dtype, device, rows, classes):
    check_parity(OP, backend, make(dtype, device, rows, classes), {"label_smoothing": 0.1})


OPTIONS: dict[str, dict[str, Any]] = {
    "weight": {"weight": True},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 4.0},
    "weight and z_loss": {"weight": True, "z_loss": 0.01},
    "all": {"weight": True, "z_loss": 0.01, "softcap": 4.0},
}


def with_weight(options, classes, device):
    """The options, with class weights from 0 to 3 if requested."""
    wanted = "weight" in options
    return {**options, "weight": torch.linspace(0.0, 3.0, classes, device=device)} if wanted else options


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", OPTIONS)
def test_options_match_the_reference(backend, device, given, reduction, smoothing):
    options = {"label_smoothing": smoothing, "reduction": reduction, **with_weight(OPTIONS[given], 37, device)}
    check_parity(OP, backend, make(torch.float32, device, 5, 7, 37), options)


@pytest.mark.parametrize("classes", [2, 64, 1000, 33000])
def test_options_match_the_reference_over_dtypes_and_widths(backend, dtype, device, classes):
    options = {"label_smoothing": 0.1, **with_weight(OPTIONS["all"], classes, device)}
    check_parity(OP, backend, make(dtype, device, 9, classes), options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_class_that_is_ignored_has_no_part(backend, device, weighted, reduction, monkeypatch):
    """Without a gradient, in a sum over more rows than one block of a compiled kernel adds up."""
    tensors = make(torch.float32, device, 40, 5, ignored=0.0)
    weight = torch.tensor([0.1, 0.2, 0.05, 4.0, 0.3], device=device) if weighted else None
    options: dict[str, Any] = {"ignore_index": 3, "label_smoothing": 0.2, "reduction": reduction}
    expected, gradient = theirs(tensors, weight=None if weight is None else weight.double(), **options)
    loss = tk.cross_entropy(**tensors, weight=weight, **options, backend=backend)
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(tensors["logits"].grad.double(), gradient, atol=1e-7, rtol=1e-5)
    monkeypatch.setattr(_calls, "MAX_SUMMED", 4)
    with torch.no_grad():
        again = tk.cross_entropy(**tensors, weight=weight, **options, backend=backend)
    torch.testing.assert_close(again, loss)


def test_a_soft_cap_of_large_logits(backend, device):
    """Far above the cap all scores are +-cap, and the gradient is 0."""
    tensors = make(torch.float32, device, 6, 33, ignored=0.0, spread=1.0)
    with torch.no_grad():
        tensors["logits"][1, 3], tensors["logits"][2, 5] = -1e30, 1e30
        tensors["logits"][4] *= 1e4
    check_parity(OP, backend, tensors, {"softcap": 30.0, "z_loss": 1e-4, "reduction": "sum"})


def test_a_soft_cap_far_above_the_logits_costs_no_digits(backend, device):
    check_parity(OP, backend, make(torch.float32, device, 6, 33), {"softcap": 1e4, "reduction": "none"})


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("given", [{}, {"weight": True}, {"weight": True, "z_loss": 0.01, "softcap": 4.0}], ids=str)
def test_probabilities_as_targets(device, given, smoothing, reduction):
    logits = make(torch.float32, device, 21, 30)["logits"]
    probabilities = torch.softmax(torch.randn(21, 30, device=device), dim=-1)
    probabilities = probabilities.masked_fill(probabilities < 0.02, 0.0)
    options = {"label_smoothing": smoothing, "reduction": reduction, **with_weight(given, 30, device)}
    check_parity(OP, "torch", {"logits": logits}, {**options, "targets": probabilities})
    if "softcap" not in options:
        ours = tk.cross_entropy(logits, probabilities, **options)
        weight = options.pop("weight", None)
        rows, kinds = logits.detach().double(), probabilities.double()
        theirs = F.cross_entropy(rows, kinds, None if weight is None else weight.double(), **options)
        torch.testing.assert_close(ours.double().flatten(), theirs.flatten(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes_in_axis_1_are_read_as_torch_reads_them(backend, device, shape, reduction):
    last = make(torch.float32, device, *shape, 30)
    logits, targets = last["logits"].detach().movedim(-1, 1).requires_grad_(), last["targets"]
    ours, theirs = (
        tk.cross_entropy(logits, targets, reduction=reduction, backend=backend),
        F.cross_entropy(logits, targets, reduction=reduction),
    )
    torch.testing.assert_close(ours, theirs)
    grads = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, theirs))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(ours, tk.cross_entropy(**last, reduction=reduction, backend=backend))


def test_an_ambiguous_axis_of_classes_is_refused():
    logits, targets = torch.randn(2, 5, 5), torch.zeros(2, 5, dtype=torch.int64)
    for given in (targets, torch.rand(2, 5, 5)):
        message = r"5 classes in the last axis or their 5 classes in axis 1, as torch reads them; give rows"
        with pytest.raises(ValueError, match=message):
            tk.cross_entropy(logits, given)
        with pytest.raises(ValueError, match="axis 1 or the last"):
            python_ref.ops.cross_entropy(logits, given)
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 5\), one for each row; got \(2, 3\)"):
        tk.cross_entropy(logits, targets[:, :3])
    loss = nn.CrossEntropyLoss()(logits, targets)  # a module has one layout, torch's
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))
    with pytest.raises(ValueError, match="one for each row"):
        nn.CrossEntropyLoss()(torch.randn(2, 5, 7), targets)


def test_second_derivatives_with_options(device):
    options = {"weight": torch.linspace(0.5, 2.0, 5, device=device), "z_loss": 0.1, "softcap": 4.0}
    tensors = make(torch.float64, device, 4, 5)
    for reduction in ("mean", "none"):
        every = {"label_smoothing": 0.1, "reduction": reduction, "backend": "torch", **options}
        function = lambda logits: tk.cross_entropy(logits, tensors["targets"], **every)  # noqa: B023, E731
        assert torch.autograd.gradcheck(function, (tensors["logits"],))
        assert torch.autograd.gradgradcheck(function, (tensors["logits"],))


def test_a_hidden_class_of_probability_0_changes_nothing(device):
    logits = torch.tensor([[1.0, -math.inf, 2.0]], device=device, requires_grad=True)
    loss = tk.cross_entropy(logits, torch.tensor([[0.5, 0.0, 0.5]], device=device), backend="torch")
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


@pytest.mark.usefixtures("unplanned")
def test_a_backend_without_probabilities_refuses_them(monkeypatch):
    logits, targets = torch.randn(2, 30), torch.rand(2, 30)
    monkeypatch.setattr(dispatch, "unavailable", lambda *_: None)
    explanation = tk.explain("cross_entropy", logits, targets, backend="auto")
    assert explanation.chosen == "torch"
    for backend in ("cpu", "triton", "cuda"):
        assert "it does not support probabilities as targets" in explanation.reasons[backend]
        with pytest.raises(UnsupportedByBackend, match=r"^cross_entropy: .* it does not support probabilities"):
            tk.cross_entropy(logits, targets, backend=backend)


def test_every_row_has_its_own_incoming_gradient(backend, dtype, device):
    tensors = make(dtype, device, 19, 45)
    check_parity(OP, backend, tensors, {"reduction": "none"})
    tensors["logits"].grad = None
    check_parity(OP, backend, tensors, {"reduction": "none"}, transform=lambda cotangent: cotangent[:1].expand(19))


@pytest.mark.parametrize("classes", [9, 4000])
def test_all_rows_ignored(backend, device, classes):
    tensors = make(torch.float32, device, 12, classes, ignored=1.1)
    mean = tk.cross_entropy(**tensors, backend=backend)
    mean.backward()
    assert math.isnan(mean.item()) and (tensors["logits"].grad == 0).all()
    assert tk.cross_entropy(**tensors, reduction="sum", backend=backend).item() == 0.0
    assert (tk.cross_entropy(**tensors, reduction="none", backend=backend) == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3, "softcap": 5.0}], ids=str)
def test_nan_in_an_ignored_row_does_not_get_out(backend, device, options, reduction):
    """In its logits or its incoming gradient; the last row is ignored."""
    tensors = make(torch.float32, device, 9, 20, ignored=0.0)
    ignored = torch.arange(9, device=device) % 4 == 0
    tensors["targets"].masked_fill_(ignored, -100)
    tensors["logits"].data.masked_fill_(ignored[:, None], math.nan)
    loss = tk.cross_entropy(**tensors, **options, reduction=reduction, backend=backend)
    loss.backward(torch.where(ignored, math.nan, 1.0) if reduction == "none" else None)
    gradient = tensors["logits"].grad
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert not gradient[ignored].any() and gradient[~ignored].any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [33, 40000])
def test_large_logits_neither_overflow_nor_cancel(backend, device, dtype, classes, smoothing):
    tensors = make(dtype, device, 6, classes, spread=1.0)
    with torch.no_grad():
        tensors["logits"] += 1e4
        tensors["logits"][1, 3], tensors["logits"][2, 5] = -1e4, 3e4
    check_parity(OP, backend, tensors, {"label_smoothing": smoothing})


@pytest.mark.parametrize("classes", [33, 40000])
def test_a_constant_added_to_all_logits_changes_nothing(backend, device, classes):
    """Smoothing takes the mean over all classes: of numbers near 8192, whose sum has few significant digits."""
    tensors = make(torch.float32, device, 6, classes, spread=1.0)
    with torch.no_grad():
        tensors["logits"].mul_(256).round_().div_(256)  # exact after adding the constant
        losses = [
            tk.cross_entropy(logits, tensors["targets"], label_smoothing=0.5, reduction="none", backend=backend)
            for logits in (tensors["logits"], tensors["logits"] + 8192.0)
        ]
    torch.testing.assert_close(losses[1], losses[0], atol=4e-6, rtol=0)


@pytest.mark.parametrize("classes", [33, 40000])
def test_entries_of_minus_infinity(backend, device, classes):
    tensors = make(torch.float32, device, 5, classes, ignored=0.0)
    tensors["targets"][:] = torch.tensor([0, 4, 4, 4, 4])
    with torch.no_grad():
        tensors["logits"][0, 1:] = -torch.inf  # certain of its target
        tensors["logits"][1, 10:20] = -torch.inf
        tensors["logits"][2, 4] = -torch.inf  # its target is impossible
        tensors["logits"][3] = -torch.inf  # nothing is possible
        tensors["logits"][4, :4] = -torch.inf
    losses = tk.cross_entropy(**tensors, reduction="none", backend=backend)
    losses.sum().backward()
    expected, gradient = theirs(tensors, reduction="none")
    torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    kept = torch.tensor([0, 1, 4])
    torch.testing.assert_close(tensors["logits"].grad[kept].double(), gradient[kept], atol=1e-6, rtol=1e-5)
    assert losses[2] == torch.inf and torch.isnan(losses[3]) and losses[0] == 0.0


@pytest.mark.parametrize("classes", [33, 40000])
@pytest.mark.parametrize("first", [-torch.inf, torch.inf, torch.nan])
def test_smoothing_of_a_row_that_starts_with_no_number(backend, device, first, classes):
    tensors = make(torch.float32, device, 7, classes, ignored=0.0)
    with torch.no_grad():
        tensors["logits"][3, 0] = first
    check_parity(OP, backend, {**tensors, "logits": tensors["logits"].detach()}, {"label_smoothing": 0.1})


def test_int32_targets(backend, device):
    tensors = make(torch.float32, device, 9, 20)
    expected = tk.cross_entropy(**tensors, backend=backend)
    tensors["targets"] = tensors["targets"].int()
    assert torch.equal(tk.cross_entropy(**tensors, backend=backend), expected)


@pytest.mark.parametrize("dloss", [1.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_backward_pass_gives_the_same_bits(backend, dtype, device, reduction, dloss):
    """Also if the first returns the gradient computed in forward, which the caller may then overwrite."""
    tensors, factor = make(dtype, device, 37, 300), torch.tensor(dloss, device=device)
    loss = tk.cross_entropy(**tensors, label_smoothing=0.1, reduction=reduction, backend=backend)
    (first,) = torch.autograd.grad(loss, tensors["logits"], factor, retain_graph=True)
    expected = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, tensors["logits"], factor)
    assert torch.equal(second, expected)
    assert not first.any()


def test_a_scaled_loss_keeps_the_digits_of_small_gradients(backend, device):
    """In float16 the gradient of the unscaled mean has few significant bits."""
    tensors, scale = make(torch.float16, device, 64, 4000, ignored=0.0, spread=0.1), 2.0**14
    (tk.cross_entropy(**tensors, backend=backend) * scale).backward()
    _, expected = theirs(tensors)
    torch.testing.assert_close(tensors["logits"].grad.double(), expected * scale, atol=0, rtol=2e-3)


@pytest.mark.parametrize("stray", [-7, 65, 2**40])
@pytest.mark.parametrize("options", [(0.0,), (0.1,), (0.1, True, 1e-3, 5.0)], ids=["plain", "smoothed", "all options"])
def test_a_target_that_is_no_class(gpu_backend, device, stray, options):
    """As on a GPU, where targets are not validated: kernels read nothing for it, and its row is NaN."""
    smoothing, *others = options
    weight, z_loss, softcap = (
        (torch.linspace(0.5, 1.5, 65, device=device), *others[1:]) if others else (None, 0.0, None)
    )
    module = dispatch.kernels_of(dispatch.OPERATIONS[OP], gpu_backend)
    logits, targets = normal(4, 65, dtype=torch.float32, device=device).detach(), [0, stray, 64, -100]
    call = CrossEntropyCall(
        logits, torch.tensor(targets, device=device), -100, smoothing, "none", weight, z_loss, softcap
    )
    result = module.of(call).forward(call)
    (dlogits,) = backward(module, call, result, torch.ones_like(result.loss))
    found = [(result.loss, dlogits), (module.row_losses(logits, call.targets, call.row_loss(), in_place=True), logits)]
    for losses, gradient in found:
        assert torch.isnan(losses).tolist() == [False, True, False, False] and losses[3] == 0.0
        assert torch.isnan(gradient).all(-1).tolist() == [False, True, False, False] and (gradient[3] == 0).all()


def test_the_torch_backend_chunks_do_not_show(device, monkeypatch):
    results = []
    for elements in (1 << 30, 200):
        monkeypatch.setattr(torch_backend, "ELEMENTS_AT_ONCE", elements)
        tensors = make(torch.float32, device, 23, 65)
        loss = tk.cross_entropy(**tensors, label_smoothing=0.1, backend="torch")
        loss.backward()
        results.append([loss.detach(), tensors["logits"].grad])
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, atol=0, rtol=1e-6)
