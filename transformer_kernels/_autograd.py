"""What the operations share in their three routes: raw call, autograd.Function, registered operator.

A call without gradients goes straight to the backend (cheapest), one with gradients through an autograd.Function, and
one that is being traced (torch.compile, fake or meta tensors, a dispatch mode) through an operator registered with
torch.library. The last costs several times the others, so it is taken only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_is_active = torch._C._are_functorch_transforms_active

LIBRARY = torch.library.Library("transformer_kernels", "FRAGMENT")


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record this call."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(x: Tensor) -> bool:
    """Whether this call must be seen by a tracer: then it goes through the registered operator."""
    return is_compiling() or x.is_meta or _dispatch_modes() > 0 or isinstance(x, FakeTensor)


def refuse_transforms(op: str, *tensors: Tensor | None) -> None:
    """Raise under vmap, functorch's grad and forward-mode AD, which these operations do not have."""
    if _functorch_is_active():
        raise RuntimeError(f"{op}: vmap and the transforms of torch.func are not supported; use python_ref.ops.{op}")
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise RuntimeError(f"{op}: forward-mode AD is not supported; use python_ref.ops.{op}")


class _FirstOrderOnly(torch.autograd.Function):
    """The identity; going backward through it is an error."""

    @staticmethod
    def forward(ctx: Any, op: str, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(grad if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(f"{ctx.op}: double backward is not supported; use python_ref.ops.{ctx.op}")


def first_order_only(op: str, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Pass gradients on; under create_graph=True, such that differentiating them again is an error, never a zero."""
    if not torch.is_grad_enabled():
        return grads
    return _FirstOrderOnly.apply(op, *(grad if grad is None else grad.detach().requires_grad_() for grad in grads))


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `transformer_kernels::<schema>` for every device and return the callable operator."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"transformer_kernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.transformer_kernels, name).default


def register_backward(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give a registered operator its gradient."""
    torch.library.register_autograd(f"transformer_kernels::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def unaliased(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, with a copy in place of one that shares memory with an earlier one: operators must not return such.

    Kernels may allocate two small results at once; only the traced route pays for taking them apart.
    """
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        apart.append(tensor.clone() if address in seen and tensor.numel() else tensor)
        seen.add(address)
    return tuple(apart)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on x's device, None where it is off."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their dtypes: what autocast does to operands that must agree."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors)
