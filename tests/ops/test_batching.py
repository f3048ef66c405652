"""vmap and reverse mode of torch.func by attention's kernels: a loop over samples is what they mean."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

import transformer_kernels as tk
from tests.support.parity import require
from transformer_kernels.ops import _batching

BACKENDS = pytest.mark.parametrize("backend", ["torch", "cpu"])
SAMPLES = 3


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Kernels compute calls of any size."""
    monkeypatch.setattr(_batching, "MIN_ELEMENTS", 1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(samples=SAMPLES, batch=2, length=9):
    """q, k and v of each sample."""
    return [normal(samples, batch, heads, length, 8, seed=i) for i, heads in enumerate((4, 2, 2))]


def scalar(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(y.masked_fill(y == -math.inf, 0.0).sin().sum() for y in outputs)


def sample(x, dim, i):
    return x if dim is None else x.select(dim, i)


def check(function, inputs, dims, samples=SAMPLES, wanted=None):
    """vmap and vmap(grad) of a function of tensors are loops over the samples, whose tensors lie along `dims`."""
    wanted = tuple(i for i, x in enumerate(inputs) if x.is_floating_point()) if wanted is None else wanted

    def one(i):
        leaves = [sample(x, dim, i).detach().clone() for x, dim in zip(inputs, dims, strict=True)]
        leaves = [x.requires_grad_() if j in wanted else x for j, x in enumerate(leaves)]
        torch.manual_seed(1)
        outputs = function(*leaves)
        gradients = torch.autograd.grad(scalar(outputs), [leaves[j] for j in wanted])
        return *(outputs if isinstance(outputs, tuple) else (outputs,)), *gradients

    expected = [torch.stack(parts) for parts in zip(*map(one, range(samples)), strict=True)]
    torch.manual_seed(1)
    outputs = vmap(function, tuple(dims), randomness="same")(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    gradients = vmap(grad(lambda *x: scalar(function(*x)), wanted), tuple(dims), randomness="same")(*inputs)
    for got, want in zip((*outputs, *gradients), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


PADDING = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
OPTIONS = {
    "causal": {"causal": True},
    "lse": {"window": 4, "return_lse": True},
    "padding": {"key_padding_mask": PADDING},
    "no key": {"key_padding_mask": PADDING & torch.tensor([[True], [False]])},
    "bias of all": {"attn_bias": normal(9, 9)},
    "bias of a batch": {"attn_bias": normal(2, 4, 9, 9)},
    "mask": {"attn_bias": (torch.arange(81).view(9, 9) % 7 != 3)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.4, 8).view(2, 4)},
    "softcap, sinks": {"softcap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, -torch.inf])},
    "dropout": {"dropout_p": 0.3},
}


@BACKENDS
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name, backend, kernels_alone, device):
    """Shared by all samples."""
    require("attention", backend, device, torch.float32)
    check(lambda q, k, v: tk.attention(q, k, v, **OPTIONS[name], backend=backend), operands(), (0, 0, 0))


@BACKENDS
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_bias", "bias of a row", "alibi_slopes", "sinks"])
def test_options_of_each_sample(name, batch, backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    option = {
        "key_padding_mask": torch.arange(9) < torch.randint(0, 10, (SAMPLES, batch, 1)),
        "attn_bias": normal(SAMPLES, batch, 4, 9, 9, seed=4),
        "bias of a row": normal(SAMPLES, 1, 1, 9, seed=4),
        "alibi_slopes": normal(SAMPLES, 4, seed=4),
        "sinks": normal(SAMPLES, 4, seed=4),
    }[name]
    given = "attn_bias" if name == "bias of a row" else name
    function = lambda q, k, v, x: tk.attention(q, k, v, causal=True, **{given: x}, backend=backend)  # noqa: E731
    wanted = (0, 1, 2) if name in ("key_padding_mask", "alibi_slopes") else (0, 1, 2, 3)
    check(function, [*operands(batch=batch), option], (0, 0, 0, 0), wanted=wanted)


@BACKENDS
@pytest.mark.parametrize("shape", [(4, 9, 9), (2, 1, 9, 9), (1, 4, 9, 9)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_a_bias_that_samples_share(batch, shape, backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    bias = normal(*(shape if shape[0] != 2 else (batch, *shape[1:])), seed=5)
    function = lambda q, k, v, bias: tk.attention(q, k, v, attn_bias=bias, backend=backend)  # noqa: E731
    check(function, [*operands(batch=batch), bias], (0, 0, 0, None))


@BACKENDS
def test_gradients_of_sinks_that_samples_share(backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    function = lambda q, k, v, sinks: tk.attention(q, k, v, sinks=sinks, backend=backend)  # noqa: E731
    check(function, [*operands(), normal(4)], (0, 0, 0, None))


@BACKENDS
@pytest.mark.parametrize(
    "dims", [(1, 0, 0), (2, 3, 0), (3, 3, 3), (4, 4, 4), (0, None, None), (None, 0, 0), (None, None, 2)], ids=str
)
@pytest.mark.parametrize("batch", [1, 2])
def test_axes_of_samples(dims, batch, backend, kernels_alone, device):
    """In any position, or none."""
    require("attention", backend, device, torch.float32)
    inputs = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(operands(batch=batch), dims, strict=True)]
    for given in (inputs, [x.contiguous() for x in inputs]):
        check(lambda q, k, v: tk.attention(q, k, v, causal=True, backend=backend), given, dims)


@BACKENDS
@pytest.mark.parametrize("name", ["plain", "rotated", "padding", "dropout"])
def test_packed_projections(name, backend, kernels_alone, device):
    require("packed_attention", backend, device, torch.float32)
    angles = normal(9, 4)
    options = {
        "plain": {},
        "rotated": {"cos": angles.cos(), "sin": angles.sin()},
        "padding": {"key_padding_mask": PADDING},
        "dropout": {"dropout_p": 0.3},
    }[name]
    for dim in (0, 2):
        qkv = normal(SAMPLES, 2, 9, 8, 8).movedim(0, dim)
        check(lambda x: tk.packed_attention(x, heads=4, causal=True, **options, backend=backend), [qkv], (dim,))
    if name == "rotated":
        angles = normal(SAMPLES, 9, 4)
        function = lambda x, a: tk.packed_attention(x, heads=4, cos=a.cos(), sin=a.sin(), backend=backend)  # noqa: E731
        check(function, [normal(SAMPLES, 2, 9, 8, 8), angles], (0, 0), wanted=(0,))


@BACKENDS
def test_packed_sequences_run_sample_by_sample(backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    check(lambda q, k, v: tk.attention(q, k, v, cu_seqlens=starts, backend=backend), operands(batch=1), (0, 0, 0))


@BACKENDS
def test_dropout_follows_the_randomness_of_vmap(backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    inputs = [x[:1].expand_as(x) for x in operands()]
    function = lambda *x: tk.attention(*x, dropout_p=0.5, backend=backend)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(*inputs)
    same, different = (vmap(function, randomness=how)(*inputs) for how in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])


@BACKENDS
def test_nested(backend, kernels_alone, device):
    require("attention", backend, device, torch.float32)
    inputs = [x.unflatten(0, (2, 3)) for x in operands(6)]
    function = lambda *x: tk.attention(*x, causal=True, backend=backend)  # noqa: E731
    loss = lambda *x: scalar(function(*x))  # noqa: E731
    flat = [x.flatten(0, 1) for x in inputs]
    torch.testing.assert_close(vmap(vmap(function))(*inputs).flatten(0, 1), vmap(function)(*flat))
    expected = vmap(grad(loss, (0, 1, 2)))(*flat)
    for got in (
        vmap(vmap(grad(loss, (0, 1, 2))))(*inputs),
        vmap(grad(lambda *x: vmap(loss)(*x).sum(), (0, 1, 2)))(*inputs),
        grad(lambda *x: vmap(vmap(loss))(*x).sum(), (0, 1, 2))(*inputs),
    ):
        for one, want in zip(got, expected, strict=True):
            torch.testing.assert_close(one.flatten(0, 1), want, rtol=1e-4, atol=1e-5)
    first = [x[0, 0, :1, :, :3] for x in inputs]
    jacobian = jacrev(function)(*first)
    want = torch.autograd.functional.jacobian(lambda q: function(q, *first[1:]), first[0])
    torch.testing.assert_close(jacobian, want, rtol=1e-4, atol=1e-5)
    each = vmap(jacrev(function))(*(x[0, :, :1, :, :3] for x in inputs))
    torch.testing.assert_close(each[0], want, rtol=1e-4, atol=1e-5)


@BACKENDS
def test_derivatives_of_these_derivatives(backend, device):
    """By PyTorch's operators: autograd and forward mode outside of a gradient of torch.func, and vmap of hessians."""
    require("attention", backend, device, torch.float32)
    inputs = [x[0] for x in operands(length=3)]
    loss = lambda *x: scalar(tk.attention(*x, causal=True, backend=backend))  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    expected = torch.autograd.grad(scalar(plain), leaves)
    penalty = scalar(grad(loss, (0, 1, 2))(*leaves))
    for got, want in zip(torch.autograd.grad(penalty, leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    penalty = scalar(vmap(grad(loss, (0, 1, 2)))(*(x[None] for x in leaves)))
    for got, want in zip(torch.autograd.grad(penalty, leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    _, pull = vjp(loss, *inputs)
    one = torch.ones(())
    for got, want in zip(jvp(pull, (one,), (2 * one,))[1], pull(2 * one), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        for got, want in zip(pull(forward_ad.make_dual(one, 2 * one)), pull(2 * one), strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, want, rtol=1e-4, atol=1e-5)
    curvature = vmap(torch.func.hessian(lambda q: loss(q, *inputs[1:])))(inputs[0].expand(2, *inputs[0].shape))
    want = torch.autograd.functional.hessian(lambda q: loss(q, *inputs[1:]), inputs[0])
    torch.testing.assert_close(curvature[1], want, rtol=1e-4, atol=1e-5)


@BACKENDS
def test_no_samples(backend, device):
    require("attention", backend, device, torch.float32)
    inputs = operands(0)
    function = lambda *x: tk.attention(*x, backend=backend)  # noqa: E731
    assert vmap(function)(*inputs).shape == (0, 2, 4, 9, 8)
    gradients = vmap(grad(lambda *x: function(*x).sum(), (0, 1, 2)))(*inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_layer_norm_of_each_sample():
    """PyTorch's own, also differentiated once more."""
    x, weight, bias = normal(SAMPLES, 5, 16), normal(16, seed=1), normal(16, seed=2)
    check(lambda *given: tk.layer_norm(*given), [x, weight, bias], (0, None, None))
    given = [x[0].double().requires_grad_(), weight.double(), bias.double()]
    loss = lambda x: scalar(tk.layer_norm(x, *given[1:], backend="torch"))  # noqa: E731
    assert torch.autograd.gradcheck(grad(loss), given[0])
