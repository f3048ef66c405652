"""Transforms of torch.func by kernels: vmap, in any nesting, and reverse mode, once.

The samples of vmap are folded into the first axis of the tensors of which a call computes each index alone
(`Call.folded`). Without such tensors, and for gradients of tensors that samples share, kernels run sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.func import vjp

from transformer_kernels.ops._derivatives import absent_as_empty, is_reverse_once
from transformer_kernels.ops._plan import functorch_is_active

if TYPE_CHECKING:
    from transformer_kernels.ops._operation import Operation

MIN_ELEMENTS = 1 << 15
"""Of the first tensor of a call of kernels, from which they are faster than PyTorch's operators: a function with a rule
for each transform costs a millisecond."""


def by_kernels(operation: Operation, call: Any, backend: str | None, public: int) -> tuple[Tensor, ...] | None:
    """The public outputs of a call under the transforms that are active; None where PyTorch's operators compute it."""
    if (fields := call.folded()) is None or not is_reverse_once() or call.is_empty():
        return None
    values = operation.flat(call)
    given = {name: x for name, x in zip(operation.fields, values, strict=True) if isinstance(x, Tensor)}
    x = _unwrapped(call[0])[0]
    alone = (other for name, other in given.items() if name not in (*fields[0], *fields[1]))
    if not fields[0] or any(_unwrapped(other)[1] for other in alone):  # sample by sample
        x = call[0]
    if x.numel() < MIN_ELEMENTS or not all(_unwrapped(other)[0].numel() for other in given.values()):
        return None
    return _tuple(_Transformed.apply(*values, backend, operation, False))[:public]


def _unwrapped(x: Tensor) -> tuple[Tensor, bool]:
    """The tensor without the wrappers of transforms, and whether vmap batches it."""
    batched = False
    while functorch.is_functorch_wrapped_tensor(x):
        batched = batched or functorch.is_batchedtensor(x)
        x = functorch.get_unwrapped(x)
    return x, batched


class _Transformed(torch.autograd.Function):
    """The forward pass of an operation, or the backward pass where the last argument is True: a function of the
    arguments of its registered operator, and of the operation."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *arguments, operation, backward = inputs
        return (operation.run_backward if backward else operation.run_forward)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *arguments, ctx.operation, ctx.is_backward = inputs
        if ctx.is_backward:
            ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
            ctx.set_materialize_grads(False)
        else:
            ctx.operation.setup_context(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operation = ctx.operation
        if ctx.is_backward:
            arguments = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
            gradients = _in_pytorch(operation, arguments)[1](grads)
        elif is_reverse_once():
            gradients = operation.gradient(ctx, *grads, by=lambda *given: _Transformed.apply(*given, operation, True))
        else:
            gradients = operation.gradient(ctx, *grads, by=lambda *given: _in_pytorch(operation, given)[0])
        return *gradients, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, int]:
        *arguments, operation, backward = inputs
        count, dims = info.batch_size, [dim if isinstance(dim, int) else None for dim in in_dims[:-2]]
        samples = list(zip(arguments, dims, strict=True))
        batches = _batches(operation, backward, samples)
        if batches is not None:
            given = [_folded(x, dim, count, batch) for (x, dim), batch in zip(samples, batches, strict=True)]
            results = _run(*given, operation, backward)
            found = tuple(x.unflatten(0, (count, -1)) for x in results)
        else:
            runs = (
                _run(*(x if dim is None else x.select(dim, i) for x, dim in samples), operation, backward)
                for i in range(count)
            )
            found = tuple(torch.stack(parts) for parts in zip(*runs, strict=True))
        return (found if len(found) > 1 else found[0]), 0


def _run(*inputs: Any) -> tuple[Tensor, ...]:
    """What `_Transformed` computes, recorded and transformed where that is needed: this costs more than small calls."""
    recorded = functorch_is_active() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return _tuple(_Transformed.apply(*inputs) if recorded else _Transformed.forward(*inputs))


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _size(x: Tensor, dim: int | None) -> int:
    """The first axis of a sample."""
    return x.shape[1 if dim == 0 else 0]


def _batches(operation: Operation, backward: bool, samples: Sequence[tuple[Any, int | None]]) -> list[Any] | None:
    """The first axis of each argument with which samples are folded, None for the others; None if they cannot be."""
    arguments, fields, gradients = [x for x, _ in samples], operation.fields, set()
    main, others = operation.call_of(backward, arguments).folded()
    names = list(fields)
    if backward:
        gradients = {fields[i] for i, want in zip(operation.differentiable, arguments[-2], strict=True) if want}
        kept = [fields[i] for i in operation.kept_call]
        names = [main[0]] * operation.public + kept + [main[0]] * len(operation.kept_results) if main else []
    if not main or not gradients <= {*main, *others}:
        return None
    found: list[int | None] = [None] * len(samples)
    for i, (name, (x, dim)) in enumerate(zip(names, samples, strict=False)):
        if isinstance(x, Tensor) and name in main:
            found[i] = _size(x, dim)
    batch = next(size for size in found if size is not None)
    for i, (name, (x, dim)) in enumerate(zip(names, samples, strict=False)):
        if isinstance(x, Tensor) and name in others and (dim is not None or _size(x, dim) > 1 or name in gradients):
            if name in gradients and _size(x, dim) != batch:
                return None
            found[i] = batch
        elif isinstance(x, Tensor) and found[i] is None and dim is not None:
            return None
    return found


def _folded(x: Any, dim: int | None, count: int, batch: int | None) -> Any:
    """The samples along the first axis, which is expanded to `batch` before."""
    if batch is None:
        return x
    x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    in_order = x[:1].flatten(0, 1).is_contiguous()  # as the call requires of all tensors but those of attention
    x = x.expand(count, batch, *x.shape[2:]).flatten(0, 1)
    return x.contiguous() if in_order or x.stride(-1) != 1 else x


def _in_pytorch(operation: Operation, arguments: Sequence[Any]) -> tuple[tuple[Tensor, ...], Any]:
    """What a backward pass returns by PyTorch's operators, and (its gradients) -> the gradients of its arguments."""
    moved = [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point()]

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(arguments)
        for i, x in zip(moved, tensors, strict=True):
            given[i] = x
        call, results, grads, wanted, _ = operation.unpacked(given)
        return absent_as_empty(operation.differentiated(call, results, grads, wanted), wanted, grads[0])

    found, pull, *_ = vjp(gradients, *(arguments[i] for i in moved))  # in which all of these require gradients

    def pulled(coming: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = zip(coming, found, strict=True)
        back = dict(zip(moved, pull(tuple(torch.zeros_like(y) if dy is None else dy for dy, y in pairs)), strict=True))
        return [back.get(i) for i in range(len(arguments))]

    return found, pulled
