"""The routes of a call: raw, autograd.Function, registered operator; and the transforms that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from transformer_kernels import _dropout


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def total(result: Any) -> Tensor:
    return (
        sum(part.float().square().sum() for part in result)
        if isinstance(result, tuple)
        else result.float().square().sum()
    )


def classes(x: Tensor) -> Tensor:
    """A class below 5 for each row, one of them ignored."""
    rows = x.shape[:-1]
    column = torch.arange(rows[-1], device=x.device)
    return (column % 5).masked_fill(column == 1, -100).expand(rows)


TOKENS = torch.tensor([[1, 6, 1, 0], [3, 3, 3, 5]])

CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "attention": (
        lambda q, k, v: tk.attention(q, k, v, causal=True, dropout_p=0.2, backend="torch"),
        lambda: (leaf(2, 4, 5, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8)),
    ),
    "packed_attention": (
        lambda qkv: tk.packed_attention(qkv, heads=4, causal=True, dropout_p=0.2, backend="torch"),
        lambda: (leaf(2, 5, 8, 8),),
    ),
    "softmax": (lambda x: tk.softmax(x, causal=True, scale=0.5, backend="torch"), lambda: (leaf(2, 5, 7),)),
    "layer_norm": (lambda x, w, b: tk.layer_norm(x, w, b, backend="torch"), lambda: (leaf(3, 6), leaf(6), leaf(6))),
    "add_layer_norm": (
        lambda x, r, w: tk.add_layer_norm(x, r, w, dropout_p=0.3, backend="torch"),
        lambda: (leaf(3, 6), leaf(3, 6), leaf(6)),
    ),
    "gelu": (lambda x: tk.gelu(x, backend="torch"), lambda: (leaf(3, 6),)),
    "bias_gelu": (lambda x, b: tk.bias_gelu(x, b, approximate="tanh", backend="torch"), lambda: (leaf(3, 6), leaf(6))),
    "bias_relu": (lambda x, b: tk.bias_relu(x, b, backend="torch"), lambda: (leaf(3, 6), leaf(6))),
    "cross_entropy": (
        lambda x: tk.cross_entropy(x, classes(x), label_smoothing=0.1, backend="torch"),
        lambda: (leaf(2, 5, 7),),
    ),
    "linear_cross_entropy": (
        lambda x, w, b: tk.linear_cross_entropy(x, w, classes(x), b, backend="torch"),
        lambda: (leaf(3, 6), leaf(5, 6), leaf(5)),
    ),
}
CALLS["embedding"] = (
    lambda weight, positions, norm_weight, norm_bias: tk.embedding(
        TOKENS.to(weight.device), weight, positions, norm_weight, norm_bias, scale=1.5, dropout_p=0.2, backend="torch"
    ),
    lambda: (leaf(7, 6), leaf(5, 6), leaf(6), leaf(6)),
)
OPERATIONS = pytest.mark.parametrize("op", list(CALLS))


@OPERATIONS
def test_double_backward_is_an_error_not_a_zero(op: str) -> None:
    function, make = CALLS[op]
    inputs = make()
    grads = torch.autograd.grad(total(function(*inputs)), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"{op}: double backward is not supported; use python_ref.ops.{op}"):
        grads[0].sum().backward()


@OPERATIONS
def test_vmap_is_refused(op: str) -> None:
    function, make = CALLS[op]
    inputs = tuple(tensor.detach() for tensor in make())
    with pytest.raises(RuntimeError, match=rf"{op}: vmap and the transforms of torch.func are not supported"):
        torch.func.vmap(lambda x: function(x, *inputs[1:]))(torch.stack([inputs[0], inputs[0]]))


@OPERATIONS
def test_forward_mode_is_refused(op: str) -> None:
    function, make = CALLS[op]
    inputs = tuple(tensor.detach() for tensor in make())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"{op}: forward-mode AD is not supported"):
        function(forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])), *inputs[1:])


@OPERATIONS
def test_retain_graph_and_a_second_backward(op: str) -> None:
    function, make = CALLS[op]
    inputs = make()
    loss = total(function(*inputs))
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@OPERATIONS
def test_activation_checkpointing_draws_the_same_dropout(op: str) -> None:
    function, make = CALLS[op]
    results = []
    for wrapped in (function, lambda *inputs: checkpoint(function, *inputs, use_reentrant=False)):
        inputs = make()
        torch.manual_seed(4)
        results.append(torch.autograd.grad(total(wrapped(*inputs)), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@OPERATIONS
def test_meta_tensors_give_shapes(op: str) -> None:
    function, make = CALLS[op]
    inputs = make()
    expected, got = function(*inputs), function(*(tensor.to("meta") for tensor in inputs))
    for want, have in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, got)), strict=True):
        assert have.device.type == "meta" and have.shape == want.shape and have.dtype == want.dtype
        assert have.stride() == want.stride()


@OPERATIONS
def test_compiles_into_one_graph(op: str) -> None:
    function, make = CALLS[op]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for each in (function, compiled):
        inputs = make()
        torch.manual_seed(9)
        outputs = each(*inputs)
        results.append([total(outputs).detach(), *torch.autograd.grad(total(outputs), inputs)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@OPERATIONS
def test_compiled_without_gradients_and_for_any_length(op: str) -> None:
    function, make = CALLS[op]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = make()
    with torch.no_grad():
        torch.manual_seed(9)
        want = total(function(*inputs))
        torch.manual_seed(9)
        torch.testing.assert_close(total(compiled(*inputs)), want)


def test_use_backend_reaches_into_a_compiled_function() -> None:
    compiled = torch.compile(lambda x: tk.gelu(x) * 2, fullgraph=True, backend="aot_eager")
    x = torch.randn(4)
    with tk.use_backend("torch"):
        torch.testing.assert_close(compiled(x), 2 * torch.nn.functional.gelu(x))


STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
SAMPLES = {
    "gelu": [(leaf(3, 6), "none", "torch"), (leaf(0, 6), "tanh", "torch")],
    "bias_gelu": [(leaf(3, 6), leaf(6), "tanh", "torch")],
    "bias_relu": [(leaf(3, 6), leaf(6), "torch"), (leaf(0, 6), leaf(6), None)],
    "embedding": [
        (leaf(7, 6), TOKENS, leaf(9, 6), ids, norm, bias, seed, 2.0, 1e-5, 0.0 if seed is None else 0.3, "torch")
        for ids, norm, bias, seed in [
            (None, leaf(6), leaf(6), torch.tensor([5])),
            (TOKENS.int() + 2, leaf(6), None, None),
            (None, None, None, torch.tensor([5])),
        ]
    ]
    + [(leaf(7, 6), TOKENS.int(), None, None, None, None, None, 1.0, 1e-5, 0.0, None)],
    "softmax": [(leaf(3, 6), None, False, 1.0, "torch"), (leaf(2, 5, 6), None, True, 0.5, None)],
    "layer_norm": [(leaf(3, 6), leaf(6), bias, 1e-5, "torch") for bias in (None, leaf(6))],
    "cross_entropy": [
        (leaf(3, 6), torch.tensor([0, 5, -100]), -100, smoothing, reduction, "torch")
        for smoothing, reduction in ((0.0, "mean"), (0.1, "sum"), (0.1, "none"))
    ],
    "linear_cross_entropy": [
        (leaf(3, 6), leaf(9, 6), torch.tensor([0, 8, -100]), bias, -100, 0.1, reduction, torch.float32, wanted, "torch")
        for bias, reduction, wanted in ((None, "sum", [True, True, False]), (leaf(9), "mean", [True] * 3))
    ],
    "add_layer_norm": [
        (leaf(3, 6), leaf(3, 6), leaf(6), bias, seed, 1e-5, 0.0 if seed is None else 0.3, "torch")
        for bias, seed in itertools.product((None, leaf(6)), (None, torch.tensor([5])))
    ],
    "attention": [
        (leaf(2, 4, 5, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8), mask, bias, seed, None, causal, window, p, 0.3, "torch")
        for mask, bias, seed, causal, window, p in [
            (None, None, None, True, None, 0.0),
            (torch.ones(2, 7, dtype=torch.bool), leaf(1, 4, 5, 7), torch.tensor([5]), False, 3, 0.2),
        ]
    ]
    + [(leaf(1, 2, 9, 8), *[leaf(1, 2, 9, 8)] * 2, None, None, None, STARTS, False, None, 0.0, 0.3, "torch")],
}


@pytest.mark.parametrize(("op", "index"), [(op, i) for op in SAMPLES for i in range(len(SAMPLES[op]))])
def test_opcheck(op: str, index: int) -> None:
    torch.library.opcheck(getattr(torch.ops.transformer_kernels, op).default, SAMPLES[op][index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_mixed_dtypes(dtype: torch.dtype) -> None:
    x, w, bias = leaf(2, 5, 8), leaf(8), leaf(8)
    with torch.autocast("cpu", dtype=dtype):
        low = torch.nn.functional.linear(x, torch.randn(8, 8))
        q = torch.randn(2, 1, 5, 8)
        assert tk.attention(low[:, None], q, q).dtype == dtype
        assert tk.layer_norm(low, w, bias).dtype == torch.float32
        normed, summed = tk.add_layer_norm(low, x, w, bias)
        assert normed.dtype == summed.dtype == torch.float32
        assert tk.bias_gelu(low, bias).dtype == tk.bias_relu(low, bias).dtype == dtype
        assert tk.softmax(low).dtype == dtype
    (summed.sum() + normed.square().sum()).backward()
    assert x.grad.dtype == torch.float32


def test_gradients_only_where_they_are_wanted() -> None:
    x, r, w = leaf(3, 6), leaf(3, 6).detach(), leaf(6).detach()
    normed, _ = tk.add_layer_norm(x, r, w, backend="torch")
    normed.sum().backward()
    assert x.grad is not None and r.grad is None and w.grad is None


def test_no_graph_is_kept_without_gradients() -> None:
    x = leaf(3, 6)
    with torch.no_grad():
        assert tk.gelu(x).grad_fn is None
    with torch.inference_mode():
        assert tk.softmax(x).is_inference()


def test_the_dropout_mask_is_forgotten_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dropout, "compiled", None)
    before = len(_dropout._remembered)
    tensors = (leaf(4, 8), leaf(4, 8), leaf(8))
    normed, _ = tk.add_layer_norm(*tensors, dropout_p=0.5, backend="torch")
    assert len(_dropout._remembered) == before + 1
    del normed, _
    assert len(_dropout._remembered) == before
