"""Derivatives of an operation by PyTorch's operators: of the second and higher orders, forward-mode AD and torch.func.

A call states its public outputs in PyTorch's differentiable operators once (`Call.in_pytorch`). Every derivative that
no kernel has is the derivative of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from transformer_kernels.ops._plan import functorch_is_active

Outputs = tuple[Tensor, ...]
Parts = tuple[Tensor | None, ...]


def is_transformed(values: Iterable[Any]) -> bool:
    """Whether a transform of torch.func is active, or one of the tensors has a tangent."""
    if functorch_is_active():
        return True
    return forward_ad._current_level >= 0 and any(
        isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values
    )


def split_tangents(values: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]] | None:
    """The values without tangents, and these; None unless forward-mode AD, once, is all that is asked for."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if len(stack) > 1 or (stack and stack[0].key() != torch._C._functorch.TransformType.Jvp):
        return None
    primals = list(values)
    tangents: list[Tensor | None] = [None] * len(values)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            pair = forward_ad.unpack_dual(value) if value.is_floating_point() else (value, None)
            if stack:
                level = stack[0].level()
                pair = tuple(x if x is None else torch._C._functorch._unwrap_for_grad(x, level) for x in pair)
            recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair)
            if are_batched(pair) or (recorded and not stack):  # dual numbers have gradients with a tangent
                return None
            primals[i], tangent = pair
            with outside_transform():  # inside it autograd would record a constant
                tangents[i] = tangent if tangent is None else tangent.to(value.dtype)  # PyTorch allows other dtypes
    return primals, tangents


def contiguous(tangent: Tensor | None) -> Tensor:
    """A tangent in the layout of kernels."""
    assert tangent is not None
    return tangent.resolve_neg().contiguous()


def join_tangents(outputs: Iterable[Tensor], tangents: Iterable[Tensor]) -> Outputs:
    """The outputs with their tangents, in the transform that is active."""
    return tuple(forward_ad.make_dual(y, dy) for y, dy in zip(outputs, tangents, strict=True))


def is_reverse_once() -> bool:
    """Whether the active transforms of torch.func are vmap, at any depth, and at most one reverse mode."""
    kinds = torch._C._functorch.TransformType
    keys = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    reverse = keys.count(kinds.Grad)
    return reverse <= 1 and reverse + keys.count(kinds.Vmap) == len(keys) and forward_ad._current_level < 0


def outside_transform() -> AbstractContextManager[Any]:
    """A context outside of the transform that is active, in which tensors are not wrapped."""
    return temporarily_pop_interpreter_stack() if functorch_is_active() else nullcontext()


def is_differentiated_again() -> bool:
    """Whether this backward pass is recorded (create_graph), batched by vmap, or within forward-mode AD."""
    return torch.is_grad_enabled() or functorch_is_active() or forward_ad._current_level >= 0


def are_batched(grads: Iterable[Tensor | None]) -> bool:
    """Whether there is a batch of gradients (`is_grads_batched` of torch.autograd.grad), which no kernel can read."""
    return any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def differentiated(
    function: Callable[..., Parts], inputs: Iterable[Tensor | None], grads: Sequence[Any], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of `function(*inputs)` that are wanted, by autograd and differentiable once more.

    An incoming gradient may be None.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [x if x is None else x.view_as(x) for x in inputs]  # a tensor that is given twice has two gradients
        outputs = function(*given)
    pairs = [
        (output, grad.to(output.dtype))
        for output, grad in zip(outputs, grads, strict=False)
        if output is not None and grad is not None and output.requires_grad
    ]
    asked = [x for x, want in zip(given, wanted, strict=True) if want and x is not None]
    found: Iterable[Tensor] = (torch.zeros_like(x) for x in asked)
    if pairs and asked:
        ends, starts = zip(*pairs, strict=True)
        options = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(ends, asked, starts, **options)
    found = iter(found)
    return tuple(next(found) if want and x is not None else None for x, want in zip(given, wanted, strict=True))


def absent_as_empty(gradients: Iterable[Tensor | None], wanted: Sequence[bool], like: Tensor) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: an empty tensor if a gradient is absent or not wanted."""
    gradients = list(gradients)
    gradients += [None] * (len(wanted) - len(gradients))  # trailing ones that a backend leaves out
    pairs = zip(gradients, wanted, strict=True)
    return tuple(grad if want and grad is not None else like.new_empty(0) for grad, want in pairs)


class Block(NamedTuple):
    """A part of a function of several tensors: parts of these -> its parts of the outputs, both views.

    `give` of gradients is `take` of their tensors, so that the gradient of a block is a block.
    """

    function: Callable[..., Parts]
    take: Callable[[Sequence[Any]], Parts]
    give: Callable[[Sequence[Any]], Parts]


def blockwise(blocks: Sequence[Block], dim: int, *tensors: Tensor | None) -> Outputs:
    """The outputs of blocks, one after the other along an axis.

    Every backward pass of any order computes the blocks again, one by one, and adds up their gradients: nothing but the
    tensors is kept. Under the transforms of torch.func and in forward-mode AD the values of the blocks are kept.
    """
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if recorded and not functorch_is_active() and forward_ad._current_level < 0:
        outputs: Outputs = _Blockwise.apply(blocks, dim, 0, *tensors)
        return outputs
    return _joined(blocks, dim, tensors)


def _joined(blocks: Sequence[Block], dim: int, tensors: Sequence[Tensor | None]) -> Outputs:
    parts = [block.function(*block.take(tensors)) for block in blocks]
    return tuple(torch.cat(results, dim=dim) for results in zip(*parts, strict=True))  # type: ignore[arg-type]


def _added(blocks: Sequence[Block], count: int, tensors: Sequence[Tensor | None], in_place: bool) -> Parts:
    """The outputs of blocks, of the shapes of the first tensors, added up; not in place where parts may be batched."""
    sums: list[Any] = [None if x is None else torch.zeros_like(x) for x in tensors[:count]]
    for block in blocks:
        parts = block.function(*block.take(tensors))
        if in_place:
            for total, part in zip(block.give(sums), parts, strict=True):
                if total is not None and part is not None:
                    total.add_(part)
        else:  # the gradient of `give` puts a part where `give` takes it from
            leaves = [x if x is None else torch.zeros_like(x).requires_grad_() for x in tensors[:count]]
            wanted = [x is not None for x in leaves]
            added = differentiated(lambda *sums, give=block.give: give(sums), leaves, parts, wanted)
            sums = [x if x is None else x + more for x, more in zip(sums, added, strict=True)]
    return tuple(sums)


class _Blockwise(torch.autograd.Function):
    """Blocks whose outputs are joined along `dim`, or gradients of the first `count` tensors, which are added up."""

    @staticmethod
    def forward(ctx: Any, blocks: Sequence[Block], dim: int, count: int, *tensors: Tensor | None) -> Any:
        ctx.blocks = blocks
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _added(blocks, count, tensors, in_place=True) if count else _joined(blocks, dim, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        count = len(tensors)
        blocks = [_gradient_of(block, count, wanted) for block in ctx.blocks]
        if functorch_is_active() or forward_ad._current_level >= 0 or are_batched(grads):
            gradients = _added(blocks, count, (*tensors, *grads), in_place=False)
        else:
            gradients = _Blockwise.apply(blocks, 0, count, *tensors, *grads)
        return None, None, None, *gradients


def _gradient_of(block: Block, count: int, wanted: Sequence[bool]) -> Block:
    """The block of the gradients of a block of so many tensors, from these and the gradients of its outputs."""

    def function(*parts: Any) -> Parts:
        recorded, inputs = torch.is_grad_enabled(), parts[:count]
        given = [
            x if recorded or not want else x.detach().requires_grad_() for x, want in zip(inputs, wanted, strict=True)
        ]
        return differentiated(block.function, given, parts[count:], wanted)

    def take(tensors: Sequence[Any]) -> Parts:
        return *block.take(tensors[:count]), *block.give(tensors[count:])

    return Block(function, take, block.take)
