"""Calls of torch.nn.functional that this package computes: the rules of `accelerate`, decided when a graph is compiled.

What the sizes decide is decided then, unless a size is a symbol: then the function that runs looks at its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.ops._crossovers import prefers_torch
from transformer_kernels.ops._dropout import MIN_DROPPED, has_dropout_kernel
from transformer_kernels.ops._dropout import dropout as dropout_kernel
from transformer_kernels.ops._pattern import As, Call, Input, Match, Number, Option, Pattern, Replacement, is_faster
from transformer_kernels.ops.attention._pattern import grouped
from transformer_kernels.ops.linear._cpu import multiplies
from transformer_kernels.patching import _torch_calls as calls
from transformer_kernels.patching._products import (
    by_columns,
    faster_linear,
    is_large_by_columns,
    multiplies_under_autocast,
)
from transformer_kernels.patching.graph._canonical import is_plain, same_shape

X = Input("x")
LINEAR = Call("linear", X, Input("weight"), Option("bias"))
PRODUCT = As("product", Call("matmul", X, Input("weight", dims=2)))
BY_COLUMNS = Call("addmm", Input("bias", dims=1), X, Input("weight")) | (PRODUCT + Input("bias", dims=1)) | PRODUCT
SDPA = Call("sdpa", Input("q"), *map(grouped, "kv"), *map(Option, ("mask", "p", "causal", "scale", "grouped")))
DROPOUT = Call("dropout", X, Number("p", symbolic=True))
CROSS_ENTROPY = Call("cross_entropy", X, *map(Option, ("target", "weight", "ignored", "reduction", "smoothing")))
SOFTMAX = Call("softmax", X)
MULTIPLY_ADD = Input("a") * Input("b") + Input("c")
FASTER = "PyTorch's function is the faster one at this size"


def _is_static(*tensors: Any) -> bool:
    return all(isinstance(size, int) for tensor in tensors if tensor is not None for size in tensor.shape)


def _linear(match: Match) -> Replacement | str:
    x, weight, bias = match.fake("x"), match.fake("weight"), match.shape(match.bound["bias"])
    values = (match.bound["x"], match.bound["weight"], match.bound["bias"])
    if weight.dim() != 2:
        return "its weight is not a matrix"
    stored = tuple(match.uncast(value) for value in values[1:])
    if not x.dtype is weight.dtype is match.dtype or (bias is not None and bias.dtype is not x.dtype):
        return _linear_under_autocast(match, values)
    if stored != values[1:] and all(value is None or match.shape(value).dtype is torch.float32 for value in stored):
        found = _linear_under_autocast(match, (values[0], *stored))  # which rounds the weight as it is packed
        if isinstance(found, Replacement):
            return found
    if not match.is_auto:
        return Replacement(ops.linear, values) if match.has_kernel(x.dtype) else "its dtype has no kernel"
    return _faster_linear(match, x, weight, values)


def _faster_linear(match: Match, x: Any, weight: Any, values: tuple[Any, ...]) -> Replacement | str:
    if not x.is_cpu or x.dtype is not torch.float32 or not weight.is_contiguous():
        return FASTER
    if not _is_static(x):
        return Replacement(faster_linear, values)
    return Replacement(ops.linear, values) if multiplies(x, weight, match.trains) else FASTER


def _linear_under_autocast(match: Match, values: tuple[Any, ...]) -> Replacement | str:
    if not torch.is_autocast_enabled("cpu") or not match.is_auto or not match.fake("x").is_cpu:
        return "the dtypes differ"
    x, weight = match.fake("x"), match.shape(values[1])
    if _is_static(x, weight) and not multiplies_under_autocast(x, weight, match.trains):
        return FASTER
    return Replacement(autocast_linear, values)


def _linear_relu(match: Match) -> Replacement | str:
    found = _linear(match)
    if isinstance(found, str):
        return found
    if found.function is not ops.linear:
        return "its sizes are symbols"
    return Replacement(ops.linear, found.args, {"activation": "relu"})


def linear_by_columns(x: Tensor, weight: Tensor, bias: Tensor | None = None, backend: str | None = None) -> Tensor:
    return ops.linear(x, weight.t(), bias, backend=backend)


def _by_columns(match: Match) -> Replacement | str:
    """x W + b, W (K, N), as in transformers' Conv1D."""
    x, weight, bias = match.fake("x"), match.fake("weight"), match.shape(match.bound.get("bias"))
    found = match.bound.keys() & {"weight", "bias", "product"}
    if x.dtype is not match.dtype or any(match.fake(name).dtype is not match.dtype for name in found):
        return "the dtypes differ"
    if bias is not None and str(bias.shape[0]) != str(weight.shape[1]):
        return "the bias is not one number per column"
    values = (match.bound["x"], match.bound["weight"], match.bound.get("bias"))
    if not match.is_auto:
        return Replacement(linear_by_columns, values) if match.has_kernel(x.dtype) else "its dtype has no kernel"
    if not x.is_cpu or x.dtype is not torch.float32 or not _is_static(weight) or not weight.is_contiguous():
        return FASTER
    if not _is_static(x):
        return Replacement(by_columns, (*values, None))
    ours = multiplies(x, weight, match.trains) and is_large_by_columns(x, weight)
    return Replacement(linear_by_columns, values) if ours else FASTER


def dropout(x: Tensor, p: float, residual: Tensor | None = None, backend: str | None = None) -> Tensor:
    return dropout_kernel(x, p, residual)


def _dropout(match: Match) -> Replacement | str:
    x = match.fake("x")
    if not has_dropout_kernel(x) or x.dtype is not match.dtype:
        return "its mask is drawn by PyTorch on this device and for this dtype"
    if match.is_auto and match.size(*x.shape) < MIN_DROPPED:
        return FASTER
    if "residual" not in match.bound:
        return Replacement(dropout, (match.bound["x"], match.bound["p"]))
    residual = match.fake("residual")
    if str(residual.shape) != str(x.shape) or residual.dtype is not x.dtype:
        return "a summand broadcasts, or the dtypes differ"
    return Replacement(dropout, (match.bound["x"], match.bound["p"], match.bound["residual"]))


def _handled(handler: Callable[..., Tensor | str], original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that asks a handler of `accelerate` and calls torch's function where the handler leaves the call."""

    def function(*arguments: Any, backend: str = "auto", **options: Any) -> Tensor:
        result = calls.attempted(handler, backend, *arguments, **options)
        return original(*arguments, **options) if isinstance(result, str) else result

    function.__name__ = original.__name__
    return function


attention = _handled(calls.attention, F.scaled_dot_product_attention)
autocast_linear = _handled(calls.linear, F.linear)


def _needs_no_handler(match: Match, grouped: bool) -> bool:
    """Whether a call without a mask is our `attention` of the same arguments, whatever their values."""
    tensors = [match.fake(name) for name in "qkv"]
    p, causal, scale = (match.bound[name] for name in ("p", "causal", "scale"))
    finite = scale is None or (isinstance(scale, float) and math.isfinite(scale))
    known = finite and isinstance(causal, bool) and isinstance(p, float)
    if not known or not _is_static(*tensors) or not all(map(is_plain, tensors)):
        return False
    q, k, v = tensors
    if torch.is_autocast_enabled(q.device.type) or (causal and q.shape[2] != k.shape[2]) or 0 in (*q.shape, *k.shape):
        return False
    return calls.unlike_ours(q, k, v, grouped) is None


def _attention(match: Match) -> Replacement | str:
    bound, q, k, v = match.bound, match.fake("q"), match.fake("k"), match.fake("v")
    if not match.has_kernel(q.dtype, k.dtype, v.dtype) or not q.dim() == k.dim() == v.dim() == 4:
        return "query, key and value are not (B, H, L, D) of a dtype with a kernel"
    names = ("q", "k", "v", "mask", "p", "causal")
    options = {"scale": bound["scale"], "enable_gqa": bound["grouped"] or "groups" in bound}
    direct = bound["mask"] is None and _needs_no_handler(match, options["enable_gqa"])
    if match.is_auto and q.is_cpu:
        scores = match.size(*q.shape[:3], k.shape[2])
        name = "attention" if direct else "attention rerouted"
        if prefers_torch(name, scores, q.dtype.itemsize, recorded=match.trains):
            return FASTER
    if direct:
        options = {"scale": bound["scale"], "dropout_p": bound["p"], "causal": bound["causal"]}
        return Replacement(ops.attention, tuple(bound[name] for name in "qkv"), options)
    return Replacement(attention, tuple(bound[name] for name in names), options)


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str, smoothing: float,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    index = calls.REDUCTIONS.index(reduction)
    result = calls.attempted(calls.cross_entropy, backend, x, target, weight, index, ignored, smoothing)
    if not isinstance(result, str):
        return result
    return F.cross_entropy(x, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)


def _cross_entropy(match: Match) -> Replacement | str:
    bound, x = match.bound, match.fake("x")
    if not match.has_kernel(x.dtype) or bound["reduction"] not in calls.REDUCTIONS:
        return "its dtype has no kernel"
    if not is_faster(match, "cross_entropy", x):
        return FASTER
    names = ("x", "target", "weight", "ignored", "reduction", "smoothing")
    return Replacement(cross_entropy, tuple(bound[name] for name in names))


def _multiply_add(match: Match) -> Replacement | str:
    """a b + c in one pass; its backward pass has more passes than the backward passes of the two."""
    if match.trains or not match.is_auto:
        return "with gradients the product and the sum are faster"
    values = [match.fake(name) for name in "abc"]
    if not match.dtype.is_floating_point or any(x is None or x.dtype is not match.dtype for x in values):
        return "the dtypes differ"
    result = match.shape(match.root)
    whole = [x for x in values if same_shape(x.shape, result.shape)]  # type: ignore[union-attr]
    if not whole or not all(same_shape(x.stride(), result.stride()) for x in whole):  # type: ignore[union-attr]
        return "its result is laid out in memory as the product"
    return Replacement(torch.addcmul, tuple(match.bound[name] for name in "cab"))


PATTERNS = (
    Pattern("linear_relu", Call("relu", LINEAR), _linear_relu),
    Pattern("linear", LINEAR, _linear),
    Pattern("linear", BY_COLUMNS, _by_columns),
    Pattern("dropout_add", DROPOUT + Input("residual"), _dropout),
    Pattern("dropout", DROPOUT, _dropout),
    Pattern("attention", SDPA, _attention),
    Pattern("cross_entropy", CROSS_ENTROPY, _cross_entropy),
    Pattern("multiply_add", MULTIPLY_ADD, _multiply_add),
)
