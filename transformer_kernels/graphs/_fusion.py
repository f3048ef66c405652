"""Fusion of calls in a recorded step; the results are bitwise equal.

Autograd adds dx of a linear layer to the gradient of the residual stream, under autocast after widening it: the kernel
of the norm that reads the sum adds instead, or the kernel of the product that computes dx, if no other call reads the
omitted tensors. Autocast casts between the products, in bfloat16, and the norms, in float32: the kernel of the norm
reads or writes bfloat16 instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.backends import cpu

Call = tuple[Callable[..., Any], Any]

PACKAGE = __name__.partition(".")[0] + "."
PRODUCT = "linear_backward_data"

READ_NARROW = {"norm_forward": ("x", "x_is_bfloat16"), "norm_backward": ("dy", "dy_is_bfloat16")}
"""Kernels in float32 that read an operand in bfloat16 too: the fields with its address and whether it is bfloat16."""

WRITTEN_NARROW = {"norm_forward": ("y",), "norm_backward": ("dx", "dresidual")}
"""Kernels in float32 that write a result, the first that there is, in bfloat16 too, to `narrow`. Only the first one may
then be absent."""


def fused(
    calls: Sequence[Call], began: Sequence[tuple[int, int]], is_free: Callable[[Tensor], bool]
) -> tuple[list[Call], list[Call]]:
    """The calls with sums of gradients and casts fused into kernels, and the calls that were replaced.

    Args:
        calls: in order.
        began: (index of a call, address of a storage) of each new tensor, in order.
        is_free: whether only the recording refers to a tensor's storage at the end.
    """
    found = _Calls(calls, began, is_free)
    for number in range(len(calls)):
        found.add_in_kernel(number)
    for number in range(len(calls)):
        found.cast_in_kernel(number)
    kept = [call for number, call in enumerate(found.calls) if number not in found.gone]
    return kept, [calls[number] for number in sorted(found.gone | found.changed)]


class _Calls:
    def __init__(
        self, calls: Sequence[Call], began: Sequence[tuple[int, int]], is_free: Callable[[Tensor], bool]
    ) -> None:
        self.calls, self.gone, self.changed = list(calls), set[int](), set[int]()
        self._began, self._is_free = began, is_free
        self._memory = [_memory_of(call) for call in calls]

    def add_in_kernel(self, number: int) -> None:
        """If the call adds dx to the residual's gradient, fuse it into a norm or the product that computes dx."""
        function, terms = self.calls[number]
        if not isinstance(function, partial) or function.func is not torch.ops.aten.add.out:
            return
        total, scale = function.keywords["out"], function.keywords.get("alpha", 1)
        if scale != 1 or not all(_is_plain(term, total) for term in terms) or total.dtype is not torch.float32:
            return
        for dx, residual in (terms, terms[::-1]):
            if residual.dtype is torch.float32 and (
                self._add_in_norm(number, dx, residual, total) or self._add_in_product(number, dx, residual, total)
            ):
                return

    def _add_in_norm(self, number: int, dx: Tensor, residual: Tensor, total: Tensor) -> bool:
        """Let the only reader of the sum, a norm's gradient, add to the residual's what `dx` was widened from."""
        users, widened = self._users(total, self._life(total, number)), self._only_writer(dx, number)
        if len(users) != 2 or users[0] != number or _name(self.calls[users[1]]) != "norm_backward":
            return False
        if widened is None or _copied_to(self.calls[widened]) is None:
            return False
        narrow, (_, arguments) = self.calls[widened][1][0], self.calls[users[1]]
        if narrow.dtype is not torch.bfloat16 or not _is_plain(narrow, dx) or not _has_rows_of(arguments, total):
            return False
        if arguments.residual or arguments.dy_is_bfloat16 or not _is_only(total, "dy", arguments):
            return False
        later = range(number + 1, users[1])
        if self._users(narrow, range(widened + 1, users[1] + 1)) or self._users(residual, later):
            return False
        own = {key: 0 for key in ("dx", "dresidual") if getattr(arguments, key) == residual.data_ptr()}
        if _memory_of((self.calls[users[1]][0], arguments._replace(**own))).has(residual):
            return False  # of what is written only each element itself may have its address: it is read before
        self._change(users[1], dy=narrow.data_ptr(), dy_is_bfloat16=True, residual=residual.data_ptr())
        self.gone |= {widened, number}
        return True

    def _add_in_product(self, number: int, dx: Tensor, residual: Tensor, total: Tensor) -> bool:
        between = {number}
        made = self._only_writer(dx, number)
        if made is not None and _name(self.calls[made]) == "copy_":
            narrow = self.calls[made][1][0]
            between.add(made)
            if narrow.dtype is not torch.bfloat16 or not _is_plain(narrow, dx):
                return False
            dx, made = narrow, self._only_writer(narrow, made)
        if made is None or _name(self.calls[made]) != PRODUCT:
            return False
        _, arguments = self.calls[made]
        if arguments.dx != dx.data_ptr() or arguments.dtype != cpu.DTYPE_CODES[dx.dtype]:
            return False
        later = [index for index in range(made, number) if index not in between]
        if self._users(residual, later) or self._users(total, later):
            return False
        self._change(made, dx=0, residual=residual.data_ptr(), sum=total.data_ptr())
        self._begins(total, number, made)
        self.gone |= between
        return True

    def cast_in_kernel(self, number: int) -> None:
        """If the call casts an operand or a result of a kernel that can do that itself, fuse it into the kernel.

        A copy that no call reads is dropped.
        """
        result = _copied_to(self.calls[number])
        if number in self.gone or result is None:
            return
        source = self.calls[number][1][0]
        if self._users(result, self._life(result, number)) == [number]:
            self.gone.add(number)
        elif not _is_plain(source, result):
            return
        elif (source.dtype, result.dtype) == (torch.bfloat16, torch.float32):
            self._read_narrow(number, source, result)
        elif (source.dtype, result.dtype) == (torch.float32, torch.bfloat16):
            self._write_narrow(number, source, result)

    def _read_narrow(self, number: int, narrow: Tensor, wide: Tensor) -> None:
        """Let the only kernel that reads `wide` read `narrow`."""
        users = self._users(wide, self._life(wide, number))
        if len(users) != 2 or users[0] != number or self._users(narrow, range(number + 1, users[1] + 1)):
            return
        name, arguments = _name(self.calls[users[1]]), self.calls[users[1]][1]
        if name not in READ_NARROW or not _has_rows_of(arguments, wide):
            return
        field, flag = READ_NARROW[name]
        if not _is_only(wide, field, arguments):
            return
        self._change(users[1], **{field: narrow.data_ptr(), flag: True})
        self.gone.add(number)

    def _write_narrow(self, number: int, wide: Tensor, narrow: Tensor) -> None:
        """Let the kernel that has written `wide` write `narrow`, and `wide` only where another call reads it."""
        life = self._life(wide, number)
        before = [user for user in self._users(wide, life) if user < number and not self._copies(user, wide)]
        if not before or self._users(narrow, range(before[-1] + 1, number)):
            return
        writer = before[-1]
        name, arguments = _name(self.calls[writer]), self.calls[writer][1]
        if name not in WRITTEN_NARROW or arguments.narrow or not _has_rows_of(arguments, wide):
            return
        fields = WRITTEN_NARROW[name]
        field = next(field for field in fields if getattr(arguments, field))
        if getattr(arguments, field) != wide.data_ptr():
            return
        operand = READ_NARROW[name][0]  # each element is read before it is written
        others = arguments._replace(**{operand: 0}) if getattr(arguments, operand) == narrow.data_ptr() else arguments
        if _memory_of((self.calls[writer][0], others)).has(narrow):
            return
        self._change(writer, narrow=narrow.data_ptr())
        self._begins(narrow, number, writer)
        self.gone.add(number)
        if field == fields[0] and self._users(wide, life) == [writer]:
            self._change(writer, **{field: 0})

    def _copies(self, number: int, tensor: Tensor) -> bool:
        """Whether a call only copies the tensor to other memory."""
        result = _copied_to(self.calls[number])
        return result is not None and result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()

    def _change(self, number: int, **fields: Any) -> None:
        """Replace arguments of a kernel."""
        kernel, arguments = self.calls[number]
        self.calls[number] = kernel, arguments._replace(**fields)
        self._memory[number] = _memory_of(self.calls[number])
        self.changed.add(number)

    def _begins(self, tensor: Tensor, number: int, earlier: int) -> None:
        """Note that a tensor which began at a call begins at an earlier one."""
        new = number, tensor.untyped_storage().data_ptr()
        self._began = [(earlier, new[1]) if begin == new else begin for begin in self._began]

    def _only_writer(self, tensor: Tensor, reader: int) -> int | None:
        """The call before `reader` that writes the tensor, if only these two access it."""
        users = self._users(tensor, self._life(tensor, reader))
        return users[0] if len(users) == 2 and users[1] == reader else None

    def _life(self, tensor: Tensor, user: int) -> range:
        """The calls in which the tensor that `user` accesses may be; none if others may refer to it."""
        address = tensor.untyped_storage().data_ptr()
        begins = [call for call, began in self._began if began == address]
        first = max((call for call in begins if call <= user), default=None)
        end = min((call for call in begins if call > user), default=None)
        if first is None or (end is None and not self._is_free(tensor)):
            return range(0)
        return range(first, len(self.calls) if end is None else end)

    def _users(self, tensor: Tensor, among: Iterable[int]) -> list[int]:
        """Which of these calls may read or write the storage of the tensor."""
        return [number for number in among if number not in self.gone and self._memory[number].has(tensor)]


class _Memory(NamedTuple):
    """The memory that a call may read or write: addresses of storages, and addresses among its numbers, in order."""

    is_unknown: bool
    storages: frozenset[int]
    numbers: list[int]

    def has(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor is among it."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        at = bisect_left(self.numbers, begin)
        inside = at < len(self.numbers) and self.numbers[at] < begin + storage.nbytes()
        return self.is_unknown or inside or begin in self.storages


def _memory_of(call: Call) -> _Memory:
    function: Any
    function, arguments = call
    own: Any = ()
    if isinstance(function, partial):
        function, own = function.func, (function.args, function.keywords)
    bound = getattr(function, "__self__", None)
    is_python = hasattr(function, "__code__") or hasattr(function, "__func__")
    if is_python and not isinstance(bound, Tensor) and not isinstance(function, torch._ops.OpOverload):
        is_ours = getattr(function, "__module__", "").startswith(PACKAGE) and bound is None
        if not is_ours or getattr(function, "__closure__", None):
            return _Memory(True, frozenset(), [])  # it may refer to tensors that are not among its arguments
    leaves = pytree.tree_leaves((bound, own, arguments))
    storages = frozenset(leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor))
    return _Memory(False, storages, sorted(leaf for leaf in leaves if isinstance(leaf, int)))


def _name(call: Call) -> str:
    return getattr(call[0], "__name__", "")


def _copied_to(call: Call) -> Tensor | None:
    """The result of a copy, None for other calls."""
    result = getattr(call[0], "__self__", None)
    return result if _name(call) == "copy_" and isinstance(result, Tensor) else None


def _has_rows_of(arguments: Any, tensor: Tensor) -> bool:
    """Whether a kernel in float32 reads or writes as many elements as the tensor has."""
    return arguments.dtype == cpu.DTYPE_CODES[torch.float32] and arguments.rows * arguments.columns == tensor.numel()


def _is_only(tensor: Tensor, field: str, arguments: Any) -> bool:
    """Whether of a kernel's arguments this one is the tensor, and no other one is in its memory."""
    numbers = {key: value for key, value in arguments._asdict().items() if isinstance(value, int)}
    inside = [key for key, value in numbers.items() if _Memory(False, frozenset(), [value]).has(tensor)]
    return inside == [field] and numbers[field] == tensor.data_ptr()


def _is_plain(term: Any, result: Tensor) -> bool:
    """Whether `term` is a tensor with the layout of `result`."""
    return isinstance(term, Tensor) and term.shape == result.shape and term.is_contiguous() and result.is_contiguous()
