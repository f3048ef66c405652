"""Forward-mode AD by kernels: outputs and their tangents, and the gradients of both where autograd records the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import jvp

from transformer_kernels.ops._derivatives import (
    Outputs,
    Parts,
    are_batched,
    differentiated,
    is_differentiated_again,
)
from transformer_kernels.ops._kernels import Kernels

if TYPE_CHECKING:
    from transformer_kernels.ops._operation import Operation


def outputs_and_tangents(
    operation: Operation, kernels: Kernels, call: Any, tangents: Parts, public: int
) -> tuple[Outputs, Outputs] | None:
    """The first `public` outputs of a call and their tangents, given the inputs' tangents; None without such a kernel.

    The tensors of the call do not carry their tangents.
    """
    with torch.no_grad():
        found = _computed(kernels, call, tangents)
    if found is None:
        return None
    results, of_outputs = found
    outputs, of_outputs = ((results,) if operation.result is None else results)[:public], of_outputs[:public]
    tensors = *operation.inputs(call), *tangents
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        recorded = _Recorded.apply(operation, kernels, call, results, (*outputs, *of_outputs), *tensors)
        outputs, of_outputs = recorded[:public], recorded[public:]
    return outputs, of_outputs


def _computed(kernels: Kernels, call: Any, tangents: Parts) -> tuple[Any, Outputs] | None:
    """The results of a call and the tangents of its public outputs."""
    found = kernels.forward_tangent(call, tangents)
    if found is None and call.tangents is not None and call.has_tangents(tangents):
        results = kernels.forward(call)
        found = results, call.tangents(kernels, results, tangents)
    return found


class _Recorded(torch.autograd.Function):
    """Outputs and tangents, computed before. Where only outputs have gradients, as beside a tangent that is a detached
    target, backward is the backend's."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, kernels: Kernels, call: Any, results: Any, outputs: Outputs, *tensors: Any
    ) -> Outputs:
        """`tensors` are the differentiable ones of the call once more, and their tangents."""
        values = operation.flat(call)
        ctx.operation, ctx.kernels = operation, kernels
        ctx.others = [None if isinstance(x, Tensor) else x for x in values]
        results = operation.saved_results((results,) if operation.result is None else results)
        of_inputs = tensors[len(tensors) // 2 :]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in values), *results, *of_inputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operation, public, tensors = ctx.operation, len(grads) // 2, ctx.saved_tensors
        fields, inputs = len(operation.fields), len(operation.differentiable)
        values = [other if x is None else x for x, other in zip(tensors[:fields], ctx.others, strict=True)]
        results, tangents = tensors[fields : len(tensors) - inputs], tensors[len(tensors) - inputs :]
        wanted = ctx.needs_input_grad[5:]
        if any(x is not None for x in grads[public:]) or is_differentiated_again() or are_batched(grads):
            given = [values[i] for i in operation.differentiable]
            gradients = differentiated(_in_pytorch(operation, values, public), (*given, *tangents), grads, wanted)
        else:
            kept, numbers = operation.saved(operation.nested(values))
            call, results = operation.kept((*kept, *results), numbers)
            coming = operation.incoming(results, grads[:public])
            found: Parts = tuple(ctx.kernels.backward(call, results, coming, wanted[:inputs]))
            gradients = found + (None,) * (2 * inputs - len(found))
        return *[None] * 5, *(x if want else None for x, want in zip(gradients, wanted, strict=True))


def _in_pytorch(operation: Operation, values: Sequence[Any], public: int) -> Any:
    """The function of the differentiable tensors of a call and their tangents -> outputs and tangents."""

    def function(*given: Tensor | None) -> Parts:
        inputs, tangents = (given[: len(given) // 2], given[len(given) // 2 :])
        moved = [i for i, x in enumerate(tangents) if x is not None]
        filled = list(values)
        for i, x in zip(operation.differentiable, inputs, strict=True):
            filled[i] = x

        def outputs(*primals: Tensor) -> Outputs:
            for i, x in zip(moved, primals, strict=True):
                filled[operation.differentiable[i]] = x
            result: Outputs = operation.nested(filled).in_pytorch(public)[:public]
            return result

        found: Any = jvp(outputs, tuple(inputs[i] for i in moved), tuple(tangents[i] for i in moved))
        return *found[0], *found[1]

    return function
