"""Attention and norms of other packages (timm) whose own forward calls torch.nn.functional.

The forward runs as it is written, so that everything it reads, such as q_norm, dropouts and masks, keeps its meaning.
Only its calls of three functions run our operations, by the rules of `accelerate`.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.patching._code import direct_calls
from transformer_kernels.patching._products import adopt_linear_layers
from transformer_kernels.patching._swap import CHOICES, ByBackend, with_global
from transformer_kernels.patching._torch_calls import attention, layer_norm, rms_norm

HANDLERS: dict[str, Any] = {"scaled_dot_product_attention": attention, "layer_norm": layer_norm, "rms_norm": rms_norm}
"""Functions of torch.nn.functional; a forward calls them as F.name or by their name alone."""


class _Rerouted(ByBackend):
    """The original forward, in which our operations replace functions of torch.nn.functional."""

    @staticmethod
    def content(original: Any) -> dict[str, Any]:
        """The patched class's forward for each backend."""
        return {"_by_backend": {backend: _with_ours(original.forward, backend) for backend in CHOICES}}

    @staticmethod
    def refuses(module: Any) -> str | None:
        if "backend" in vars(module):
            return "it has an attribute `backend` of its own"
        if not getattr(module, "fused_attn", True):
            return "fused_attn is off: its scores, softmax and dropout are separate calls"
        return "_fast_norm selects another function" if getattr(module, "_fast_norm", False) else None


class ReroutedAttention(_Rerouted):
    operation = "attention"

    def _adopt(self) -> None:
        adopt_linear_layers(self)


class ReroutedLayerNorm(_Rerouted):
    operation = "layer_norm"


class ReroutedRMSNorm(_Rerouted):
    operation = "rms_norm"


def _with_ours(forward: Any, backend: str | None) -> Any:
    """A copy of a forward that calls our operations."""
    ours = {name: functools.partial(_call, name, backend) for name in HANDLERS}
    functional = types.ModuleType(F.__name__)
    vars(functional).update({**vars(F), **ours})
    given = forward.__globals__
    by_function = {id(getattr(F, name)): function for name, function in ours.items()}
    replaced: dict[str, Any] = {
        name: by_function[id(value)] for name, value in given.items() if id(value) in by_function
    }
    replaced |= {name: functional for name, value in given.items() if value is F}
    for name, before in replaced.items():
        forward = with_global(forward, name, before)
    return forward


def _call(name: str, backend: str | None, *args: Any, **kwargs: Any) -> Tensor:
    """A call of one function; with "auto", PyTorch's where ours is not exact or not faster, and in compiled code."""
    chosen, original = requested(backend), getattr(F, name)
    if chosen == "auto" and is_compiling():
        return original(*args, **kwargs)
    result = HANDLERS[name](chosen, *args, **kwargs)
    if not isinstance(result, str):
        return result
    if chosen != "auto":
        raise UnsupportedByBackend(f"{name}: backend {chosen!r} does not compute this call: {result}")
    return original(*args, **kwargs)


MIXINS = {
    "scaled_dot_product_attention": ReroutedAttention,
    "layer_norm": ReroutedLayerNorm,
    "rms_norm": ReroutedRMSNorm,
}


@functools.cache
def mixin_of(kind: type) -> Any:
    """The replacement of a class whose forward calls one of the functions; None for torch's and transformers'."""
    if kind.__module__.startswith(("torch.", "transformers.", "transformer_kernels.")):
        return None
    return next((MIXINS[call.name] for call in direct_calls(kind) if call.name in MIXINS), None)
