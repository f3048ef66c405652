"""Calls that no kernel computes, whatever their sizes: with tensors that it cannot read, or under transforms.

Kernels read dense tensors by address and strides: not nested, sparse, quantised or sharded ones, nor other subclasses.
Transforms of torch.func and forward-mode AD change what a call means. Formats of exports do not have these operators.
`accelerate`, patched modules and the attention of transformers leave all of these to PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.ops._checks import PLAIN
from transformer_kernels.ops._plan import functorch_is_active, is_jit_tracing

PACKAGE = __name__.partition(".")[0]
NOT_DENSE = "an argument is not dense"
TRANSFORM = "a transform of torch.func or forward-mode AD is active"
ONNX = "torch.onnx.export is active"
UNPATCH = "call tk.unpatch(model) first"
REMEDY = f'use the backend "auto", which runs PyTorch\'s code, or {UNPATCH}'

SCALARS = frozenset({type(None), bool, int, float, str})

_strided = torch.strided


def _is_foreign_class(kind: Any) -> bool:
    """Whether a class of arguments or parameters is one of tensors that kernels do not read."""
    if not issubclass(kind, Tensor) or kind in PLAIN or kind.__module__.startswith(PACKAGE):
        return False
    return not issubclass(kind, (FakeTensor, FunctionalTensor))


_is_foreign: Any = functools.cache(_is_foreign_class)


def transformed() -> str | None:
    """The transform that a call is in and that the operations do not have, or None."""
    if functorch_is_active() or forward_ad._current_level >= 0:
        return TRANSFORM
    return None


def foreign(value: Any) -> str | None:
    """Why a kernel does not read this argument; None for one that it reads, or that is no tensor."""
    kind: Any = type(value)
    if kind is Tensor or kind is Parameter:
        if value.layout is not _strided or value.is_nested:
            return NOT_DENSE
        return "an argument is a negated view" if value.is_neg() else None
    return f"an argument is a {kind.__name__}" if _is_foreign(kind) else None


def rejected(*tensors: Any, optional: Iterable[Any] = ()) -> str | None:
    """Why no kernel computes a call of `accelerate` with these tensors; an optional one may be None."""
    if (reason := transformed()) is not None:
        return reason
    if is_jit_tracing():
        return "torch.jit.trace is active"
    for tensor in (*tensors, *(value for value in optional if value is not None)):
        if type(tensor) not in PLAIN:
            return f"an argument is a {type(tensor).__name__}"
        if (reason := foreign(tensor)) is not None:
            return reason
        if tensor.numel() == 0:
            return "an argument is empty"
    return None


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether the parameters of a module are dense tensors: quantisation and sharding replace them by subclasses."""
    for value in parameters:
        if value is not None and type(value) not in PLAIN and _is_foreign(type(value)):
            return False
    return True


def refused(name: str, backend: str | None, values: Iterable[Any]) -> str | None:
    """Why no kernel computes a call with these arguments; raises for a named backend."""
    if is_compiling():
        reason = _refused_by_compiler(values)
    elif functorch_is_active() or forward_ad._current_level >= 0:
        reason = TRANSFORM
    else:
        reason = ONNX if is_jit_tracing() and torch.onnx.is_in_onnx_export() else None
        for value in values:
            if type(value) not in SCALARS:
                reason = reason or foreign(value)
    if reason is not None and (named := requested(backend)) != "auto":
        raise UnsupportedByBackend(f"{name}: backend {named!r} does not compute this call: {reason}; {REMEDY}")
    return reason


def _refused_by_compiler(values: Iterable[Any]) -> str | None:
    """The same in code that Dynamo traces, in which fake tensors appear as plain ones."""
    if torch.onnx.is_in_onnx_export():
        return ONNX
    if transformed() is not None:
        return TRANSFORM
    for value in values:
        if isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided:
                return NOT_DENSE
            if is_traceable_wrapper_subclass(value) and _is_foreign(type(value)):
                return "an argument is a subclass of Tensor"
    return None
