"""The routes of a call: raw, autograd.Function, registered operator."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.operations import EXAMPLES, prepared
from tests.support.operations import function as public
from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops import _dropout


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def total(result):
    results = result if isinstance(result, tuple) else (result,)
    return sum((part.float().square().sum() for part in results), torch.zeros(()))


def call_of(op, rows=4, columns=6, dtype=torch.float32, backend="torch"):
    """The operation as a function of its differentiable tensors, in one backend, and those tensors."""
    tensors = EXAMPLES[op].make(rows, columns, dtype)
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]

    def function(*leaves):
        others = {name: x.to(leaves[0].device) for name, x in tensors.items()}
        return public(op, backend)(**{**others, **dict(zip(names, leaves, strict=True))})

    return function, [tensors[name] for name in names]


@pytest.fixture
def fresh_compiler():
    """All operations share one function, so their compilations count towards the same limit."""
    torch._dynamo.reset()


OPERATIONS = pytest.mark.parametrize("op", list(EXAMPLES))


@OPERATIONS
def test_retain_graph_and_a_second_backward(op):
    function, inputs = call_of(op)
    loss = total(function(*inputs))
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@OPERATIONS
def test_activation_checkpointing_draws_the_same_dropout(op):
    function, _ = call_of(op)
    results = []
    for wrapped in (function, lambda *inputs: checkpoint(function, *inputs, use_reentrant=False)):
        _, inputs = call_of(op)
        torch.manual_seed(4)
        results.append(torch.autograd.grad(total(wrapped(*inputs)), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@OPERATIONS
def test_meta_tensors_give_shapes(op):
    function, inputs = call_of(op)
    expected, got = function(*inputs), function(*(tensor.to("meta") for tensor in inputs))
    for want, have in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, got)), strict=True):
        assert have.device.type == "meta" and have.shape == want.shape and have.dtype == want.dtype
        assert have.stride() == want.stride()


@pytest.mark.usefixtures("fresh_compiler")
@OPERATIONS
def test_compiles_into_one_graph(op):
    function, _ = call_of(op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for each in (function, compiled):
        _, inputs = call_of(op)
        torch.manual_seed(9)
        outputs = each(*inputs)
        results.append([total(outputs).detach(), *torch.autograd.grad(total(outputs), inputs)])
        torch.manual_seed(9)
        outputs = each(*inputs)
        sums = sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))
        results[-1] += torch.autograd.grad(sums, inputs)  # of one number, expanded
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@OPERATIONS
def test_compiled_without_gradients_and_for_any_length(op):
    function, inputs = call_of(op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        torch.manual_seed(9)
        want = total(function(*inputs))
        torch.manual_seed(9)
        torch.testing.assert_close(total(compiled(*inputs)), want)


@pytest.mark.filterwarnings("ignore")
@OPERATIONS
@torch.no_grad()
def test_a_trace_of_jit_computes_anew(op):
    compiled = cpu.unavailable(torch.device("cpu")) is None
    function, inputs = call_of(op, backend="cpu" if compiled else "torch")  # kernels that are opaque to a trace
    traced = torch.jit.trace(lambda *given: total(function(*given)), inputs, check_trace=False)
    given = [2 * each for each in inputs]
    results = []
    for each in (traced, lambda *given: total(function(*given))):
        torch.manual_seed(9)
        results.append(each(*given))
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@OPERATIONS
def test_what_pytorch_makes_by_default_is_not_what_is_computed_in(op, backend):
    function, inputs = call_of(op, backend=backend)
    if op == "attention":
        inputs = [*inputs, leaf(1, 4, 4, 4)]  # a bias, whose gradient is summed in separate memory

        def function(q, k, v, bias):
            return tk.attention(q, k, v, attn_bias=bias, causal=True, return_lse=True, backend=backend)

    def run():
        torch.manual_seed(9)
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs])]

    plain = run()
    with torch.device("meta"):
        other_device = run()
    torch.set_default_dtype(torch.float64)
    try:
        other_dtype = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for want, *got in zip(plain, other_device, other_dtype, strict=True):
        assert all(torch.equal(each, want) and each.dtype is want.dtype for each in got)


def test_use_backend_reaches_into_a_compiled_function():
    compiled = torch.compile(lambda x: tk.gelu(x) * 2, fullgraph=True, backend="aot_eager")
    x = torch.randn(4)
    with tk.use_backend("torch"):
        torch.testing.assert_close(compiled(x), 2 * torch.nn.functional.gelu(x))


TOKENS = torch.tensor([[1, 6, 1, 0], [3, 3, 3, 5]])
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
NINE = leaf(1, 2, 9, 8)
PADDING = torch.ones(2, 7, dtype=torch.bool)
MORE_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("gelu", (leaf(0, 6),), {}),
    ("bias_relu", (leaf(0, 6), leaf(6)), {}),
    ("softmax", (leaf(3, 6),), {"mask": torch.ones(6, dtype=torch.bool)}),
    ("layer_norm", (leaf(3, 6), leaf(6)), {}),
    ("layer_norm", (leaf(3, 6, dtype=torch.bfloat16), leaf(6)), {}),
    ("add_layer_norm", (leaf(3, 6), leaf(3, 6), leaf(6)), {}),
    ("embedding", (TOKENS, leaf(7, 6)), {}),
    ("embedding", (TOKENS, leaf(7, 6), leaf(9, 6), leaf(6)), {"position_ids": TOKENS.int() + 2}),
    ("cross_entropy", (leaf(3, 6), torch.tensor([0, 5, -100])), {"reduction": "none"}),
    ("cross_entropy", (leaf(3, 6), torch.tensor([0, 5, -100])), {"reduction": "sum", "label_smoothing": 0.1}),
    ("linear_cross_entropy", (leaf(3, 6), leaf(9, 6).detach(), torch.tensor([0, 8, -100])), {"reduction": "sum"}),
    ("attention", (leaf(2, 4, 5, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8)), {"key_padding_mask": PADDING, "window": 3}),
    ("attention", (leaf(2, 4, 5, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8)), {"attn_bias": leaf(1, 4, 5, 7)}),
    ("attention", (NINE, NINE, NINE), {"cu_seqlens": STARTS, "dropout_p": 0.3}),
    ("attention", (NINE, NINE, NINE), {"sinks": leaf(2), "causal": True}),
]


@pytest.mark.parametrize("backend", ["torch", None])
@OPERATIONS
def test_opcheck(op, backend):
    tensors = EXAMPLES[op].make(4, 6, torch.float64 if backend == "torch" else torch.float32)
    check_operators(op, prepared(op, **tensors, **EXAMPLES[op].options), backend)


@OPERATIONS
def test_a_traced_graph_has_the_operator_alone(op):
    """Kernels are not made while a call is traced: what they would compute or allocate would be in the graph."""
    call, operation = prepared(op, **EXAMPLES[op].make(4, 6), **EXAMPLES[op].options), dispatch.OPERATIONS[op]
    if call.may_be_composed():
        pytest.skip("other operators may compute it")
    with torch.no_grad():
        graph = make_fx(lambda x: operation(type(call)(x, *call[1:]), None))(call[0].detach()).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name] == [f"transformer_kernels.{op}.default"]


@pytest.mark.parametrize("index", range(len(MORE_CALLS)))
def test_opcheck_of_other_calls(index):
    op, arguments, options = MORE_CALLS[index]
    check_operators(op, prepared(op, *arguments, **options), "torch")


def check_operators(op, call, backend):
    """opcheck of the operator, and of its backward operator with the arguments of autograd."""
    operation = dispatch.OPERATIONS[op]
    values = operation.flat(call)
    torch.library.opcheck(getattr(torch.ops.transformer_kernels, op).default, (*values, backend))
    seen: list[tuple[Any, ...]] = []
    registered = operation._registered_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "_registered_backward", lambda *given: seen.append(given) or registered(*given))
        outputs = operation._registered(*values, backend)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        total(tuple(output for output in outputs if output.requires_grad)).backward()
    detached = (x.detach() if isinstance(x, Tensor) else x for x in seen[0])
    torch.library.opcheck(registered, tuple(detached))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_mixed_dtypes(dtype):
    x, w, bias = leaf(2, 5, 8), leaf(8), leaf(8)
    with torch.autocast("cpu", dtype=dtype):
        low = torch.nn.functional.linear(x, torch.randn(8, 8))
        q = torch.randn(2, 1, 5, 8)
        assert tk.attention(low[:, None], q, q).dtype == dtype
        assert tk.layer_norm(low, w, bias).dtype == torch.nn.functional.layer_norm(low, (8,), w, bias).dtype == dtype
        normed, summed = tk.add_layer_norm(low, x, w, bias)
        assert normed.dtype == summed.dtype == torch.float32
        assert tk.bias_gelu(low, bias).dtype == tk.bias_relu(low, bias).dtype == dtype
        assert tk.softmax(low).dtype == dtype
    (summed.sum() + normed.square().sum()).backward()
    assert x.grad.dtype == torch.float32


@OPERATIONS
def test_autocast_of_one_tensor_in_another_dtype(op):
    """As where a layer before was autocast and another was not; the gradients have the dtypes of the tensors."""
    function, inputs = call_of(op)
    names = [name for name, tensor in EXAMPLES[op].make(4, 6).items() if tensor.requires_grad]
    torch.manual_seed(5)
    expected = function(*inputs)
    for low, name in enumerate(names):
        if name not in ("x", "residual", "q", "k", "v", "qkv", "gate", "up", "logits"):
            continue  # a parameter
        given = [x.detach().to(torch.bfloat16 if i == low else x.dtype).requires_grad_() for i, x in enumerate(inputs)]
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            result = function(*given)
        for got, want in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, expected)), strict=True):
            torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.1)
        grads = torch.autograd.grad(total(result), given)
        assert [grad.dtype for grad in grads] == [x.dtype for x in given]


def test_no_graph_is_kept_without_gradients():
    x = leaf(3, 6)
    with torch.no_grad():
        assert tk.gelu(x).grad_fn is None
    with torch.inference_mode():
        assert tk.softmax(x).is_inference()


def test_the_dropout_mask_is_forgotten_with_its_seed(monkeypatch):
    monkeypatch.setattr(_dropout, "compiled", lambda: None)
    before = len(_dropout._cached)
    tensors = (leaf(4, 8), leaf(4, 8), leaf(8))
    normed, _ = tk.add_layer_norm(*tensors, dropout_p=0.5, backend="torch")
    assert len(_dropout._cached) == before + 1
    del normed, _
    assert len(_dropout._cached) == before


class WithoutGradient(torch.autograd.Function):
    """The sum of its inputs, without a gradient for the first."""

    @staticmethod
    def forward(ctx, x, y):
        return x.sum() + y

    @staticmethod
    def backward(ctx, *grads):
        return None, grads[0]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Watching])
@pytest.mark.parametrize("op", EXAMPLES)
def test_where_no_gradient_comes_in_none_or_zeros_go_out(op, mode):
    call, tensors = call_of(op)
    y = torch.zeros((), requires_grad=True)
    with mode():
        result = call(*tensors)
        WithoutGradient.apply(result[0] if isinstance(result, tuple) else result, y).backward()
    assert y.grad is not None
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in tensors)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_traced_call_has_the_gradients_of_sinks(backend):
    q, sinks = leaf(1, 2, 9, 8), leaf(2)
    plain, traced = [], []
    for mode, found in ((nullcontext, plain), (Watching, traced)):
        with mode():
            out, lse = tk.attention(q, q, q, sinks=sinks, return_lse=True, backend=backend)
            found += [out, lse, *torch.autograd.grad((out, lse), (q, sinks), (out.detach().sin(), lse.detach().cos()))]
    torch.testing.assert_close(traced, plain)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_gradients_through_conjugates(backend):
    """The gradient of the second part of a conjugate is a view whose negative bit is set."""
    x = torch.randn(2, 4, 8, dtype=torch.float64 if backend == "torch" else torch.float32, requires_grad=True)
    weight = torch.randn(4, 8, dtype=torch.complex64)

    def loss(function):
        return (torch.complex(function(x[0]), function(x[1])).conj() * weight).real.sum()

    expected = torch.autograd.grad(loss(torch.nn.functional.gelu), x)
    torch.testing.assert_close(torch.autograd.grad(loss(partial(tk.gelu, backend=backend)), x), expected)


def test_negated_views_are_refused():
    negated = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    for _ in range(2):
        tk.gelu(torch.randn(4, 16)[:, ::2])  # a call of the same layout
        with pytest.raises(TypeError, match=r"gelu: x must not be a negated view; pass x.resolve_neg\(\)"):
            tk.gelu(negated)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_hooks_of_saved_tensors_may_change_their_strides(backend):
    """Offloading and compression return what they were given in another layout."""
    packed = torch.randn(2, 24, 3, 4, 8)
    found = []
    for layout in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        x = packed.clone().requires_grad_()
        q, k, v = x.permute(2, 0, 3, 1, 4)
        with torch.autograd.graph.saved_tensors_hooks(layout, lambda x: x):
            out = tk.attention(q, k, v, backend=backend)
        out.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
