"""How generic tests call the example of each operation."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import transformer_kernels as tk
from transformer_kernels.backends import dispatch
from transformer_kernels.verification.examples import CPU as CPU
from transformer_kernels.verification.examples import EXAMPLES

ROW_OPERATIONS = [op for op in EXAMPLES if "attention" not in op and op not in ("linear_cross_entropy",)]
"""Operations with their own row kernels."""


def row_operations(backend):
    """The row operations of which the backend has kernels of its own: not those of "torch"."""
    own = {op: dispatch.family(dispatch.OPERATIONS[op].folder, backend) for op in ROW_OPERATIONS}
    shared = {op: dispatch.family(dispatch.OPERATIONS[op].folder, "torch") for op in ROW_OPERATIONS}
    return [op for op in ROW_OPERATIONS if own[op] not in (None, shared[op])]


def function(op, backend=None):
    """The public operation with the options of its example, as a function of the example's tensors."""
    options = EXAMPLES[op].options
    return lambda **tensors: getattr(tk, op)(**tensors, **options, backend=backend)


def prepared(op, *arguments, **options):
    """The validated call of an operation, from the arguments of its public function."""
    return dispatch.OPERATIONS[op].prepare(*arguments, **options)


def forward_of(kernels, call):
    """The results of a backend's kernels."""
    return kernels.of(call).forward(call)


def backward(kernels, call, result, *grads, wanted=None):
    """A backend's backward for a call and its forward result; all gradients are required unless `wanted` is given."""
    operation = next(each for each in dispatch.OPERATIONS.values() if each.call is type(call))
    return kernels.of(call).backward(call, result, grads, wanted or (True,) * len(operation.differentiable))


def dispatched(monkeypatch):
    """The operations whose calls are validated and dispatched from here on, one name for each such call."""
    names = []
    select = dispatch.select

    def counted(operation, backend, call):
        names.append(operation.name)
        return select(operation, backend, call)

    monkeypatch.setattr(dispatch, "select", counted)
    return names


@contextmanager
def without_plans(kept=dict):
    """Within this context calls are not planned as before it, nor after it as within; `kept` makes the new plans."""
    with ExitStack() as stack:
        for operation in dispatch.OPERATIONS.values():
            stack.enter_context(mock.patch.object(operation, "plans", kept()))
        yield
