"""Argument validation, shared so that every backend raises the same exception with the same text.

Each helper returns None or raises; a message names the operation, the argument, the expected and the actual value.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transformer_kernels.backends import cpu

PLAIN = (Tensor, torch.nn.Parameter)
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
APPROXIMATIONS = ("none", "tanh")
P = ParamSpec("P")
R = TypeVar("R")


def spelled_unlike_torch(torchs: str, ours: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: arguments that the function does not have raise a TypeError that shows PyTorch's call and ours."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # from within the function
                name = function.__name__
                reason = str(error).removeprefix(f"{name}() ")
                raise TypeError(f"{name}: {reason}; write torch's {torchs} as {ours}") from None

        return call

    return decorate


def _check_strided(op: str, name: str, value: Tensor) -> None:
    """Reject tensors without an address and strides for a kernel: sparse, nested, subclasses such as DTensor."""
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise TypeError(f"{op}: {name} must be a dense strided tensor; got layout {layout}")
    if type(value) not in PLAIN and is_traceable_wrapper_subclass(value):
        kind = type(value).__name__
        raise TypeError(f"{op}: {name} must be a plain tensor; got {kind}: give the tensors that it is made of")


def tensor(op: str, name: str, value: Any) -> None:
    """A strided floating tensor."""
    if type(value) in PLAIN and value.dtype in FLOATING and value.layout is torch.strided and not value.is_nested:
        if not is_compiling() and value.is_neg():  # the sign is not in memory
            raise TypeError(f"{op}: {name} must not be a negated view; pass {name}.resolve_neg()")
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor; got {type(value).__name__}")
    _check_strided(op, name, value)
    if value.dtype not in FLOATING:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{op}: {name} must have one of the dtypes {supported}; got {value.dtype}")


def boolean_mask(op: str, name: str, value: Any) -> None:
    """A strided bool tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a bool tensor; got {type(value).__name__}")
    _check_strided(op, name, value)
    if value.dtype is not torch.bool:
        raise TypeError(f"{op}: {name} must be bool, True = keep; got {value.dtype}: use {name}.bool()")


def class_indices(op: str, name: str, value: Any, shape: torch.Size) -> None:
    """An integer tensor with one class for each row of the logits."""
    row_ids(op, name, value, ", one class for each row")
    if value.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, one for each row; got {tuple(value.shape)}")


def classes_in_range(op: str, name: str, value: Tensor, classes: int, ignored: int) -> None:
    """Every class is below `classes` or ignored; checked on the CPU only: on a GPU it would synchronise."""
    if not value.is_cpu or not value.numel():
        return
    if cpu.within(value, classes, ignored):
        return
    outside = value[(value != ignored) & ((value < 0) | (value >= classes))]
    if outside.numel():
        raise IndexError(
            f"{op}: {name} must be in [0, {classes}) or equal to ignore_index ({ignored}); got {int(outside[0])}"
        )


def row_ids(op: str, name: str, value: Any, meaning: str = "") -> None:
    """An integer tensor of indices, such as rows of a table."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be an int64 or int32 tensor; got {type(value).__name__}")
    _check_strided(op, name, value)
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: {name} must be int64 or int32{meaning}; got {value.dtype}")


def rows_in_range(op: str, name: str, value: Tensor, count: int) -> None:
    """Every id is below `count`; checked on the CPU only: on a GPU it would synchronise."""
    if not value.is_cpu or not value.numel():
        return
    if not cpu.within(value, count):
        lowest, highest = (int(end) for end in value.aminmax())
        raise IndexError(f"{op}: {name} must be in [0, {count}); got ids from {lowest} to {highest}")


FIRST_NAMES = {"attention": "q", "cross_entropy": "logits", "embedding": "weight"}
"""The name of an operation's first tensor, if it is not x."""


def same_device(op: str, first: Tensor, **others: Tensor | None) -> None:
    """All tensors are on the device of the first; None is ignored."""
    device = first.device
    for value in others.values():
        if value is not None and value.device != device:
            name = FIRST_NAMES.get(op, "x")
            given = {name: device, **{key: other.device for key, other in others.items() if other is not None}}
            listed = ", ".join(f"{key} on {place}" for key, place in given.items())
            raise RuntimeError(f"{op}: all tensors must be on one device; got {listed}")


def real(op: str, name: str, value: Any) -> None:
    """A number that is no bool."""
    if type(value) is float:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number; got {type(value).__name__}")


def finite(op: str, name: str, value: Any) -> None:
    real(op, name, value)
    if not -math.inf < value < math.inf:  # math.isfinite would stop torch.compile where the number is symbolic
        raise ValueError(f"{op}: {name} must be finite; got {value}")


def positive(op: str, name: str, value: Any) -> None:
    real(op, name, value)
    if not value > 0.0:
        raise ValueError(f"{op}: {name} must be positive; got {value}")


def probability(op: str, name: str, value: Any) -> None:
    real(op, name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: {name} must be in [0, 1]; got {value}")


def window(op: str, value: Any) -> None:
    """None, a whole number of keys, or a pair (left, right) of such numbers or None."""
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"{op}: window must be an int or a pair (left, right); got {value}")
        for item in value:
            if item is not None and (isinstance(item, bool) or not isinstance(item, numbers.Integral)):
                raise TypeError(f"{op}: window must hold ints or None; got {value}")
            if item is not None and item < 0:
                raise ValueError(f"{op}: window must not be negative, None is without limit; got {value}")
    elif value is not None:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{op}: window must be an int, a pair (left, right) or None; got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{op}: window must be positive; got {value}")


def positive_integer(op: str, name: str, value: Any) -> None:
    integer(op, name, value)
    if value < 1:
        raise ValueError(f"{op}: {name} must be positive; got {value}")


def flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False; got {type(value).__name__}")


def as_rows(x: Tensor) -> Tensor:
    """x (..., N) as (M, N); N may be 0, where a -1 in a shape is ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def integer(op: str, name: str, value: Any) -> None:
    """A whole number that is no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{op}: {name} must be an int; got {type(value).__name__}")


def choice(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of several names."""
    if value not in choices:
        listed = ", ".join(f'"{allowed}"' for allowed in choices[:-1])
        raise ValueError(f'{op}: {name} must be {listed} or "{choices[-1]}"; got {value!r}')


def approximation(op: str, value: Any) -> None:
    if value not in APPROXIMATIONS:
        raise ValueError(f'{op}: approximate must be "none" or "tanh"; got {value!r}')


def at_least_1d(op: str, x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: {FIRST_NAMES.get(op, 'x')} must have at least one dimension; got shape ()")


def row_parameter(op: str, name: str, value: Any, x: Tensor) -> None:
    """A (N,) parameter for rows of x, in x's dtype or in float32."""
    tensor(op, name, value)
    if value.shape != x.shape[-1:]:
        raise ValueError(f"{op}: {name} must have shape ({x.shape[-1]},); got {tuple(value.shape)}")
    if value.dtype is not x.dtype and value.dtype is not torch.float32:
        first = FIRST_NAMES.get(op, "x")
        raise ValueError(f"{op}: {name} must have the dtype of {first} ({x.dtype}) or torch.float32; got {value.dtype}")


def linear_parameter(op: str, name: str, value: Any, shape: tuple[int | None, ...], x: Tensor, any_dtype: bool) -> None:
    """A weight (V, E) or bias (V,) of a linear layer over rows of x; None in `shape` allows any size above 0."""
    tensor(op, name, value)
    given = value.shape
    fits = len(given) == len(shape)
    for size, wanted in zip(given, shape, strict=False):
        fits = fits and (size > 0 if wanted is None else size == wanted)
    if not fits:
        listed = ", ".join("V" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{op}: {name} must have shape ({listed}); got {tuple(value.shape)}")
    if value.dtype is not x.dtype and not any_dtype:
        raise ValueError(f"{op}: {name} must have the dtype of x ({x.dtype}); got {value.dtype}")


def broadcasts_to(op: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    aligned = value.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(value.shape), reversed(shape), strict=False)
    )
    if not aligned:
        raise ValueError(f"{op}: {name} must broadcast to {shape}; got {tuple(value.shape)}")
