"""Derivatives beyond the first: double backward, forward-mode AD and the transforms of torch.func, of every operation.

Random calls are compared with the oracle in float64; a transform with what it means: vmap with a loop.
"""

from __future__ import annotations

import math
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from tests.support import oracle
from tests.support.operations import EXAMPLES, without_plans
from tests.support.parity import require
from tests.support.random_calls import DRAWN, Draw
from transformer_kernels.backends import dispatch
from transformer_kernels.ops.attention import _composed
from transformer_kernels.ops.loss import _calls

BACKENDS = [("torch", torch.float64), ("cpu", torch.float32)]
OPERATIONS = pytest.mark.parametrize("op", list(EXAMPLES))
RANDOM_CALLS = 12


def of_tensors(op, dtype=torch.float32, rows=4, columns=8, dropout=True, **options):
    """The example of an operation as a function of its differentiable tensors, with seeded dropout, and these."""
    tensors = EXAMPLES[op].make(rows, columns, dtype)
    options = {**EXAMPLES[op].options, **options}
    if not dropout:
        options.pop("dropout_p", None)
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]

    def function(*leaves, seed=True):
        if seed:
            torch.manual_seed(0)
        return getattr(tk, op)(**{**tensors, **dict(zip(names, leaves, strict=True))}, **options)

    return function, [tensors[name].detach() for name in names]


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def scalar(results):
    """A function of outputs whose derivatives of any order are not 0; -inf, the lse of a hidden row, is left out."""
    return sum(part.masked_fill(part == -math.inf, 0.0).sin().sum() for part in parts(results))


def stacked(tensors, count=3):
    """Samples for vmap, no two alike."""
    return tuple(torch.stack([x * (1.0 + 0.25 * i) for i in range(count)]) for x in tensors)


def random_call(op, number, dtype):
    """A random call without NaN: its tensors, its options, and the names of those with a gradient."""
    draw = Draw(f"{op}:{number}")
    draw.dtype, draw.poison = dtype, lambda *_: None
    tensors, options = DRAWN[op](draw)
    tensors = {name: x for name, x in tensors.items() if x is not None}
    return tensors, options, [name for name, x in tensors.items() if x.requires_grad or name in ("x", "gate", "logits")]


def derivatives(function, tensors, options, wanted, number, dtype):
    """The gradient of the gradient's square, and the derivative along random tangents, in forward and reverse mode."""
    given = {
        name: x.detach().to(dtype) if x.is_floating_point() and name != "alibi_slopes" else x
        for name, x in tensors.items()
    }

    def loss(*leaves):
        torch.manual_seed(number)
        return scalar(function(**{**given, **dict(zip(wanted, leaves, strict=True))}, **options))

    leaves = [given[name].requires_grad_() for name in wanted]
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    needed = sum(x.square().sum() for x in grads if x.requires_grad)
    if isinstance(needed, Tensor):
        second = torch.autograd.grad(needed, leaves, allow_unused=True, materialize_grads=True)
    else:  # linear
        second = [torch.zeros_like(x) for x in leaves]
    generator = torch.Generator().manual_seed(number)
    tangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in leaves]
    reverse = sum((x.detach() * tangent).sum() for x, tangent in zip(grads, tangents, strict=True))
    return loss, [x.detach() for x in leaves], tangents, [x.detach() for x in second], reverse


def error_of(got, want):
    return float(((got.double() - want).abs() / want.abs().amax().clamp_min(1.0)).amax()) if want.numel() else 0.0


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@OPERATIONS
def test_random_calls(op, backend, dtype, device, monkeypatch):
    """Double backward and JVP with every option; in float32 the oracle in float32 sets the budget, as in parity."""
    require(op, backend, device, torch.float32)
    monkeypatch.setattr(_composed, "MIN_ROWS", 3)
    monkeypatch.setattr(_composed, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(_calls, "MIN_ROWS", 3)
    monkeypatch.setattr(_calls, "CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    tolerance = 1e-7 if dtype is torch.float64 else 1e-3
    for number in range(RANDOM_CALLS):
        tensors, options, wanted = random_call(op, number, dtype)
        unsupported = backend == "cpu" and op == "cross_entropy" and tensors["targets"].is_floating_point()
        if not wanted or unsupported:
            continue
        given = tensors, options, wanted, number
        *_, exact, along = derivatives(getattr(oracle, op), *given, torch.float64)
        loss, leaves, tangents, second, _ = derivatives(partial(getattr(tk, op), backend=backend), *given, dtype)
        forward = jvp(loss, tuple(leaves), tuple(tangents))[1]
        budgets = [tolerance] * (len(wanted) + 1)
        if dtype is torch.float32:  # float32 loses the digits of scores beside a bias of 1e6
            *_, eager, eager_along = derivatives(getattr(oracle, op), *given, dtype)
            errors = map(error_of, (*eager, eager_along), (*exact, along))
            budgets = [max(tolerance, 3.0 * error) for error in errors]
        for name, got, want, budget in zip((*wanted, "jvp"), (*second, forward), (*exact, along), budgets, strict=True):
            assert error_of(got, want) <= budget, (
                f"{number}, {name}: {error_of(got, want):.1e} > {budget:.1e}, {options}"
            )


@OPERATIONS
def test_gradgradcheck(op):
    """By finite differences, with batched and undefined gradients, and forward over reverse."""
    function, inputs = of_tensors(op, torch.float64, 3, 5, dropout=False, backend="torch")
    inputs = tuple(x.requires_grad_() for x in inputs)
    check = {"fast_mode": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True, **check)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("backend", ["torch", "cpu", "auto"])
@OPERATIONS
def test_transforms(op, backend, device):
    """vmap is a loop, vmap(grad) a loop of gradients, and vjp, jvp and grad are what autograd computes."""
    require(op, "torch" if backend == "auto" else backend, device, torch.float32)
    function, inputs = of_tensors(op, backend=backend)
    samples = stacked(inputs)
    loss = lambda *leaves: scalar(function(*leaves))  # noqa: E731
    each = [parts(function(*sample)) for sample in zip(*samples, strict=True)]
    batched = parts(vmap(function, randomness="same")(*samples))
    for got, *wants in zip(batched, *each, strict=True):
        torch.testing.assert_close(got, torch.stack(wants), rtol=1e-5, atol=1e-5)
    every = tuple(range(len(inputs)))
    gradients = []
    for sample in zip(*samples, strict=True):
        leaves = [x.clone().requires_grad_() for x in sample]
        gradients.append(torch.autograd.grad(loss(*leaves), leaves))
    for got, *wants in zip(vmap(grad(loss, every), randomness="same")(*samples), *gradients, strict=True):
        torch.testing.assert_close(got, torch.stack(wants), rtol=1e-4, atol=1e-5)
    _, pulled = vjp(loss, *(x[0] for x in samples))
    torch.testing.assert_close(pulled(torch.ones(())), gradients[0], rtol=1e-4, atol=1e-5)
    tangents = tuple(x[1] for x in samples)
    along = jvp(loss, tuple(x[0] for x in samples), tangents)[1]
    expected = sum((x * tangent).sum() for x, tangent in zip(gradients[0], tangents, strict=True))
    torch.testing.assert_close(along, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@OPERATIONS
def test_derivatives_in_bfloat16(op, backend, device):
    """Within the RMS limit of the outputs, three times for second derivatives: statistics are in float32."""
    require(op, backend, device, torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        function, inputs = of_tensors(op, dtype, 16, 32, False, backend=backend if dtype is torch.bfloat16 else "torch")
        rounded = of_tensors(op, torch.bfloat16, 16, 32)[1]
        inputs, tangents = ([x.to(dtype) for x in given] for given in (rounded, [x.cos() for x in rounded]))
        along = parts(jvp(function, tuple(inputs), tuple(tangents))[1])
        leaves = [x.requires_grad_() for x in inputs]
        loss = sum(part.double().square().sum() for part in parts(function(*leaves)))
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.double().square().sum() for x in grads), leaves)
        results.append((along, grads, second))
    for got, want, limit in zip(*results, (1.5e-2, 3e-2, 6e-2), strict=True):
        for one, other in zip(got, want, strict=True):
            error = (one.double() - other).square().mean().sqrt() / other.square().mean().sqrt().clamp_min(1e-3)
            assert error <= limit


@OPERATIONS
def test_a_tangent_of_what_is_also_recorded(op):
    """Forward over reverse: the tangents are differentiated by autograd."""
    function, inputs = of_tensors(op, torch.float64, dropout=False)
    leaf = inputs[0].clone().requires_grad_()
    tangent = inputs[0].cos()
    along = jvp(lambda x: scalar(function(x, *inputs[1:])), (leaf,), (tangent,))[1]
    (mixed,) = torch.autograd.grad(along, leaf)
    loss = lambda x: scalar(function(x, *inputs[1:]))  # noqa: E731
    torch.testing.assert_close(mixed, torch.autograd.functional.vhp(loss, inputs[0], tangent)[1])


@OPERATIONS
def test_hessian_is_that_of_double_backward(op):
    function, inputs = of_tensors(op, torch.float64, 2, 4, dropout=False)
    loss = lambda x: scalar(function(x, *inputs[1:]))  # noqa: E731
    x = inputs[0]
    forward_over_reverse = hessian(loss)(x)
    torch.testing.assert_close(jacrev(jacrev(loss))(x), forward_over_reverse)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, x), forward_over_reverse)
    assert forward_over_reverse.any()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@OPERATIONS
def test_backward_of_a_recorded_call_within_transforms(op, backend, device):
    """Of batched incoming gradients, and of ones with a tangent, which kernels would not see."""
    require(op, backend, device, torch.float32)
    function, inputs = of_tensors(op, backend=backend)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = parts(function(*leaves))
    coming = stacked([torch.randn_like(x) for x in outputs])
    batched = torch.autograd.grad(outputs, leaves, coming, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(outputs, leaves, dy, retain_graph=True) for dy in zip(*coming, strict=True)]
    for got, *wants in zip(batched, *one_by_one, strict=True):
        torch.testing.assert_close(got, torch.stack(wants), rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(dy[0], dy[1]) for dy in coming]
        gradients = torch.autograd.grad(outputs, leaves, duals, retain_graph=True)
        for got, want in zip(gradients, one_by_one[1], strict=True):  # linear
            torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, want, rtol=1e-4, atol=1e-5)


@OPERATIONS
def test_forward_ad_of_planned_calls(op):
    """A plan that was made without tangents does not compute a call with them."""
    function, inputs = of_tensors(op)
    tangents = [torch.randn_like(x) for x in inputs]
    for recorded in (False, True):
        for leaves in ([x.clone().requires_grad_(recorded) for x in inputs],) * 2:
            function(*leaves)
        expected = jvp(function, tuple(inputs), tuple(tangents))[1]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(leaves, tangents, strict=True)]
            for got, want in zip(parts(function(*duals)), parts(expected), strict=True):
                torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, want)
            assert all(forward_ad.unpack_dual(x).tangent is None for x in parts(function(*leaves)))


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in ("attention_weights", "embedding")])
def test_tangents_are_those_of_kernels(op, device, monkeypatch):
    require(op, "cpu", device, torch.float32)
    function, inputs = of_tensors(op, backend="cpu")
    monkeypatch.setattr(dispatch.OPERATIONS[op].call, "in_pytorch", None)
    jvp(function, tuple(inputs), tuple(x.cos() for x in inputs))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@OPERATIONS
def test_tangents_of_another_dtype(op, backend, device):
    """PyTorch accepts float32 tangents of bfloat16 tensors, and expanded ones."""
    require(op, backend, device, torch.bfloat16)
    function, inputs = of_tensors(op, torch.bfloat16, backend=backend)
    tangents = [torch.tensor([0.5]).expand(x.shape) for x in inputs]
    found = jvp(function, tuple(inputs), tuple(tangents))[1]
    expected = jvp(function, tuple(inputs), tuple(x.bfloat16().contiguous() for x in tangents))[1]
    for got, want in zip(parts(found), parts(expected), strict=True):
        torch.testing.assert_close(got.to(want.dtype), want, rtol=2e-2, atol=2e-2)


@OPERATIONS
def test_a_tensor_that_is_given_twice_has_two_gradients(op):
    """Its first derivatives under create_graph are those without it."""
    function, inputs = of_tensors(op)
    by_shape = {}
    leaves = [by_shape.setdefault(x.shape, x.requires_grad_()) for x in inputs]
    distinct = list(by_shape.values())
    for _ in range(2):
        plain, again = (
            torch.autograd.grad(scalar(function(*leaves)), distinct, create_graph=graph) for graph in (False, True)
        )
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-5)


HIDDEN = {
    "padding": {"key_padding_mask": torch.tensor([[True] * 4 + [False] * 2, [False] * 6])},
    "causal, more queries than keys": {"causal": True},
    "window": {"window": (1, 0)},
    "bias": {"attn_bias": torch.tensor([0.0, -math.inf]).repeat_interleave(3).view(1, 1, 6, 1)},
    "mask": {"attn_bias": torch.arange(6).view(6, 1) > 2},
    "sinks": {"key_padding_mask": torch.tensor([[True] * 6, [False] * 6]), "sinks": torch.randn(4)},
}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("op", ["attention", "attention_weights"])
def test_queries_without_a_key_have_zero_derivatives(op, hidden, backend, device):
    """Whatever is behind the padding; in every order and mode."""
    require(op, backend, device, torch.float32)
    options = HIDDEN[hidden]
    q, k, v = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    k, v = (k[:, :, :3], v[:, :, :3]) if hidden.startswith("causal") else (k, v)
    if "key_padding_mask" in options:
        for x in (k, v):
            x.masked_fill_(~options["key_padding_mask"][:, None, :, None], math.nan)
    inputs = (q, k, v) if op == "attention" else (q, k)
    function = lambda *x: getattr(tk, op)(*x, **options, backend=backend)  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    blind = (out.detach() == 0.0).all(dim=-1)
    assert blind.any() or hidden == "window"
    gradients = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)
    tangents = tuple(torch.ones_like(x) for x in inputs)
    along = jvp(function, inputs, tangents)[1]
    for results in (
        gradients,
        second,
        (along,),
        vmap(grad(lambda *x: function(*(y[None] for y in x)).sum()))(*inputs)
        if not options.get("key_padding_mask") is not None and hidden != "padding"
        else (),
    ):
        assert all(torch.isfinite(x).all() for x in results)
    for x in (along, second[0], gradients[0]):
        assert not x[blind].any()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_packed_sequences_do_not_reach_each_other(backend, device):
    require("attention", backend, device, torch.float32)
    inputs = [torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for x in inputs:
        x[:, :, 5:9] = math.nan
    starts = torch.tensor([0, 5, 9, 11], dtype=torch.int32)
    function = lambda *x: tk.attention(*x, cu_seqlens=starts, causal=True, backend=backend)  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(function(*leaves)[:, :, :5].sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x[:, :, :5].square().sum() for x in gradients), leaves)
    along = jvp(function, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))[1]
    for x in (*gradients, *second, along):
        assert torch.isfinite(x[:, :, :5]).all()
    assert torch.isfinite(along[:, :, 9:]).all() and not along[:, :, 11:].any()
    with pytest.raises(RuntimeError, match=r"attention: vmap over cu_seqlens is not supported"):
        vmap(lambda starts: tk.attention(*inputs, cu_seqlens=starts, backend=backend))(starts.repeat(2, 1))


def test_ignored_rows_have_zero_derivatives():
    logits, targets = torch.randn(4, 5), torch.tensor([1, -100, 3, -100])
    logits[1] = math.nan
    x = logits.clone().requires_grad_()
    for reduction in ("mean", "none"):
        loss = lambda x, how=reduction: tk.cross_entropy(x, targets, z_loss=0.1, reduction=how)  # noqa: E731
        (dx,) = torch.autograd.grad(loss(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.square().sum(), x)
        for result in (dx, second, grad(lambda x, loss=loss: loss(x).sum())(logits)):
            assert torch.isfinite(result).all() and not result[1].any() and result[0].all()
        assert torch.isfinite(jvp(loss, (logits,), (torch.ones_like(logits),))[1]).all()


DROPPING = [op for op in EXAMPLES if "dropout_p" in EXAMPLES[op].options]


@pytest.mark.parametrize("op", DROPPING)
def test_dropout_follows_the_randomness_of_vmap(op):
    function, inputs = of_tensors(op, rows=8, columns=16)
    samples = tuple(x.expand(6, *x.shape) for x in inputs)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(*samples)
    same, different = (parts(vmap(function, randomness=how)(*samples))[0] for how in ("same", "different"))
    expected = parts(function(*inputs))[0]
    torch.testing.assert_close(same, expected.expand_as(same), rtol=1e-5, atol=1e-5)
    assert len({tuple(x.flatten().tolist()) for x in different}) == 6


def test_seeds_that_vmap_batches_draw_the_masks_of_their_own():
    from transformer_kernels.ops._dropout import _draw, dropped_in

    region = (3, 2, 5, 19, 7, 11)
    seeds = torch.randint(0, 2**63 - 1, (4, 1), generator=torch.Generator().manual_seed(0))
    batched = vmap(lambda seed: dropped_in(seed, 0.3, region))(seeds)
    assert torch.equal(batched, torch.stack([_draw(seed, 0.3, region) for seed in seeds]))
    assert batched.float().mean().sub(0.3).abs() < 0.05


class Block(torch.nn.Module):
    """A small transformer of this package's layers, with a loss."""

    def __init__(self):
        super().__init__()
        self.embedding = tk.nn.Embedding(11, 8, padding_idx=0)
        self.norm, self.final = tk.nn.LayerNorm(8), tk.nn.AddLayerNorm(8)
        self.attention = tk.nn.MultiHeadAttention(8, 2, batch_first=True)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.gelu, self.head = tk.nn.GELU(), tk.nn.LinearCrossEntropy(8, 11)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        y = self.norm(x)
        y, x = self.final(self.attention(y, y, y, need_weights=False)[0], x)
        return self.head(x + self.down(self.gelu(self.up(y))), targets)


@pytest.mark.parametrize("backend", ["auto", "torch", "cpu"])
def test_gradients_of_each_sample_of_a_model(backend, device):
    """As Opacus and functorch's ensembles compute them: one call instead of a loop."""
    require("attention", "torch" if backend == "auto" else backend, device, torch.float32)
    torch.manual_seed(0)
    model = Block()
    tokens, targets = torch.randint(0, 11, (2, 4, 6))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, tokens, targets):
        return functional_call(model, parameters, (tokens[None], targets[None]))

    with tk.use_backend(backend):
        batched = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, tokens, targets)
        for i in range(len(tokens)):
            own = torch.autograd.grad(model(tokens[i : i + 1], targets[i : i + 1]), list(model.parameters()))
            for (name, _), want in zip(model.named_parameters(), own, strict=True):
                torch.testing.assert_close(batched[name][i], want, rtol=1e-4, atol=1e-5, msg=name)
        curvature = hessian(lambda x: loss({**parameters, "norm.weight": x}, tokens[0], targets[0]))(
            parameters["norm.weight"]
        )
        torch.testing.assert_close(curvature, curvature.T, rtol=1e-4, atol=1e-6)


def test_checks_of_values_do_without_what_vmap_batches():
    """Out-of-range indices raise PyTorch's own error: nothing is read out of bounds."""
    logits, weight = torch.randn(3, 4, 5), torch.randn(5, 8)
    targets = torch.randint(0, 5, (3, 4), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        vmap(tk.cross_entropy)(logits, targets), torch.stack(list(map(tk.cross_entropy, logits, targets)))
    )
    torch.testing.assert_close(vmap(lambda ids: tk.embedding(ids[None], weight)[0])(targets), weight[targets])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        vmap(tk.cross_entropy)(logits, targets + 5)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        vmap(lambda ids: tk.embedding(ids[None], weight))(targets + 5)


@OPERATIONS
def test_kernels_of_a_gpu_refuse_transforms(op, device):
    require(op, "triton", device, torch.float32)
    function, inputs = of_tensors(op, backend="triton")
    message = rf"{op}: backend 'triton' does not support vmap, .*use backend='auto', 'torch' or 'cpu'"
    with pytest.raises(tk.UnsupportedByBackend, match=message):
        vmap(function, randomness="same")(*stacked(inputs))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        function(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@OPERATIONS
def test_double_backward_of_a_traced_call_is_refused(op):
    function, inputs = of_tensors(op)
    leaves = [x.requires_grad_() for x in inputs]
    if op in ("linear", "linear_cross_entropy"):
        pytest.skip("traced as PyTorch's operators and other operations")
    with Watching(), without_plans():
        gradients = torch.autograd.grad(scalar(function(*leaves)), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=rf"{op}: double backward of a traced call"):
            torch.autograd.grad(scalar(gradients), leaves)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_within_torch_compile(transform):
    torch._dynamo.reset()
    function, inputs = of_tensors("attention", dropout=False)
    loss = lambda *x: scalar(function(*x, seed=False))  # noqa: E731
    given = {
        "vmap": lambda x: vmap(loss)(x, *stacked(inputs)[1:]),
        "grad": lambda x: grad(loss)(x[0], *inputs[1:]),
        "jvp": lambda x: jvp(lambda q: loss(q, *inputs[1:]), (x[0],), (x[1],))[1],
    }[transform]
    x = stacked(inputs)[0]
    torch.testing.assert_close(torch.compile(given, backend="eager", fullgraph=True)(x), given(x))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("op", ["attention", "linear_cross_entropy"])
def test_memory_of_double_backward_is_linear(op, backend, device, monkeypatch):
    """No scores or logits are kept between the passes, beyond those of a block."""
    require(op, backend, device, torch.float32)
    monkeypatch.setattr(_composed, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(_composed, "MIN_ROWS", 32)
    monkeypatch.setattr(_calls, "rows_at_once", lambda *_: 16)
    length, kept = 512, weakref.WeakSet()

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # else a result would keep the node that computed it
            kept.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda each: each.tensor), without_plans():
        if op == "attention":
            leaves = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
            loss = tk.attention(*leaves, causal=True, backend=backend).sin().sum()
        else:
            leaves = [torch.randn(length, 4, requires_grad=True), torch.randn(length, 4, requires_grad=True)]
            loss = tk.linear_cross_entropy(*leaves, torch.arange(length), backend=backend).sin()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    storages = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage().nbytes() for each in kept}
    assert gradients and 0 < sum(storages.values()) <= 4 * 128 * length  # of 4 * 512 * 512 / 2 for the scores


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@OPERATIONS
def test_gradients_of_outputs_that_have_tangents(op, backend, device):
    """As in a loss whose target is made of the tangent (MeanFlow); or of both, differentiated by autograd."""
    require(op, backend, device, torch.float32)
    function, inputs = of_tensors(op, backend=backend)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(scalar(function(*leaves)), leaves)
    outputs, along = jvp(function, tuple(leaves), tangents)
    gradients = torch.autograd.grad(scalar(outputs), leaves, retain_graph=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad(scalar(outputs), leaves, retain_graph=True, create_graph=True)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)
    both = torch.autograd.grad(scalar(outputs) + scalar(along), leaves, allow_unused=True, materialize_grads=True)
    function, inputs = of_tensors(op, torch.float64, backend="torch")
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = jvp(function, tuple(leaves), tuple(x.double() for x in tangents))
    expected = torch.autograd.grad(sum(map(scalar, exact)), leaves, allow_unused=True, materialize_grads=True)
    for got, want in zip(both, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)
    moved = [x.double().requires_grad_() for x in tangents]
    along = jvp(function, tuple(inputs), tuple(moved))[1]
    got = torch.autograd.grad(scalar(along), moved)
    coming = torch.autograd.grad(scalar(leaf := tuple(x.detach().requires_grad_() for x in parts(along))), leaf)
    _, pull = vjp(function, *inputs)
    for one, want in zip(got, pull(coming if isinstance(along, tuple) else coming[0]), strict=True):
        torch.testing.assert_close(one, want)
