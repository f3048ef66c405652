"""The rules by which torch's operators become canonical expressions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from transformer_kernels.patching._torch_calls import default_eps
from transformer_kernels.patching.graph._canonical import (
    FLAT,
    OPAQUE,
    Canonical,
    Expr,
    Rule,
    fake,
    is_same,
    is_tensor,
    name_of,
    number,
    same_shape,
)
from transformer_kernels.patching.graph._encoder_layer import PARAMETERS as ENCODER_LAYER


def _one(dim: Any) -> Any:
    """An axis that may be given as a list of one."""
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim


def _last(dim: Any, x: Any) -> bool:
    dim = _one(dim)
    return isinstance(dim, int) and dim in (-1, fake(x).dim() - 1)


def _narrows(dtype: Any, x: Any) -> bool:
    """Whether a reduction rounds its input."""
    return dtype is not None and torch.promote_types(dtype, fake(x).dtype) is not dtype


def _mul(c: Canonical, node: fx.Node, a: Any, b: Any) -> Expr | None:
    for x, y in ((a, b), (b, a)):
        if (factor := c.number(y)) is not None:
            return _mean_of_sum(c, x, factor) or _times(c, node, x, factor)
    return _product(c, a, b) if is_tensor(a) and is_tensor(b) else None


def _times(c: Canonical, node: fx.Node, x: Any, factor: float) -> Expr:
    """x times a number, which takes in a number inside x."""
    base, inner, via = _without_factor(c, x)
    return Expr("mul", (base, inner * factor), via)


def _without_factor(c: Canonical, x: Any) -> tuple[Any, float, tuple[fx.Node, ...]]:
    """y, f and the nodes between them, where x is y times a number f."""
    known = c.of(x) if is_tensor(x) and fake(x).is_floating_point() else OPAQUE
    if known.op != "mul" or number(known.args[1]) is None:
        return x, 1.0, ()
    return known.args[0], known.args[1], (x, *known.via)


def _product(c: Canonical, a: Any, b: Any) -> Expr:
    """The product of two tensors, numbers in them last."""
    left, by, via = _without_factor(c, a)
    right, other, more = _without_factor(c, b)
    if c.is_same_value(left, right):
        more = (*more, right) if left is not right else more
        base = Expr("square", (left,), (*via, *more))
    else:
        base = Expr("mul", (left, right), (*via, *more))
    return base if by * other == 1.0 else Expr("mul", (base, by * other))


def _mean_of_sum(c: Canonical, x: Any, factor: float) -> Expr | None:
    """sum(x) / n over rows of n elements."""
    inner = c.of(x)
    if inner.op not in ("sum", "sum_flat"):
        return None
    width = fake(inner.args[0]).shape[-1]
    if not isinstance(width, int) or abs(factor * width - 1.0) > 1e-6:
        return None
    return Expr("mean" if inner.op == "sum" else "mean_flat", inner.args, (x,))


def _div(c: Canonical, node: fx.Node, a: Any, b: Any, rounding_mode: Any = None) -> Expr | None:
    if rounding_mode is not None:
        return None
    if (divisor := c.number(b)) is not None:
        if divisor == 0 or not fake(node).dtype.is_floating_point:
            return None
        return _mean_of_sum(c, a, 1.0 / divisor) or _times(c, node, a, 1.0 / divisor)
    if not is_tensor(b):
        return None
    root = c.of(b)
    if root.op == "sqrt":
        inverse = Expr("rsqrt", root.args, (b,))
        return inverse if c.number(a) == 1 else Expr("mul", (a, inverse))
    return Expr("div", (a if c.number(a) is None else c.number(a), b))


def _add(c: Canonical, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> Expr | None:
    if isinstance(fake(b), torch.SymFloat):
        return Expr("add", (a, b)) if alpha == 1 else None
    if number(alpha) is None:
        return None
    for x, y, factor in ((a, b, alpha), (b, a, 1)):
        if (constant := c.number(y)) is not None:
            inner = x if factor == alpha or alpha == 1 else Expr("mul", (x, alpha))
            return Expr("add", (inner, constant * factor))
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return Expr("add", (a, b if alpha == 1 else Expr("mul", (b, alpha))))
    return None


def _addcmul(c: Canonical, node: fx.Node, input: Any, a: Any, b: Any, value: Any = 1) -> Expr | None:
    return Expr("add", (_product(c, a, b), input)) if value == 1 and is_tensor(a) and is_tensor(b) else None


def _sub(c: Canonical, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> Expr | None:
    if alpha != 1:
        return None
    if (constant := c.number(b)) is not None:
        return Expr("add", (a, -constant))
    if (constant := c.number(a)) is not None:
        return Expr("add", (Expr("mul", (b, -1)), constant))
    return Expr("sub", (a, b)) if is_tensor(a) and is_tensor(b) else None


def _pow(c: Canonical, node: fx.Node, a: Any, b: Any) -> Expr | None:
    name = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt"}.get(c.number(b))  # type: ignore[arg-type]
    return Expr(name, (a,)) if name is not None and is_tensor(a) else None


def _reciprocal(c: Canonical, node: fx.Node, a: Any) -> Expr | None:
    root = c.of(a)
    return Expr("rsqrt", root.args, (a,)) if root.op == "sqrt" else Expr("div", (1, a))


def _matmul(c: Canonical, node: fx.Node, a: Any, b: Any) -> Expr | None:
    if min(fake(a).dim(), fake(b).dim()) < 2:
        return None
    right = c.of(b)
    if right.op == "permute" and right.args[1] == (1, 0) and is_tensor(right.args[0]):
        return Expr("linear", (a, right.args[0], None), (b,))
    return Expr("matmul", (a, b))


def _baddbmm(c: Canonical, node: fx.Node, input: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Expr | None:
    if number(beta) is None or number(alpha) is None:
        return None
    product = Expr("matmul", (a, b))
    product = product if alpha == 1 else Expr("mul", (product, alpha))
    if beta == 0:
        return product
    return Expr("add", (product, input if beta == 1 else Expr("mul", (input, beta))))


def _einsum(c: Canonical, node: fx.Node, equation: Any, *operands: Any) -> Expr | None:
    """A batched product, as matmul of permuted operands, the second of which may have one axis less."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or equation.count("->") != 1:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    if "." in equation:
        extra = [
            fake(x).dim() - len(labels.replace("...", "")) for x, labels in zip(operands, (left, right), strict=True)
        ]
        if not all("..." in labels for labels in (left, right, output)) or extra[0] != extra[1]:
            return None
        left, right, output = (
            labels.replace("...", "\x01\x02\x03\x04"[: extra[0]]) for labels in (left, right, output)
        )
    if any(len(set(labels)) != len(labels) for labels in (left, right, output)):
        return None
    batch = [label for label in left if label in right and label in output]
    summed = [label for label in left if label in right and label not in output]
    rows = [label for label in output if label not in right]
    columns = [label for label in right if label not in left]
    if not (len(summed) == len(columns) == 1 <= len(rows) <= 2) or set(output) != {*batch, *rows, *columns}:
        return None
    if set(left) != {*batch, *rows, *summed}:  # one is summed before the product
        return None
    natural = [*batch, *rows, *columns]
    second = _permuted(operands[1], right, [*batch, *summed, *columns])
    if len(rows) == 2:  # one head of keys for all heads of queries
        second = Expr("unsqueeze", (second, len(batch)))
    product = Expr("matmul", (_permuted(operands[0], left, [*batch, *rows, *summed]), second))
    return product if list(output) == natural else Expr("permute", (product, tuple(natural.index(x) for x in output)))


def _permuted(operand: Any, labels: str, order: list[str]) -> Any:
    axes = tuple(labels.index(label) for label in order)
    return operand if axes == tuple(range(len(axes))) else Expr("permute", (operand, axes))


def _softmax(c: Canonical, node: fx.Node, input: Any, dim: Any = None, dtype: Any = None, _stacklevel: Any = 3) -> Any:
    return Expr("softmax", (input,)) if _last(dim, input) and not _narrows(dtype, input) else None


def _masked_fill(c: Canonical, node: fx.Node, input: Any, mask: Any, value: Any) -> Expr | None:
    fill = c.number(value)
    return None if fill is None or not is_tensor(mask) else Expr("masked_fill", (input, mask, fill))


def _where(c: Canonical, node: fx.Node, condition: Any, input: Any = None, other: Any = None) -> Expr | None:
    if node.op == "call_method":  # x.where(condition, other)
        condition, input = input, condition
    if (fill := c.number(other)) is not None:
        return Expr("masked_fill", (input, Expr("not", (condition,)), fill))
    if (fill := c.number(input)) is not None:
        return Expr("masked_fill", (other, condition, fill))
    return None


def _cast(c: Canonical, node: fx.Node, input: Any) -> Expr | None:
    before, after = fake(input), fake(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.device != after.device:
        return None
    if before.dtype is after.dtype:
        return Expr("id", (input,))
    both = before.dtype.is_floating_point and after.dtype.is_floating_point
    return Expr("cast" if both else "convert", (input,))


def _to(c: Canonical, node: fx.Node, input: Any, *_: Any, **__: Any) -> Expr | None:
    return _cast(c, node, input)


def _identity(c: Canonical, node: fx.Node, input: Any, *_: Any, **__: Any) -> Expr | None:
    return Expr("id", (input,))


def _dropout(c: Canonical, node: fx.Node, input: Any, p: Any = 0.5, training: Any = True) -> Expr | None:
    if training is False or p == 0:
        return Expr("id", (input,))
    if training is not True:
        return None
    symbolic = isinstance(fake(p), torch.SymFloat)
    return Expr("dropout", (input, p)) if symbolic or (number(p) is not None and 0 < p < 1) else None


def _transpose(c: Canonical, node: fx.Node, input: Any, dim0: Any = 0, dim1: Any = 1) -> Expr | None:
    count = fake(input).dim()
    axes = list(range(count))
    axes[dim0 % count], axes[dim1 % count] = axes[dim1 % count], axes[dim0 % count]
    return _permute(c, node, input, *axes)


def _permute(c: Canonical, node: fx.Node, input: Any, *dims: Any) -> Expr | None:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    axes = tuple(dim % len(dims) for dim in dims)
    inner, via = _inside_copies(c, input)
    if inner.op != "repeat":
        return Expr("permute", (input, axes))
    x, count, axis = inner.args
    order = axes
    if isinstance(x, Expr):
        x, order = x.args[0], tuple(x.args[1][before] for before in axes)
    return Expr("repeat", (Expr("permute", (x, order)), count, axes.index(axis)), via)


def _inside_copies(c: Canonical, node: Any) -> tuple[Expr, tuple[fx.Node, ...]]:
    """The expression of a node under `contiguous` and the like, and the nodes between it and its arguments."""
    via: tuple[fx.Node, ...] = ()
    while isinstance(node, fx.Node):
        inner = c.of(node)
        via = (*via, node, *inner.via)
        if inner.op != "id":
            return inner, via
        node = inner.args[0]
    return OPAQUE, ()


def _repeat_interleave(
    c: Canonical, node: fx.Node, input: Any, repeats: Any, dim: Any = None, output_size: Any = None
) -> Expr | None:
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    return Expr("repeat", (input, repeats, dim % fake(input).dim()))


def _expanded(c: Canonical, node: fx.Node, expanded: Any) -> Expr | None:
    """x[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2): repeats every head n times."""
    if not isinstance(expanded, fx.Node) or name_of(expanded) not in ("expand", "expand_as"):
        return None
    source: Any = expanded.args[0]
    if not is_tensor(source) or name_of(source) not in ("unsqueeze", "getitem") or not is_tensor(source.args[0]):
        return None
    x, one, many, joined = (fake(value).shape for value in (source.args[0], source, expanded, node))
    if len(one) != len(many):
        return None
    if name_of(source) == "getitem" and not all(value in (None, Ellipsis, slice(None)) for value in source.args[1]):
        return None
    new = [axis for axis in range(len(one)) if is_same(one[axis], 1) and not is_same(many[axis], 1)]
    if len(new) != 1 or new[0] == 0 or not isinstance(count := many[new[0]], int):
        return None
    axis = new[0] - 1
    wanted = (*many[:axis], many[axis] * count, *many[axis + 2 :])
    if not same_shape(x, (*many[: axis + 1], *many[axis + 2 :])) or not same_shape(joined, wanted):
        return None
    return Expr("repeat", (source.args[0], count, axis), (expanded, source))


def _getattr(c: Canonical, node: fx.Node, input: Any, name: Any) -> Expr | None:
    if name not in ("mT", "T") or not is_tensor(input) or (name == "T" and fake(input).dim() != 2):
        return None
    return _transpose(c, node, input, -1, -2)


def _view(c: Canonical, node: fx.Node, input: Any, *_: Any, **__: Any) -> Expr | None:
    """A view that joins or splits the axes before the last two, or joins all before the last one."""
    before, after = fake(input), fake(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.dtype is not after.dtype:
        return None
    if after.dim() == 2 < before.dim() and is_same(before.shape[-1], after.shape[-1]):
        return Expr("rows", (input,))
    if min(before.dim(), after.dim()) < 3 or not same_shape(before.shape[-2:], after.shape[-2:]):
        return None
    return Expr("id", (input,)) if same_shape(before.shape, after.shape) else Expr("batch_view", (input, node))


def _is_channels(dim: Any, x: Any) -> bool:
    """Whether an axis is the second of at least three."""
    dim = _one(dim)
    return isinstance(dim, int) and fake(x).dim() > 2 and dim in (1, 1 - fake(x).dim())


def _mean(c: Canonical, node: fx.Node, input: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Any:
    if keepdim and dtype is None and _is_channels(dim, input):
        return Expr("mean_channels", (input,))
    if not _last(dim, input) or _narrows(dtype, input):
        return None
    return Expr("mean" if keepdim else "mean_flat", (input,))


def _sum(c: Canonical, node: fx.Node, input: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Any:
    if not _last(dim, input) or _narrows(dtype, input):
        return None
    return Expr("sum" if keepdim else "sum_flat", (input,))


def _var_mean(c: Canonical, node: fx.Node, input: Any, dim: Any = None, unbiased: Any = True, keepdim: Any = False,
    correction: Any = None) -> Expr | None:  # fmt: skip
    variance = _moment("var")(c, node, input, dim, unbiased, keepdim, correction)
    return Expr("var_mean", variance.args) if variance is not None and variance.op == "var" else None


def _moment(name: str) -> Callable[..., Expr | None]:
    def rule(
        c: Canonical, node: fx.Node, input: Any, dim: Any = None, unbiased: Any = True, keepdim: Any = False,
        correction: Any = None,
    ) -> Expr | None:  # fmt: skip
        correction = int(unbiased) if correction is None else correction
        channels = keepdim is True and _is_channels(dim, input)
        if isinstance(dim, bool) or not (channels or _last(dim, input)) or correction not in (0, 1):
            return None
        axis = "_channels" if channels else "" if keepdim is True else "_flat"
        return Expr(f"{name}{axis}", (input, int(correction)))

    return rule


def _normalize(
    c: Canonical, node: fx.Node, input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None
) -> Expr | None:
    """x / max(|x|, eps)."""
    fits = c.number(p) == 2 and out is None and _last(dim, input) and number(eps) is not None
    return Expr("unit", (input, eps)) if fits else None


def _length(
    c: Canonical, node: fx.Node, input: Any, p: Any = 2, dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Expr | None:
    """|x| of rows."""
    fits = (p in (None, "fro") or number(p) == 2) and _last(dim, input) and keepdim is True and dtype is None
    return Expr("length", (input,)) if fits else None


def _clamp(c: Canonical, node: fx.Node, input: Any, min: Any = None, max: Any = None) -> Expr | None:
    return Expr("clamp_min", (input, min)) if max is None and number(min) is not None else None


def _unsqueeze(c: Canonical, node: fx.Node, input: Any, dim: Any) -> Expr | None:
    inner = c.of(input)
    if inner.op in FLAT and dim in (-1, fake(node).dim() - 1):
        return Expr(inner.op.removesuffix("_flat"), inner.args, (input, *inner.via))
    return None


def _not(c: Canonical, node: fx.Node, input: Any) -> Expr | None:
    return Expr("not", (input,)) if is_tensor(input) and fake(input).dtype is torch.bool else None


def _activation(name: str) -> Callable[..., Expr | None]:
    return lambda c, node, input, inplace=False: Expr(name, (input,))


def _gelu(c: Canonical, node: fx.Node, input: Any, approximate: Any = "none") -> Expr | None:
    return Expr("gelu", (input, approximate)) if approximate in ("none", "tanh") else None


def _linear(c: Canonical, node: fx.Node, input: Any, weight: Any, bias: Any = None) -> Expr | None:
    return Expr("linear", (input, weight, bias))


def _addmm(c: Canonical, node: fx.Node, input: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Expr | None:
    return Expr("addmm", (input, a, b)) if beta == 1 and alpha == 1 else None


def _layer_norm(
    c: Canonical, node: fx.Node, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: Any = 1e-5, cudnn_enable: Any = True,
) -> Expr | None:  # fmt: skip
    fits = len(normalized_shape) == 1 and _is_positive(eps)
    return Expr("layer_norm", (input, weight, bias, eps)) if fits else None


def _rms_norm(
    c: Canonical, node: fx.Node, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Expr | None:
    eps = default_eps(fake(input).dtype) if eps is None else eps
    fits = len(normalized_shape) == 1 and _is_positive(eps)
    return Expr("rms_norm", (input, weight, eps)) if fits else None


def _is_positive(eps: Any) -> bool:
    return number(eps) is None or eps > 0.0


def _sdpa(
    c: Canonical, node: fx.Node, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: Any = False, scale: Any = None, enable_gqa: Any = False,
) -> Expr | None:  # fmt: skip
    return Expr("sdpa", (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _multi_head(c: Canonical, node: fx.Node, **given: Any) -> Expr | None:
    signature = inspect.signature(F.multi_head_attention_forward)
    call = signature.bind(**given)
    call.apply_defaults()
    return Expr("mha", tuple(call.arguments[name] for name in signature.parameters))


def _cross_entropy(
    c: Canonical, node: fx.Node, input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: Any = -100, reduce: Any = None, reduction: Any = "mean", label_smoothing: Any = 0.0,
) -> Expr | None:  # fmt: skip
    if size_average is not None or reduce is not None:
        return None
    return Expr("cross_entropy", (input, target, weight, ignore_index, reduction, label_smoothing))


def _cat(c: Canonical, node: fx.Node, tensors: Any, dim: Any = 0) -> Expr | None:
    if len(tensors) != 2:
        return None
    if _last(dim, node):
        return Expr("cat_last", tuple(tensors))
    whole = _both_halves(c, tensors) if dim in (-2, fake(node).dim() - 2) else None
    if whole is None:
        return None
    complex_, via = _inside_copies(c, whole[0])
    return Expr("real_columns", complex_.args, (*whole[1], *via)) if complex_.op == "as_real" else None


def _both_halves(c: Canonical, tensors: Any) -> tuple[Any, tuple[fx.Node, ...]] | None:
    """x and the nodes above it, where the tensors are the first and the second half of its columns."""
    first, second = (c.of(tensor) for tensor in tensors)
    if first.op != "half" or second.op != "half" or first.args != (second.args[0], 0) or second.args[1] != 1:
        return None
    return first.args[0], (*tensors, *first.via, *second.via)


JOINED = {"stack_last": "pairs", "as_real": "real_pairs", "real_columns": "real_halves"}
"""The operation whose last two axes are flattened, and the result."""


def _flatten(c: Canonical, node: fx.Node, input: Any, *_: Any, **__: Any) -> Expr | None:
    """Pairs (even, odd) of columns next to each other, or a view of the leading axes."""
    pairs = c.of(input)
    if pairs.op in JOINED and same_shape(fake(node).shape[:-1], fake(input).shape[:-2]):
        return Expr(JOINED[pairs.op], pairs.args, (input, *pairs.via))
    return _expanded(c, node, input) or _view(c, node, input)


def _as_complex(c: Canonical, node: fx.Node, input: Any) -> Expr | None:
    copies: tuple[fx.Node, ...] = ()
    while (copied := c.of(input)).op == "id":
        copies, input = (*copies, input), copied.args[0]
    pairs = _unbind(c, node, input, -1)
    if pairs is not None:
        return Expr("as_complex", pairs.args, (*copies, *pairs.via))
    halves = _both_halves(c, copied.args) if copied.op == "stack_last" else None
    return None if halves is None else Expr("as_complex_halves", halves[:1], (*copies, input, *halves[1]))


def _stack(c: Canonical, node: fx.Node, tensors: Any, dim: Any = 0) -> Expr | None:
    return Expr("stack_last", tuple(tensors)) if len(tensors) == 2 and _last(dim, node) else None


def _unbind(c: Canonical, node: fx.Node, input: Any, dim: Any = 0) -> Expr | None:
    """The even and the odd columns of x.reshape(..., -1, 2), or the halves of x.reshape(..., 2, -1)."""
    if not isinstance(input, fx.Node) or name_of(input) not in ("view", "reshape", "unflatten"):
        return None
    x, split = input.args[0], fake(input)
    axis = dim % split.dim() - split.dim()
    if not is_tensor(x) or axis < -2 or split.shape[axis] != 2 or fake(x).dim() != split.dim() - 1:
        return None
    name = "alternates" if axis == -1 else "halves"
    return Expr(name, (x,), (input,)) if same_shape(fake(x).shape[:-1], split.shape[:-2]) else None


def _getitem(c: Canonical, node: fx.Node, input: Any, index: Any) -> Expr | None:
    """Halves, interleaved columns and the first columns of the last axis."""
    inner = c.of(input)
    if inner.op == "alternates" and index in (0, 1):
        return Expr("alternate", (inner.args[0], index), (input, *inner.via))
    if inner.op == "var_mean":
        return Expr("var", inner.args, (input,)) if index == 0 else Expr("mean", inner.args[:1], (input,))
    if inner.op in FLAT and index in ((Ellipsis, None), (*(slice(None),) * fake(input).dim(), None)):
        return Expr(inner.op.removesuffix("_flat"), inner.args, (input, *inner.via))
    if inner.op == "halves" and index in (0, 1):
        return Expr("half", (inner.args[0], index), (input, *inner.via))
    if not is_tensor(input) or not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return None
    width, columns = fake(input).shape[-1], index[-1]
    if index[:-1] not in ((Ellipsis,), (slice(None),) * (fake(input).dim() - 1)) or not isinstance(width, int):
        return None
    if any(isinstance(value, fx.Node) for value in (columns.start, columns.stop, columns.step)):
        return None
    start, stop, step = columns.indices(width)
    if step == 2 and start in (0, 1) and stop == width:
        return Expr("alternate", (input, start))
    if step == 1 and (start, stop) == (0, width):
        return Expr("id", (input,))
    if step == 1 and (start, stop) in ((0, width // 2), (width // 2, width)) and width % 2 == 0:
        return Expr("half", (input, int(start > 0)))
    return Expr("first_columns", (input, stop)) if step == 1 and start == 0 else None


def _chunk(c: Canonical, node: fx.Node, input: Any, chunks: Any, dim: Any = 0) -> Expr | None:
    return Expr("halves", (input,)) if chunks == 2 and _last(dim, input) and fake(input).shape[-1] % 2 == 0 else None


def _split(c: Canonical, node: fx.Node, input: Any, size: Any, dim: Any = 0) -> Expr | None:
    width = fake(input).shape[-1]
    sizes = [size, size] if isinstance(size, int) else size
    even = isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] * 2 == width
    return Expr("halves", (input,)) if even and _last(dim, input) else None


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}

    def rule(names: str, parameters: str, function: Callable[..., Expr | None]) -> None:
        for name in names.split():
            rules[name] = (tuple(parameters.split()), function)

    rule("mul", "a b", _mul)
    rule("div", "a b", _div)
    rule("add", "a b", _add)
    rule("sub", "a b", _sub)
    rule("addcmul", "input a b", _addcmul)
    rule("rsub", "b a", _sub)
    rule("pow", "a b", _pow)
    rule("reciprocal", "a", _reciprocal)
    rule("neg", "a", lambda c, node, a: _times(c, node, a, -1.0))
    rule("matmul", "a b", _matmul)
    rule("baddbmm", "input a b", _baddbmm)
    rule("einsum", "equation operand_0 operand_1", lambda c, node, equation, operand_0, operand_1=None: _einsum(
        c, node, equation, *([operand_0] if operand_1 is None else [operand_0, operand_1])))  # fmt: skip
    rule("softmax", "input dim dtype", _softmax)
    rule("masked_fill", "input mask value", _masked_fill)
    rule("where", "condition input other", _where)
    for name in ("float", "half", "bfloat16", "double", "bool", "int", "long"):
        rule(name, "input", _cast)
    for name in ("to", "type_as", "type"):
        rules[name] = (("input", "first", "second", "third", "fourth"), _to)
    rule("contiguous clone", "input", _identity)
    for name in ("view", "reshape", "flatten", "unflatten"):
        rules[name] = (("input", *(f"size_{index}" for index in range(8))), _flatten)
    rule("dropout", "input p training", _dropout)
    rule("transpose", "input dim0 dim1", _transpose)
    rules["permute"] = (tuple(f"d{i}" for i in range(8)), lambda c, node, d0, **k: _permute(c, node, d0, *k.values()))
    rule("repeat_interleave", "input repeats dim", _repeat_interleave)
    rule("getattr", "input name", _getattr)
    rule("mean", "input dim keepdim", _mean)
    rule("sum", "input dim keepdim", _sum)
    rule("var_mean", "input dim unbiased keepdim", _var_mean)
    rule("var", "input dim unbiased keepdim", _moment("var"))
    rule("std", "input dim unbiased keepdim", _moment("std"))
    rule("unsqueeze", "input dim", _unsqueeze)
    rule("not", "input", _not)
    for name in ("sqrt", "rsqrt", "square", "tanh", "erf", "sigmoid", "exp", "relu", "silu"):
        rule(name, "input inplace", _activation(name))
    rule("gelu", "input", _gelu)
    rule("linear", "input weight bias", _linear)
    rule("addmm", "input a b", _addmm)
    rule("layer_norm", "input normalized_shape weight bias eps cudnn_enable", _layer_norm)
    rule("rms_norm", "input normalized_shape weight eps", _rms_norm)
    rule("normalize", "input p dim eps out", _normalize)
    rule("norm linalg_norm linalg_vector_norm", "input p dim keepdim", _length)
    rule("clamp clamp_min", "input min max", _clamp)
    rule("scaled_dot_product_attention", "query key value attn_mask dropout_p is_causal", _sdpa)
    rules["multi_head_attention_forward"] = (
        tuple(inspect.signature(F.multi_head_attention_forward).parameters),
        _multi_head,
    )
    rule("_transformer_encoder_layer_fwd", " ".join(ENCODER_LAYER), lambda c, node, mask=None, kind=None, **given: Expr(
        "encoder_layer", (*(given[name] for name in ENCODER_LAYER[:-2]), mask, kind)))  # fmt: skip
    rule("cross_entropy", "input target weight size_average ignore_index reduce reduction label_smoothing",
         _cross_entropy)  # fmt: skip
    rule("cat concat", "tensors dim", _cat)
    rule("getitem", "input index", _getitem)
    rule("view_as_complex", "input", _as_complex)
    rule("view_as_real", "input", lambda c, node, input: Expr("as_real", (input,)))
    rule("stack", "tensors dim", _stack)
    rule("unbind", "input dim", _unbind)
    rule("chunk", "input chunks dim", _chunk)
    rule("split", "input size dim", _split)
    return rules


RULES = _rules()
"""Names of the parameters, and the function that makes the expression, by canonical name."""

OVERRIDES: dict[Any, tuple[str, ...]] = {
    F.softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.dropout: ("input", "p", "training", "inplace"),
}
"""Functions whose parameters differ from the method's."""
