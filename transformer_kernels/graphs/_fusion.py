"""Fusion of calls in a recorded step.

Autograd adds dx of a linear layer to the gradient of the residual stream, under autocast after widening it. The kernel
of the product computes the sum instead if no other call reads dx. The results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.backends import cpu

Call = tuple[Callable[..., Any], Any]

PRODUCT = "linear_backward_data"


def fused(
    calls: Sequence[Call], began: Sequence[tuple[int, int]], is_free: Callable[[Tensor], bool]
) -> tuple[list[Call], list[Call]]:
    """The calls with sums of gradients fused into the products before them, and the calls that were replaced.

    Args:
        calls: in order.
        began: (index of a call, address of a storage) of each new tensor, in order.
        is_free: whether only the recording refers to a tensor's storage at the end.
    """
    found = _Calls(calls, began, is_free)
    for number in range(len(calls)):
        found.add_in_product(number)
    kept = [call for number, call in enumerate(found.calls) if number not in found.gone]
    return kept, [calls[number] for number in sorted(found.gone | found.changed)]


class _Calls:
    def __init__(
        self, calls: Sequence[Call], began: Sequence[tuple[int, int]], is_free: Callable[[Tensor], bool]
    ) -> None:
        self.calls, self.gone, self.changed = list(calls), set[int](), set[int]()
        self._began, self._is_free = began, is_free

    def add_in_product(self, number: int) -> None:
        """If the call adds dx to the residual's gradient, fuse it into the product that computes dx."""
        function, terms = self.calls[number]
        if not isinstance(function, partial) or function.func is not torch.ops.aten.add.out:
            return
        total, scale = function.keywords["out"], function.keywords.get("alpha", 1)
        if scale != 1 or not all(_is_plain(term, total) for term in terms) or total.dtype is not torch.float32:
            return
        for dx, residual in (terms, terms[::-1]):
            if residual.dtype is torch.float32 and self._replaced(number, dx, residual, total):
                return

    def _replaced(self, number: int, dx: Tensor, residual: Tensor, total: Tensor) -> bool:
        between = {number}
        made = self._only_writer(dx, number)
        if made is not None and getattr(self.calls[made][0], "__name__", "") == "copy_":
            narrow = self.calls[made][1][0]
            between.add(made)
            if narrow.dtype is not torch.bfloat16 or not _is_plain(narrow, dx):
                return False
            dx, made = narrow, self._only_writer(narrow, made)
        if made is None or getattr(self.calls[made][0], "__name__", "") != PRODUCT:
            return False
        kernel, arguments = self.calls[made]
        if arguments.dx != dx.data_ptr() or arguments.dtype != cpu.DTYPE_CODES[dx.dtype]:
            return False
        later = [index for index in range(made, number) if index not in between]
        if any(_mentions(self.calls[at], tensor) for at in later for tensor in (residual, total)):
            return False
        fused_arguments = arguments._replace(dx=0, residual=residual.data_ptr(), sum=total.data_ptr())
        self.calls[made] = kernel, fused_arguments
        self.gone |= between
        self.changed.add(made)
        return True

    def _only_writer(self, tensor: Tensor, reader: int) -> int | None:
        """The call before `reader` that writes the tensor, if only these two access it."""
        address = tensor.untyped_storage().data_ptr()
        begins = [call for call, began in self._began if began == address]
        first = max((call for call in begins if call <= reader), default=None)
        if first is None:
            return None
        end = min((call for call in begins if call > reader), default=None)
        if end is None and not self._is_free(tensor):
            return None
        life = range(first, len(self.calls) if end is None else end)
        users = [number for number in life if number not in self.gone and _mentions(self.calls[number], tensor)]
        return users[0] if len(users) == 2 and users[1] == reader else None


def _is_plain(term: Any, result: Tensor) -> bool:
    """Whether `term` is a tensor with the layout of `result`."""
    return isinstance(term, Tensor) and term.shape == result.shape and term.is_contiguous() and result.is_contiguous()


def _mentions(call: Call, tensor: Tensor) -> bool:
    """Whether a call may read or write the storage of a tensor."""
    function: Any
    function, arguments = call
    own: Any = ()
    if isinstance(function, partial):
        function, own = function.func, function.keywords
    bound = getattr(function, "__self__", None)
    is_python = hasattr(function, "__code__") or hasattr(function, "__func__")
    if is_python and not isinstance(bound, Tensor) and not isinstance(function, torch._ops.OpOverload):
        return True  # it may refer to tensors that are not among its arguments
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for leaf in pytree.tree_leaves((bound, own, arguments)):
        if isinstance(leaf, Tensor):
            if leaf.untyped_storage().data_ptr() == begin:
                return True
        elif isinstance(leaf, int) and begin <= leaf < end:
            return True
    return False
