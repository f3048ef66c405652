"""Evaluates the functions of FlexAttention (mask_mod, score_mod) by calling them once.

A mask_mod, and the terms and factors of a score_mod, are evaluated for all positions together under vmap, which gives
stride 0 in axes that a result does not depend on. The score is a symbol that records the operations applied to it.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from transformer_kernels.ops._checks import PLAIN
from transformer_kernels.ops._derivatives import is_transformed
from transformer_kernels.ops._plan import dispatch_modes, functorch_is_active, is_jit_tracing

MAX_BYTES = 1 << 29
"""Maximum size of cached masks and biases; above it all are dropped, and a larger one is not cached."""

AXES = 4
"""Batch, head, query and key."""


class Unknown(Exception):
    """No kernel supports the operations of a score_mod, or a function reads an object with unknown state."""


class _Indexing(TorchFunctionMode):
    """`table[index]` with scalar tensors is an operator, which vmap has; torch would read the index as a number.

    Where every index is a position, which runs from 0, it is a view: neither a copy nor a scatter in backward.
    """

    positions: tuple[Tensor, ...] = ()
    sizes: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Tensor) for x in index) and all(isinstance(x, (Tensor, int)) for x in index):
                axes = [next((axis for axis, at in enumerate(self.positions) if x is at), AXES) for x in index]
                if max(axes) < AXES and len(set(axes)) == len(axes) and not functorch.is_batchedtensor(args[0]):
                    return self._view(args[0], axes)
                found = [x if isinstance(x, Tensor) else torch.tensor(x, device=args[0].device) for x in index]
                return torch.ops.aten.index(args[0], found)
        return func(*args, **(kwargs or {}))

    def _view(self, table: Tensor, axes: list[int]) -> Tensor:
        wanted = [self.sizes[axis] for axis in axes]
        if len(wanted) > table.dim() or any(size < end for size, end in zip(table.shape, wanted, strict=False)):
            raise IndexError(f"a tensor of shape {tuple(table.shape)} is indexed by {wanted} positions")
        left = list(axes)
        for axis in sorted(axes):  # from the outermost vmap to the innermost
            at = left.index(axis)
            del left[at]
            table = table if table.shape[at] == self.sizes[axis] else table.narrow(at, 0, self.sizes[axis])
            table = functorch._add_batch_dim(table, at, functorch.maybe_get_level(self.positions[axis]))
        return table


def at_positions(function: Callable[..., Any], positions: tuple[Tensor, ...], *first: Tensor) -> Any:
    """`function(*first, b, h, q, k)` at all positions; `first` and the results have the shape (B, H, Lq, Lk).

    Without `first` the positions run from 0.
    """
    indexing = _Indexing()

    def at(*arguments: Tensor) -> Any:
        if not first:
            indexing.positions, indexing.sizes = arguments, tuple(map(len, positions))
        return function(*arguments)

    for axis in reversed(range(AXES)):
        places = (0 if i == axis else None for i in range(AXES))
        at = torch.vmap(at, in_dims=(*[0] * len(first), *places))
    with indexing:
        return at(*first, *positions)


def narrowed(x: Tensor) -> Tensor:
    """x with one entry in the axes in which it repeats, and its last axis contiguous."""
    for axis, stride in enumerate(x.stride()):
        x = x.narrow(axis, 0, 1) if stride == 0 and x.shape[axis] > 1 else x
    return x.contiguous()


def reads_values() -> bool:
    """Whether values may select the computation: not in a call that is recorded and replayed, or batched by vmap."""
    return not (dispatch_modes() or is_jit_tracing() or functorch_is_active())


# Cached results of functions

References = dict[int, StorageWeakRef]

_remembered: dict[Any, tuple[References, Any]] = {}


def remembered(given: Any, compute: Callable[[], Any]) -> Any:
    """compute(), or its value for the same functions, numbers and tensors; `given` is a tuple of these.

    A function is the same if its code is, and all that it captures or finds under a global name; a tensor if its
    memory, layout and version are. Nothing is kept where one of them has a gradient or memory shared with numpy or with
    the value, or is an object with unknown state.
    """
    references: References = {}
    try:
        key = _key(given, references, [])
    except Unknown:
        return compute()
    if (found := _remembered.get(key)) is not None:
        return found[1]
    with torch.inference_mode(False), torch.no_grad():
        value = compute()
    for other, (storages, _) in list(_remembered.items()):
        if any(storage.expired() for storage in storages.values()):
            _remembered.pop(other, None)
    size = _bytes(value)
    if size + sum(_bytes(kept) for _, kept in list(_remembered.values())) > MAX_BYTES:
        _remembered.clear()
    if size <= MAX_BYTES and all(x.untyped_storage()._cdata not in references for x in _tensors(value)):
        _remembered[key] = references, value
    return value


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in _tensors(value))


VALUES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type)
FREE = (type(None), types.ModuleType, type)
FIXED = ("torch", "math", "operator", "builtins", "functools", "_operator")
"""Modules whose functions and attributes do not change."""


def _key(value: Any, references: References, callers: list[Any]) -> Any:
    """Equal for equal values; the storages of its tensors are added to `references`, which keep their addresses."""
    kind = type(value)
    if kind in VALUES:
        return kind, value
    if kind in PLAIN:
        if is_transformed((value,)):
            raise Unknown
        storage = value.untyped_storage()
        shared = not storage.resizable() or storage.is_shared()
        if shared or value.requires_grad or value.is_inference() or not reads_values():
            raise Unknown
        references[storage._cdata] = StorageWeakRef(storage)
        layout = value.data_ptr(), value.shape, value.stride(), value.dtype, value._version
        return storage._cdata, *layout
    if kind in (tuple, list, torch.Size):
        return kind, *(_key(x, references, callers) for x in value)
    if kind is dict:
        return kind, *((name, _key(x, references, callers)) for name, x in value.items())
    if kind is functools.partial:
        return kind, _key((value.func, value.args, value.keywords), references, callers)
    if kind is types.FunctionType:
        if value in callers:
            return callers.index(value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        names = sorted(_names(value.__code__) & value.__globals__.keys())
        read = [value.__globals__[name] for name in names] if not (value.__module__ or "").startswith("torch.") else []
        parts = value.__defaults__, value.__kwdefaults__, cells, names, read
        return value.__code__, _key(parts, references, [*callers, value])
    name = value.__name__ if kind is types.ModuleType else getattr(value, "__module__", None) or "builtins"
    of = getattr(value, "__self__", None)  # of a method: an object with unknown state
    if kind in BUILTINS and isinstance(of, FREE) and name.partition(".")[0] in FIXED:
        return value
    raise Unknown


def _names(code: types.CodeType) -> set[str]:
    """The names that a function may look up in its module."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


# The form of a score_mod


class Form(NamedTuple):
    """factor * score + bias, or factor * tanh(inside * score) + bias, where the mask shows it.

    Numbers, or tensors at one position while the function is traced and (B, H, Lq, Lk), narrowed, after that.
    """

    factor: Any = 1.0
    bias: Any = 0.0
    mask: Any = None  # bool, True = visible; None: all
    inside: Any = None  # None: no tanh


class _Score(Tensor):
    """The symbol that a score_mod is given as its score. It has no values, so nothing can read them."""

    form: Form
    like: Tensor

    @staticmethod
    def of(form: Form, like: Tensor) -> _Score:
        score = like.to("meta").as_subclass(_Score)
        score.form, score.like = form, like
        return score

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        score = next(x for x in args if isinstance(x, _Score))
        if (func in METADATA or name in MAKES) and score is args[0]:
            return func(score.like, *args[1:], **(kwargs or {}))
        in_place = name.endswith("_") and not name.endswith("__")
        rule = RULES.get(name.strip("_"))
        if rule is None or kwargs or (in_place and score is not args[0]):
            raise Unknown(f"it calls {name} on the score")
        form = rule(score.like.dtype, *(x.form if isinstance(x, _Score) else x for x in args))
        if in_place:
            score.form = form
            return score
        return cls.of(form, score.like)


METADATA = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "is_cpu", "is_cuda")}
METADATA |= {Tensor.size, Tensor.dim, Tensor.is_floating_point}
MAKES = ("new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like")


def _split(dtype: torch.dtype, a: Any, b: Any) -> tuple[Form, Any]:
    """The form among two operands, and the other one; a tensor of it in the dtype of the score."""
    form, other = (a, b) if isinstance(a, Form) else (b, a)
    return form, other.to(dtype) if isinstance(other, Tensor) else other


def _add(dtype: Any, a: Any, b: Any) -> Form:
    form, other = _split(dtype, a, b)
    if not isinstance(other, Form):
        return form._replace(bias=other if _is_zero(form.bias) else form.bias + other)
    if form.inside is not other.inside or not form.mask is other.mask is None:
        raise Unknown("it adds two functions of the score")
    return form._replace(factor=form.factor + other.factor, bias=form.bias + other.bias)


def _multiply(dtype: Any, a: Any, b: Any, by: Any = operator.mul) -> Form:
    form, other = _split(dtype, a, b)
    if isinstance(other, Form) or (form.mask is not None and not (isinstance(other, (int, float)) and other > 0)):
        raise Unknown("it multiplies the score by itself, or a masked score by what may be negative")
    return form._replace(factor=by(form.factor, other), bias=form.bias if _is_zero(form.bias) else by(form.bias, other))


def _divide(dtype: Any, a: Any, b: Any) -> Form:
    if isinstance(b, Form):
        raise Unknown("it divides by the score")
    return _multiply(dtype, a, b, operator.truediv)


def _tanh(dtype: Any, a: Form) -> Form:
    if a.inside is not None or a.mask is not None or not _is_zero(a.bias):
        raise Unknown("it takes tanh of more than a multiple of the score")
    return Form(inside=a.factor)


def _where(dtype: Any, shown: Any, a: Any, b: Any) -> Form:
    if _is_hidden(a):
        shown, a, b = ~shown, b, a
    if isinstance(a, Form) and _is_hidden(b):
        return a._replace(mask=shown if a.mask is None else a.mask & shown)
    if not (isinstance(a, Form) and isinstance(b, Form)) or a.inside is not b.inside or a.mask is not b.mask:
        raise Unknown("it replaces the score by another value than -inf")

    def either(x: Any, y: Any) -> Any:
        if x is y or (isinstance(x, float) and isinstance(y, float) and x == y):
            return x
        first, second = (z if isinstance(z, Tensor) else torch.tensor(z, dtype=dtype, device="cpu") for z in (x, y))
        return torch.where(shown, first, second)

    return a._replace(factor=either(a.factor, b.factor), bias=either(a.bias, b.bias))


def _is_hidden(x: Any) -> bool:
    if isinstance(x, Tensor) and not functorch.is_batchedtensor(x) and x.numel() == 1:
        x = x.item()
    return isinstance(x, float) and x == -math.inf


def _is_zero(x: Any) -> bool:
    return isinstance(x, float) and x == 0.0


def _negative(x: Any) -> Any:
    return x._replace(factor=-x.factor, bias=x.bias if _is_zero(x.bias) else -x.bias) if isinstance(x, Form) else -x


def _converted(dtype: Any, a: Form, to: Any = torch.float32) -> Form:
    if not isinstance(to, torch.dtype) or not to.is_floating_point or to.itemsize < dtype.itemsize:
        raise Unknown("it rounds the score")
    return a


RULES: dict[str, Callable[..., Form]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), lambda dtype, a, b: _add(dtype, a, _negative(b))),
    "rsub": lambda dtype, a, b: _add(dtype, b, _negative(a)),
    **dict.fromkeys(("mul", "multiply", "rmul"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _divide),
    **dict.fromkeys(("neg", "negative"), lambda dtype, a: _negative(a)),
    "tanh": _tanh,
    "where": _where,
    "masked_fill": lambda dtype, a, hidden, value: _where(dtype, hidden, value, a),
    "clone": lambda dtype, a: a,
    **dict.fromkeys(("to", "float", "double"), _converted),
}


def form_of(score_mod: Callable[..., Any], positions: tuple[Tensor, ...], dtype: torch.dtype) -> Form:
    """The form of a score_mod for scores of `dtype`; raises Unknown for any other form."""
    found = Form()

    def traced(*indices: Tensor) -> tuple[Tensor, ...]:
        nonlocal found
        score = score_mod(_Score.of(Form(), positions[0].new_zeros((), dtype=dtype)), *indices)
        if not isinstance(score, _Score):
            raise Unknown("it does not return a function of the score")
        found = score.form
        return indices[0], *(x for x in found if isinstance(x, Tensor))

    try:
        _, *tensors = at_positions(traced, positions)
    except Unknown:
        raise
    except Exception as error:  # the function's own errors are raised where it is given scores with values
        raise Unknown(f"it raises {type(error).__name__} for a score without values") from error
    values = iter(tensors)
    return Form(*(narrowed(next(values)) if isinstance(x, Tensor) else x for x in found))
