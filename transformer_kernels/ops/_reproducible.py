"""Reproducible mode: the same bits on every CPU, at every instruction set and number of threads.

The operations of this package have one order of additions (csrc/cpu). In this mode their products are their own
too, and what PyTorch computes beside them is replaced, or named: an operator whose bits may differ warns once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_kernels.backends import cpu
from transformer_kernels.ops import _exact
from transformer_kernels.ops.linear import linear

EXACT = frozenset(
    """
    _foreach_abs _foreach_add _foreach_copy _foreach_div _foreach_mul _foreach_neg _foreach_sub
    _local_scalar_dense _segment_reduce_backward _to_copy _unsafe_view abs add alias all amax amin any arange argmax
    argmin as_strided cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy cumsum detach diagonal div embedding
    embedding_dense_backward empty empty_like empty_strided eq equal expand fill flip floor frexp full full_like
    gather ge gt hardtanh index index_add index_copy index_put index_select isfinite isinf isnan le lift_fresh lt
    masked_fill masked_select max maximum min minimum mul ne neg new_empty new_empty_strided new_full new_ones
    new_zeros ones ones_like permute reciprocal relu repeat roll round rsub scalar_tensor scatter segment_reduce
    select select_backward set sign slice slice_backward sort split split_with_sizes squeeze stack sub t threshold
    threshold_backward transpose tril triu trunc unbind unfold unsqueeze view where zero zeros zeros_like
    """.split()  # noqa: SIM905
)
"""Operators that move numbers, round each result once, or add one number after the other: every processor computes the
same. Each includes its in-place variants."""

INTEGERS_DRAWN = ("randint", "randint_like", "random", "randperm")

SCALED = frozenset(("add", "sub", "rsub", "index_add", "_foreach_add", "_foreach_sub"))
"""Operators whose factor `alpha` may be fused with the sum."""


class Reproducible(TorchDispatchMode):
    """Within this mode results have the same bits on every CPU, or what may differ is named.

    Attributes:
        uncovered: how often each operator of PyTorch was called whose bits may differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uncovered: Counter[str] = Counter()
        self._before: list[Any] = []

    def __enter__(self) -> Reproducible:
        self._before.append(cpu.set_mode(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        cpu.set_mode(self._before.pop())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace in ("transformer_kernels", "profiler", "prim"):
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        base = name.removesuffix("_") if not name.startswith("__") else name
        if function.namespace == "aten" and (replacement := REPLACED.get(name) or REPLACED.get(base)) is not None:
            found = self._replaced(replacement, base != name, args, kwargs)
            if found is not NotImplemented:
                return found
        if self._is_exact(function, base, args, kwargs):
            return function(*args, **kwargs)
        with self:  # below autograd, composed operators come as they are
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        result = function(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in function.tags or base not in INTEGERS_DRAWN:
            numbers = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            if any(x.is_floating_point() or x.is_complex() for x in numbers):
                self._note(str(function._schema.name))
        return result

    def _replaced(self, replacement: Callable[..., Any], in_place: bool, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(not x.is_cpu or x.is_complex() or x.layout is not torch.strided for x in tensors):
            return NotImplemented
        out = kwargs.pop("out", None)
        inner = torch._C._len_torch_dispatch_stack() > 0  # a recording records the operators that replace this one
        with nullcontext() if inner else cpu.unrecorded():
            result = replacement(*args, **kwargs)
        if result is NotImplemented:
            if out is not None:
                kwargs["out"] = out
            return result
        if out is None and not (in_place and result is not None):
            return result
        written = args[0] if out is None else out
        if isinstance(written, Tensor):
            return written.copy_(result)
        torch._foreach_copy_(written, result)
        return None

    def _is_exact(self, function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if function.namespace != "aten":
            return False
        if name in SCALED:
            alpha = args[2] if name == "rsub" and len(args) > 2 else kwargs.get("alpha", 1)
            return alpha in (1, -1)
        if name == "index_put" and (args[3] if len(args) > 3 else kwargs.get("accumulate")):
            return False  # by atomic additions of several threads
        if name == "arange":
            return all(float(x).is_integer() for x in args if isinstance(x, int | float))
        return name in EXACT or function.is_view

    def _note(self, name: str) -> None:
        self.uncovered[name] += 1
        if self.uncovered[name] == 1:
            warnings.warn(
                f"reproducible: {name} is computed by PyTorch; its bits may differ between processors", stacklevel=2
            )


# Replacements: functions of an operator's arguments. They return NotImplemented for others. What an operator writes to
# its first argument they return.


def _rounded(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def replacement(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return function(x.double()).float()
        return _exact.rounded(function, x)

    return replacement


def _root(x: Tensor) -> Tensor:
    """In float64, whose last unit does not change the nearest number of fewer bits."""
    return _exact.sqrt(x) if x.dtype is torch.float64 else _rounded(Tensor.sqrt)(x)


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, Tensor):
        simple: dict[Any, Callable[[Any], Any]] = {0.5: _root, 1: Tensor.clone, -1: Tensor.reciprocal}
        simple |= {2: lambda x: x * x, 3: lambda x: x * x * x}
        if exponent in simple:
            return simple[exponent](base)
        return _exact.rounded(lambda x: _exact.power(x, torch.full_like(x, exponent)), base)
    if not isinstance(base, Tensor):
        if base <= 0:
            return NotImplemented
        return _exact.rounded(lambda x: _exact.power(torch.full_like(x, base), x), exponent)
    return _exact.rounded(_exact.power, base, exponent)


def _inverse_root(x: Tensor) -> Tensor:
    return _root(x).reciprocal()


def _sum(x: Tensor, dim: Any = (), keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    if not x.is_floating_point():
        return NotImplemented
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return _exact.total(wide, dims, keepdim).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Any = (), keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    summed = _sum(x, dim, keepdim, torch.float64 if x.dtype is torch.float64 else torch.float32)
    count = x.numel() / max(1, summed.numel())
    return (summed / count).to(dtype or x.dtype)


def _norm(x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if order != 2 or not x.is_floating_point():
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    return _root(_sum(x * x, dim, keepdim))


def _norms(tensors: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> Any:
    norms = [_norm(x, order, dtype=dtype) for x in tensors]
    return NotImplemented if any(norm is NotImplemented for norm in norms) else norms


def _draw_normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    return (_exact.normal(x.shape, generator) * std + mean).to(x.dtype)


def _draw_uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    return (_exact.uniform(x.shape, 24, generator) * (high - low) + low).to(x.dtype)


def _draw_bernoulli(x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return (_exact.uniform(x.shape, 24, generator) < p).to(x.dtype)


def _new(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement for an operator that makes a tensor: of the shape in its first argument, or shaped like it."""

    def replacement(size: Any, *, generator: Any = None, memory_format: Any = None, **options: Any) -> Any:
        if isinstance(size, Tensor):
            return draw(torch.empty_like(size, **options), generator=generator)
        options.pop("names", None)
        return draw(torch.empty(size, **options), generator=generator)

    return replacement


def _is_product(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.bfloat16) and all(x.dtype is dtype and x.numel() for x in tensors)


@torch.no_grad()
def _matrix_product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return linear(a.contiguous(), b.t().contiguous(), backend="cpu")


def _product(a: Tensor, b: Tensor) -> Any:
    return _matrix_product(a, b) if _is_product(a, b) else NotImplemented


def _batched_product(a: Tensor, b: Tensor) -> Any:
    if not _is_product(a, b):
        return NotImplemented
    return torch.stack([_matrix_product(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True)])


def _vector_product(a: Tensor, b: Tensor) -> Any:
    return _matrix_product(a, b.unsqueeze(-1)).squeeze(-1) if _is_product(a, b) else NotImplemented


def _added(product: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """beta * x + alpha * a b."""

    def replacement(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        y = product(a, b)
        if y is NotImplemented:
            return y
        y = y if alpha == 1 else y * alpha
        return y if beta == 0 else (x if beta == 1 else x * beta) + y

    return replacement


def _scaled(x: Tensor, other: Any, *, alpha: float = 1) -> Any:
    """x + alpha * other, which is added as it is where alpha is 1."""
    return NotImplemented if alpha in (1, -1) or not isinstance(other, Tensor) else x + other * alpha


def _less(x: Tensor, other: Any, *, alpha: float = 1) -> Any:
    return NotImplemented if alpha in (1, -1) or not isinstance(other, Tensor) else x - other * alpha


def _interpolated(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x + (end - x) * weight


def _with_product(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + a * b * value


def _with_quotient(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + a * value / b


def _of_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for an operator on lists of tensors, from that for one of each."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        count = len(args[0])
        columns = [arg if isinstance(arg, list | tuple) else [arg] * count for arg in args]
        named = {"alpha": kwargs["alpha"]} if "alpha" in kwargs else {}
        if len(columns) == 4:  # a scalar for each of _foreach_addcmul
            *columns, values = columns
            return [function(*row, value=v) for row, v in zip(zip(*columns, strict=True), values, strict=True)]
        found = [function(*row, **named) for row in zip(*columns, strict=True)]
        return NotImplemented if any(x is NotImplemented for x in found) else found

    return replacement


def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Any:
    """The fused AdamW (Loshchilov and Hutter 2019), one rounding after the other."""
    if amsgrad or maximize or found_inf is not None or any(x.dtype is not torch.float32 for x in (*params, *grads)):
        return NotImplemented
    if not params:
        return None
    if grad_scale is not None:
        torch._foreach_div_(grads, grad_scale)
    rate = torch.as_tensor(lr, dtype=torch.float64) if not isinstance(lr, Tensor) else lr.double()
    step = torch.stack([x.reshape(()) for x in steps]).double()
    first, second = (1.0 - _exact.power(torch.full_like(step, beta), step) for beta in (beta1, beta2))
    torch._foreach_mul_(params, (1.0 - rate * weight_decay).float())
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, 1.0 - beta1))
    squares = torch._foreach_mul(grads, grads)
    torch._foreach_mul_(squares, 1.0 - beta2)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_add_(exp_avg_sqs, squares)
    size = [_root(x) for x in exp_avg_sqs]
    torch._foreach_div_(size, list(_exact.sqrt(second).float().unbind()))
    torch._foreach_add_(size, eps)
    update = torch._foreach_div(exp_avgs, size)
    torch._foreach_mul_(update, list((rate / first).float().unbind()))
    torch._foreach_sub_(params, update)
    return None


REPLACED: dict[str, Callable[..., Any]] = {
    **{name: _rounded(getattr(_exact, name)) for name in ("exp", "log", "sin", "cos")},
    "pow": _power,
    "sqrt": _root,
    "rsqrt": _inverse_root,
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "normal_": _draw_normal,
    "uniform_": _draw_uniform,
    "bernoulli_": _draw_bernoulli,
    "bernoulli": lambda x, p=None, *, generator=None: _draw_bernoulli(x, x if p is None else p, generator=generator),
    **{name: _new(_draw_normal) for name in ("randn", "randn_like")},
    **{name: _new(_draw_uniform) for name in ("rand", "rand_like")},
    "mm": _product,
    "bmm": _batched_product,
    "mv": _vector_product,
    "addmm": _added(_product),
    "baddbmm": _added(_batched_product),
    "add": _scaled,
    "sub": _less,
    "lerp": _interpolated,
    "addcmul": _with_product,
    "addcdiv": _with_quotient,
    "_foreach_add": _of_lists(_scaled),
    "_foreach_sub": _of_lists(_less),
    "_foreach_sqrt": _of_lists(_root),
    "_foreach_lerp": _of_lists(_interpolated),
    "_foreach_addcmul": _of_lists(_with_product),
    "_foreach_addcdiv": _of_lists(_with_quotient),
    "_fused_adamw": _adamw,
}


class Block(ContextDecorator):
    """The context manager that `reproducible` returns."""

    def __init__(self) -> None:
        self._mode = Reproducible()

    def __enter__(self) -> Reproducible:
        self._before = cpu.reproduce(True)
        return self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        cpu.reproduce(self._before)


def reproducible() -> Block:
    """Within this context, results have the same bits on every CPU: `with tk.reproducible(): train()`.

    This package's operations on CPU tensors have one order of additions at every instruction set and number of threads,
    and a row has the bits that it has in any batch. PyTorch's matrix products, sums, random numbers, AdamW and more are
    replaced; another of its operators whose bits may differ is computed by it, and named in a warning at its first
    call. bfloat16 is multiplied in float32. See docs/numbers.md for what is covered.

    Operations of all threads compute so meanwhile; PyTorch's operators are replaced in this thread.

    Returns:
        a context (or a decorator), which gives the mode; its `uncovered` counts the calls that were named.

    Raises:
        BackendUnavailable: the CPU kernels cannot be loaded, or this processor has no fused multiply-add.

    Examples:
        >>> with reproducible() as mode:
        ...     y = torch.randn(4, 64) @ torch.randn(64, 3)
        >>> dict(mode.uncovered)
        {}
    """
    return Block()
