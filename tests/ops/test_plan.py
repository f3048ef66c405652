"""Plans: a call of a known layout is validated and dispatched as the first one was; a call of another layout is not."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from tests.support import random_calls
from tests.support.host_time import called
from tests.support.operations import EXAMPLES, dispatched, function, without_plans
from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops import _crossovers, _plan
from transformer_kernels.ops._kernels import Kernels

PLANNED = list(EXAMPLES)


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    with without_plans():
        yield


def plans(op):
    found = dispatch.OPERATIONS[op].plans.items()  # type: ignore[attr-defined]
    return [plan for key, plan in found if not isinstance(key, torch.Size) and len(key) == 2]  # of arguments


OPTIONAL = {
    "attention": {"key_padding_mask": torch.arange(24).view(2, 12) % 5 > 0, "attn_bias": torch.randn(4, 1, 12)},
    "softmax": {"mask": torch.arange(64) % 3 > 0},
    "cross_entropy": {"weight": torch.rand(64)},
    "linear_cross_entropy": {"class_weight": torch.rand(17)},
    "embedding": {"position_ids": torch.arange(12).view(2, 6) % 5},
}
"""Tensors besides those of the examples."""


def example(op):
    tensors = EXAMPLES[op].make() | OPTIONAL.get(op, {})
    return {name: each.clone().detach().requires_grad_(each.requires_grad) for name, each in tensors.items()}


def results(op, tensors):
    """The outputs and all gradients, with the same dropout each time."""
    torch.manual_seed(3)
    outputs = function(op)(**tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [each for each in tensors.values() if each.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs])]


@pytest.mark.parametrize("op", PLANNED)
def test_a_planned_call_reads_its_own_tensors(op, monkeypatch):
    first, second = example(op), example(op)
    for each in second.values():
        if each.is_floating_point():
            each.data.copy_(0.5 * each.flip(-1))
    want = results(op, second)
    dispatch.OPERATIONS[op].plans.clear()  # type: ignore[attr-defined]
    results(op, first)
    assert all(plans(op))
    names = dispatched(monkeypatch)
    got = results(op, second)
    assert not names
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("op", PLANNED)
def test_without_gradients(op, monkeypatch):
    monkeypatch.setattr(_crossovers, "prefers_torch", lambda *_, **options: False)
    tensors = example(op)
    want = results(op, tensors)[0]
    with torch.no_grad():
        function(op)(**tensors)
        names = dispatched(monkeypatch)
        torch.manual_seed(3)
        got = function(op)(**tensors)
    assert not names
    got = got[0] if isinstance(got, tuple) else got
    assert torch.equal(want, got) and not got.requires_grad


def test_one_tensor_given_twice_is_planned(monkeypatch):
    """The plan serves other tensors of the same layout too, each in its own field."""
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    for first, others in (((q, q, q), [(q, k, v), (k, k, v)]), ((q, k, k), [(q, q, q), (v, q, q)])):
        with without_plans():
            tk.attention(*first, causal=True)
            names = dispatched(monkeypatch)
            for given in (first, *others):
                want = F.scaled_dot_product_attention(*given, is_causal=True)
                torch.testing.assert_close(tk.attention(*given, causal=True), want)
            assert not names


@pytest.mark.parametrize("grad", [False, True])
def test_the_instruction_set_invalidates_plans(grad):
    """All that was decided for one instruction set is dropped with it."""
    if dispatch.unavailable("cpu", X.device) is not None:
        pytest.skip("needs the CPU kernels")
    kernels = cpu.load()
    operation = dispatch.OPERATIONS["layer_norm"]
    with torch.set_grad_enabled(grad), without_plans():
        norm()
        norm()
        assert operation.plans
        kernels.use(kernels.instruction_set())
        assert not operation.plans


@pytest.mark.parametrize("op", PLANNED)
def test_every_route_gives_the_same_bits(op):
    """Random options in a first call, a planned one and one that is traced."""

    def computed(tensors, options):
        torch.manual_seed(3)
        outputs = getattr(tk, op)(**tensors, **options)
        outputs = [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each.requires_grad]
        leaves = [each for each in tensors.values() if each is not None and each.requires_grad]
        grads = [torch.ones_like(each) for each in outputs]
        return [*outputs, *(torch.autograd.grad(outputs, leaves, grads, allow_unused=True) if outputs else ())]

    for number in range(8):
        call = random_calls.DRAWN[op](random_calls.Draw(f"planned:{op}:{number}"))
        first, planned = computed(*call), computed(*call)
        with Watching():
            traced = computed(*call)
        torch.testing.assert_close(planned, first, rtol=0.0, atol=0.0, equal_nan=True)
        torch.testing.assert_close(traced, first, rtol=0.0, atol=0.0, equal_nan=True)


X, W, B = torch.randn(6, 6), torch.rand(6) + 0.5, torch.randn(6)


def norm(x=X, weight=W, **options):
    return tk.layer_norm(x, weight, B, **options)


def expected(x=X, weight=W):
    return F.layer_norm(x, (x.shape[-1],), weight, B)


def test_another_dtype():
    norm()
    assert norm(X.double(), backend="torch").dtype is torch.float64
    assert norm(X.bfloat16()).dtype is torch.bfloat16
    torch.testing.assert_close(norm(X.bfloat16()).float(), expected(), rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match="x must have one of the dtypes"):
        norm(X.long())


def test_other_strides_and_shapes():
    norm()
    torch.testing.assert_close(norm(X.t()), expected(X.t()))
    torch.testing.assert_close(norm(X[:, ::2].repeat(1, 2)[::2]), expected(X[:, ::2].repeat(1, 2)[::2]))
    weights = torch.stack((W, B), dim=1)
    torch.testing.assert_close(norm(weight=weights[:, 0]), expected())
    with pytest.raises(ValueError, match="weight must have shape"):
        norm(weight=W[:5])


def test_what_requires_gradients():
    norm()
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    assert norm(x).requires_grad and norm(weight=weight).requires_grad and not norm().requires_grad
    targets = torch.rand(6, 6).softmax(-1)
    tk.cross_entropy(X, targets)
    with pytest.raises(ValueError, match="targets have no gradient"):
        tk.cross_entropy(X, targets.requires_grad_())


def test_the_grad_mode():
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert norm(x).grad_fn is None
    assert norm(x).grad_fn is not None
    with torch.inference_mode():
        assert norm(x).is_inference()
    q, angle = torch.randn(1, 2, 6, 8), torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        tk.rotary(q, q.clone(), angle, angle.clone())
    with pytest.raises(ValueError, match="cos has no gradient"):
        tk.rotary(q, q.clone(), angle, angle.clone())


class Sevens(Kernels):
    """A backend whose every result is 7."""

    def forward(self, call):
        return torch.full_like(call.x, 7.0)


@pytest.fixture
def sevens(monkeypatch):
    monkeypatch.setitem(dispatch._kernels, ("gelu", "torch"), Sevens)


def seven(backend=None):
    return bool(tk.gelu(X, backend=backend).eq(7).all())


@pytest.mark.usefixtures("sevens")
def test_the_backend_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "_default", None)
    monkeypatch.setitem(dispatch.AUTO_ORDER, "cpu", ("cpu",))
    if dispatch.unavailable("cpu", X.device) is not None:
        pytest.skip("needs the CPU kernels")
    assert [seven(), seven("torch"), seven("cpu"), seven()] == [False, True, False, False]
    tk.set_backend("torch")
    assert seven() and not seven("auto")
    tk.set_backend(None)
    assert not seven()
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "torch")
    assert seven()
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "cpu")
    assert not seven()
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "")
    assert not seven()
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "rocm")
    with pytest.raises(ValueError, match="'rocm'"):
        seven()
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE)
    with tk.use_backend("torch"):
        assert seven()
    assert not seven()
    for backend in ("", "tritn", ["torch"]):
        with pytest.raises(ValueError, match="backend must be one of"):
            seven(backend)  # type: ignore[arg-type]


@pytest.mark.usefixtures("sevens")
def test_use_backend_belongs_to_its_thread():
    seen: list[bool] = []
    started, finish = threading.Barrier(2), threading.Barrier(2)

    def scoped():
        with tk.use_backend("torch"):
            seven()
            started.wait()
            finish.wait()
            seen.append(seven())

    thread = threading.Thread(target=scoped)
    thread.start()
    started.wait()
    with tk.use_backend("auto"):
        other = tk.gelu(X, backend="torch" if dispatch.unavailable("cpu", X.device) else None)
        assert bool(other.eq(7).all()) == (dispatch.unavailable("cpu", X.device) is not None)
    finish.wait()
    thread.join()
    assert seen == [True]


def test_threads_with_layouts_of_their_own():
    wrong: list[tuple[int, int]] = []

    def work(width):
        x, weight = torch.randn(3, width), torch.rand(width)
        want = F.rms_norm(x, (width,), weight, 1e-5)
        for index in range(200):
            if not torch.allclose(tk.rms_norm(x, weight), want, atol=1e-5):
                wrong.append((width, index))

    threads = [threading.Thread(target=work, args=(width,)) for width in (4, 5, 6, 7, 8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_autocast():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    assert tk.attention(q, k, v).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tk.attention(q, k, v).dtype is torch.bfloat16
        low = q.bfloat16()
        assert tk.swiglu(low, q).dtype is torch.float32
    assert tk.attention(q, k, v).dtype is torch.float32
    for given in ((q, k, v), (q.bfloat16(), k.bfloat16(), v.bfloat16())):  # what autocast leaves as it is is planned
        for dtype in (torch.bfloat16, torch.float16) * 2:
            with torch.autocast("cpu", dtype=dtype):
                assert tk.attention(*given).dtype is dtype
                with torch.autocast("cpu", enabled=False):
                    assert tk.attention(*given).dtype is given[0].dtype
    with pytest.raises(TypeError, match="one dtype"):
        tk.swiglu(low, q)


def test_deterministic_algorithms():
    want = norm()
    torch.use_deterministic_algorithms(True)  # PyTorch fills new tensors, which kernels write all of
    try:
        assert torch.equal(norm(), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_equal_options_of_other_types():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    tk.attention(q, k, v, causal=True, window=(2, 0), dropout_p=0.0, return_lse=False)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"causal": 1}, "causal must be True or False"),
        ({"causal": True, "window": (2.0, 0)}, "window must hold ints"),
        ({"causal": True, "window": (2, False)}, "window must hold ints"),
        ({"causal": True, "window": (2, 0), "dropout_p": False}, "dropout_p must be a number"),
        ({"causal": True, "window": (2, 0), "return_lse": 0}, "return_lse must be True or False"),
    ]
    for options, message in calls:
        with pytest.raises(TypeError, match=message):
            tk.attention(q, k, v, **options)
    norm(eps=1.0)
    with pytest.raises(TypeError, match="eps must be a number"):
        norm(eps=True)
    torch.testing.assert_close(norm(eps=1), norm(eps=1.0))
    assert not torch.equal(norm(eps=2.0), norm(eps=1.0))


def test_zeros_of_either_sign_scale_alike():
    weight, tokens = torch.ones(3, 4), torch.tensor([[0, 2]])
    for scale in (-0.0, 0.0, -0.0):
        assert not tk.embedding(tokens, weight, scale=scale).signbit().any()


def test_values_are_checked_in_every_call():
    targets = torch.tensor([0, 5, -100, 2, 3, 4])
    tk.cross_entropy(X, targets)
    for stray in (6, -1):
        with pytest.raises(IndexError, match=rf"targets must be in \[0, 6\).*got {stray}"):
            tk.cross_entropy(X, targets.clone().fill_(stray))
    for dtype in (torch.int64, torch.int32):
        tokens = torch.tensor([[0, 5, 2]], dtype=dtype)
        tk.embedding(tokens, X, X.clone(), position_ids=tokens.clone())
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 6\)"):
            tk.embedding(tokens + 1, X, X.clone(), position_ids=tokens)
        with pytest.raises(IndexError, match=r"position_ids must be in \[0, 6\)"):
            tk.embedding(tokens, X, X.clone(), position_ids=tokens + 1)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    for starts, valid in (([0, 2, 5], True), ([0, 3, 5], True), ([0, 6, 5], False)):
        given = torch.tensor(starts, dtype=torch.int32)
        if valid:
            parts = [tk.attention(*(x[:, :, a:b] for x in (q, k, v))) for a, b in pairwise(starts)]
            torch.testing.assert_close(tk.attention(q, k, v, cu_seqlens=given), torch.cat(parts, dim=2))
        else:
            with pytest.raises(ValueError, match="cu_seqlens must rise"):
                tk.attention(q, k, v, cu_seqlens=given)


def test_one_tensor_in_two_places():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    same, apart = tk.attention(q, q, q), tk.attention(q, k, v)
    torch.testing.assert_close(same, F.scaled_dot_product_attention(q, q, q))
    torch.testing.assert_close(apart, F.scaled_dot_product_attention(q, k, v))
    dispatch.OPERATIONS["attention"].plans.clear()  # type: ignore[attr-defined]
    torch.testing.assert_close(tk.attention(q, k, v), apart)
    torch.testing.assert_close(tk.attention(q, q, q), same)


def test_options_that_are_tensors():
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind(0)
    for length in (5, 3, 4):
        mask = (torch.arange(5) < length).expand(2, 5).contiguous()
        want = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        torch.testing.assert_close(tk.attention(q, k, v, key_padding_mask=mask), want)
    for dims in (4, 3, 2):
        for _ in range(2):
            bias = torch.randn(1, 2, 5, 5)[(0,) * (4 - dims)].requires_grad_()
            out = tk.attention(q, k, v, attn_bias=bias)
            (dbias,) = torch.autograd.grad(out.square().sum(), bias)
            theirs = F.scaled_dot_product_attention(q, k, v, bias)
            (want,) = torch.autograd.grad(theirs.square().sum(), bias)
            torch.testing.assert_close(out, theirs)
            torch.testing.assert_close(dbias, want)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (6, 6)])
def test_a_view_of_an_argument(shape, monkeypatch):
    masks = [torch.rand(shape) < share for share in (0.3, 0.6, 0.9)]
    expected = [tk.softmax(X, mask=mask.expand(6, 6).contiguous()) for mask in masks]
    tk.softmax(X, mask=masks[0])
    names = dispatched(monkeypatch)
    for mask, want in zip(masks, expected, strict=True):
        assert torch.equal(tk.softmax(X, mask=mask), want)
    assert not names
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind(0)
    for slopes in (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.1])):
        bias = -slopes[:, None, None] * (torch.arange(5)[:, None] - torch.arange(5)).abs()
        want = F.scaled_dot_product_attention(q, k, v, bias)
        torch.testing.assert_close(tk.attention(q, k, v, alibi_slopes=slopes), want)
    assert names == ["attention"]


def test_two_arguments_in_one_memory():
    """A view in the call may be of either: such calls are not planned."""
    memory = torch.tensor([0.5, 2.0, 1.0])
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    for _ in range(2):
        for slopes, sinks in (
            (memory[:2], memory[:2].clone()),
            (memory[:2].clone(), memory[:2]),
            (memory[:2], memory[:2]),
        ):
            want = tk.attention(q, k, v, alibi_slopes=slopes.clone(), sinks=sinks.clone(), backend="torch")
            torch.testing.assert_close(tk.attention(q, k, v, alibi_slopes=slopes, sinks=sinks), want)


def test_the_second_layout_of_a_composed_call(monkeypatch):
    weight, targets = torch.randn(9, 6), torch.tensor([0, 8, -100, 3, 1, 2])
    for recorded in (False, True):
        x = X.clone().requires_grad_(recorded)
        for each in (weight, weight.double().float(), weight.bfloat16().float(), weight.t().contiguous().t()):
            want = F.cross_entropy(F.linear(x, each), targets)
            got = tk.linear_cross_entropy(x, each, targets)
            torch.testing.assert_close(got, want)
            assert got.requires_grad == recorded
    names = dispatched(monkeypatch)
    tk.linear_cross_entropy(X, weight, targets)
    assert not names
    with pytest.raises(IndexError, match=r"targets must be in \[0, 9\)"):
        tk.linear_cross_entropy(X, weight, targets + 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("differentiable", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
def test_an_output_layer_and_its_loss_in_one_chunk(reduction, differentiable):
    """Each pass computes the same gradients in memory of its own."""
    targets = torch.tensor([0, 8, -100, 3, 1, 2])
    for _ in range(2):
        given = [torch.randn(6, 6), torch.randn(9, 6), torch.randn(9)]
        leaves = [each.requires_grad_() for index, each in enumerate(given) if index in differentiable]
        x, weight, bias = given
        loss = tk.linear_cross_entropy(x, weight, targets, bias, reduction=reduction)
        want = F.cross_entropy(F.linear(x, weight, bias), targets, reduction=reduction)
        torch.testing.assert_close(loss, want)
        dloss = torch.rand_like(loss)
        expected = torch.autograd.grad(want, leaves, dloss)
        passes = [torch.autograd.grad(loss, leaves, dloss, retain_graph=True) for _ in range(3)]
        for first, second, third, exact in zip(*passes, expected, strict=True):
            torch.testing.assert_close(first, exact)
            assert torch.equal(first, second) and torch.equal(second, third)
            assert second.data_ptr() != third.data_ptr()


def test_attention_without_lse_is_attention(monkeypatch):
    monkeypatch.setattr(_crossovers, "prefers_torch", lambda *_, **options: False)
    tensors = torch.randn(3, 1, 2, 5, 8).requires_grad_()
    outcomes = []
    for asked in (False, True):
        for _ in range(2):
            outputs = tk.attention(*tensors.unbind(0), causal=True, return_lse=asked)
            out = outputs[0] if asked else outputs
            outcomes.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    with torch.no_grad():
        outcomes.append([tk.attention(*tensors.unbind(0), causal=True), outcomes[0][1]])
    assert all(torch.equal(a, b) for each in outcomes for a, b in zip(outcomes[0], each, strict=True))


def test_dispatch_modes_see_the_memory_that_a_planned_backward_allocates():
    x = X.clone().requires_grad_()
    for _ in range(2):
        y = norm(x)
        with Watching() as watching:
            torch.autograd.grad(y, x, X)
    assert any("empty" in name for name in watching.seen)


def test_dropout_draws_a_seed_in_every_call():
    x = torch.ones(64, 6)

    def drawn():
        return tk.add_layer_norm(x, torch.zeros_like(x), W, dropout_p=0.5)[1]

    torch.manual_seed(1)
    unplanned, planned = drawn(), drawn()
    assert not torch.equal(unplanned, planned)
    torch.manual_seed(1)
    assert torch.equal(drawn(), unplanned) and torch.equal(drawn(), planned)


class Watching(TorchDispatchMode):
    """Records the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_tracers_and_transforms_after_a_plan():
    norm(), norm()
    assert plans("layer_norm")
    with Watching() as watching:
        norm()
    assert any("transformer_kernels.layer_norm" in name for name in watching.seen)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (X, W, B)]
        assert type(tk.layer_norm(*fakes)).__name__ == "FakeTensor"
    assert type(tk.layer_norm(*fakes)).__name__ == "FakeTensor"
    meta = tk.layer_norm(X.to("meta"), W.to("meta"))
    assert meta.device.type == "meta" and tk.layer_norm(X.to("meta"), W.to("meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        norm(X.to("meta"))
    torch.testing.assert_close(torch.func.vmap(norm)(torch.stack((X, X)))[1], norm())
    assert torch.func.grad(lambda x: norm(x).square().sum())(X).any()
    with forward_ad.dual_level():
        dual = norm(forward_ad.make_dual(X, X.cos()))
        assert forward_ad.unpack_dual(dual).tangent.any()
    traced = torch.jit.trace(lambda x: norm(x), (X,), check_trace=False)
    torch.testing.assert_close(traced(X.square()), norm(X.square()))
    scalar = torch.randn(())  # whose shape a trace does not record
    tk.gelu(scalar)
    traced = torch.jit.trace(lambda x: tk.gelu(x), (scalar,), check_trace=False)
    torch.testing.assert_close(traced(scalar + 1), tk.gelu(scalar + 1))
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), norm())
    torch.testing.assert_close(norm(X.as_subclass(Subclass)).as_subclass(Tensor), norm())


def test_a_compilation_reads_no_plans(monkeypatch):
    """It would guard each of them: 600 took 15 s."""

    class Unread(dict):
        def get(self, key):
            assert not torch.compiler.is_compiling()

    monkeypatch.setattr(dispatch.OPERATIONS["gelu"], "plans", Unread())
    compiled = torch.compile(tk.gelu, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), F.gelu(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    ],
    ids=["coo", "csr", "mkldnn", "nested"],
)
def test_tensors_that_are_not_strided(convert):
    norm(), norm(torch.ones(()).expand(6, 6))
    with pytest.raises(TypeError, match="x must be a dense strided tensor"):
        norm(convert(X))


def test_negated_views():
    norm(), norm()
    with pytest.raises(TypeError, match="x must not be a negated view"):
        norm(torch._neg_view(X))


def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(_plan, "MAX_PLANS", 5)
    for rows in range(1, 20):
        norm(torch.randn(rows, 6))
        assert len(plans("layer_norm")) <= 5


def test_calls_that_are_made_of_copies_are_not_planned_again_and_again(monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(_plan.Record, "find", lambda record, given: made.append(record))
    for _ in range(3):
        torch.testing.assert_close(norm(X.t()), expected(X.t()))
    assert len(made) == 1 and plans("layer_norm") == [None]


MAX_CALLS: dict[str, tuple[int, int]] = {
    "gelu": (37, 47),
    "softmax": (34, 45),
    "swiglu": (39, 46),
    "layer_norm": (50, 55),
    "add_layer_norm": (54, 60),
    "cross_entropy": (67, 79),
    "embedding": (62, 67),
    "rotary": (67, 73),
    "attention": (65, 71),
    "attention_weights": (90, 98),
    "linear_cross_entropy": (157, 183),
}
"""Python and C functions that a planned call on a CPU calls, (without gradients, forward with gradients)."""


@pytest.mark.parametrize("op", MAX_CALLS)
def test_the_host_calls_few_functions(op):
    if dispatch.unavailable("cpu", X.device) is not None:
        pytest.skip("needs the CPU kernels")
    heads, angles = torch.randn(3, 1, 2, 6, 8), torch.randn(2, 6, 4)
    floating: dict[str, list[Tensor]] = {
        "gelu": [X],
        "softmax": [X],
        "swiglu": [X, X.clone()],
        "layer_norm": [X, W, B],
        "add_layer_norm": [X, X.clone(), W, B],
        "cross_entropy": [X],
        "embedding": [X],
        "rotary": [*heads[:2]],
        "attention": [*heads],
        "attention_weights": [*heads[:2]],
        "linear_cross_entropy": [X, torch.randn(6, 6)],
    }
    classes = [torch.arange(6)]
    more = {"cross_entropy": classes, "linear_cross_entropy": classes, "rotary": [*angles]}.get(op, [])
    ids = [torch.tensor([[0, 5]])] if op == "embedding" else []
    function, counts = getattr(tk, op), []
    for recorded in (False, True):
        given = [each.clone().requires_grad_(recorded) for each in floating[op]]
        function(*ids, *given, *more)
        counts.append(called(lambda given=given: function(*ids, *given, *more)))  # type: ignore[misc]
    assert all(count <= most for count, most in zip(counts, MAX_CALLS[op], strict=True)), counts


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("op", PLANNED)
def test_a_plan_keeps_no_tensor_of_a_call(op, backend, gradients):
    """A plan outlives the call, and would keep its memory allocated."""
    if (reason := dispatch.unavailable(backend, torch.device("cpu"))) is not None:
        pytest.skip(reason)
    kept = []
    for _ in range(3):
        tensors = example(op)
        with torch.set_grad_enabled(gradients):
            results = function(op, backend)(**tensors)
        kept += [weakref.ref(each) for each in tensors.values()]
        del tensors, results
    gc.collect()
    assert plans(op) and not [each().shape for each in kept if each() is not None]
