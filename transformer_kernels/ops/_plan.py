"""Plans: what the first call of a layout found out, reused by the calls after it that have the same layout.

Whether a call is valid and which backend computes it depends on its layout alone: the dtypes, shapes, strides and
devices of its tensors, the values of its options, the backend that is asked for and what autograd records. Only the
values of integer tensors, ids and classes, are checked in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from transformer_kernels.backends.dispatch import get_backend
from transformer_kernels.ops._dropout import draw_seed

MOST_PLANS = 1024
"""Of one operation; then all are dropped. A plan takes about a kilobyte."""

INDICES = (torch.int64, torch.int32)

dispatch_modes = torch._C._len_torch_dispatch_stack
functorch_is_active = torch._C._are_functorch_transforms_active
any_autocast = torch._C._is_any_autocast_enabled
is_jit_tracing = torch._C._is_tracing
_strided, _new = torch.strided, tuple.__new__


def layout(backend: str | None, values: tuple[Any, ...]) -> Hashable:
    """The layout of a call with these arguments; None if it is not planned.

    Not planned are calls that a tracer, a transform or autocast changes, and those with a tensor of a subclass, without
    strides or with a negative bit, or with an option of another class.
    """
    if dispatch_modes() or functorch_is_active() or forward_ad._current_level >= 0 or is_jit_tracing():
        return None
    if any_autocast():
        return None
    if backend is None:
        backend = get_backend()
    elif type(backend) is not str:
        return None
    key: list[Any] = [backend, torch.is_grad_enabled()]
    try:
        for value in values:
            if value is None or value is False or value is True:
                key.append(value)
                continue
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if value.layout is not _strided or value.is_neg():
                    return None
                strides = value.is_contiguous() or value.stride()
                key += (value.dtype, value.shape, strides, value.is_cpu or value.device, value.requires_grad)
            elif kind is float or kind is int or kind is str:
                key += (kind, value)  # 1, 1.0 and True are equal
            elif kind is tuple:
                key.append(repr(value))
            else:
                return None
    except RuntimeError:  # a nested tensor has no shape
        return None
    return tuple(key)


class Plan:
    """What computes the calls of one layout, and how the call is made of their arguments.

    Attributes:
        module: the backend's `forward` and `backward`.
        forward: its `forward`, or `forward_alone`, which has no backward, where it has that.
        recorded: whether autograd records the call.
        check: what is checked in every call, or None.
    """

    __slots__ = ("_fields", "_nested", "_places", "_record", "_seed", "check", "forward", "module", "recorded")

    def __init__(
        self, call: Any, module: Any = None, recorded: bool = False, check: Callable[[Any], None] | None = None
    ) -> None:
        self.module, self.recorded, self.check = module, recorded, check
        self.forward: Any = getattr(module, "forward_alone", None) or getattr(module, "forward", None)
        self._record, self._fields = type(call), list(call)
        self._seed: int | None = None
        self._places: list[tuple[int, int, bool]] = []
        self._nested: list[tuple[int, Plan]] = []

    def call(self, values: tuple[Any, ...]) -> Any:
        """The validated call of these arguments."""
        fields = self._fields.copy()
        for place, index, leading in self._places:
            fields[place] = values[index].unsqueeze(0) if leading else values[index]
        for place, plan in self._nested:
            fields[place] = plan.call(values)
        if self._seed is not None:
            fields[self._seed] = draw_seed(fields[0].device)
        return _new(self._record, fields)

    def find(self, given: dict[int, tuple[int, Tensor]]) -> bool:
        """Find the tensors of the call among the arguments, by id; whether all are there, but for a leading axis."""
        for place, value in enumerate(self._fields):
            if isinstance(value, Tensor):
                found = given.get(id(value))
                if found is None and self._record._fields[place] == "seed":
                    self._seed = place
                else:
                    index = _unsqueezed(value, given) if found is None else found[0]
                    if index is None:  # it was copied
                        return False
                    self._places.append((place, index, found is None))
                self._fields[place] = None
            elif isinstance(value, tuple) and hasattr(value, "_fields"):
                plan = Plan(value)
                if not plan.find(given):
                    return False
                if plan._places:
                    self._nested.append((place, plan))
                    self._fields[place] = None
        return True


Plans = dict[Hashable, Plan | None]
"""By layout; None where calls are not made of their arguments as they are."""


def remember(plans: Plans, layout: Hashable, values: tuple[Any, ...], plan: Plan) -> None:
    """Keep the plan of the call that was made of these arguments."""
    tensors = [(index, each) for index, each in enumerate(values) if isinstance(each, Tensor)]
    if not any(each.dtype in INDICES for _, each in tensors):
        plan.check = None
    given = {id(each): (index, each) for index, each in tensors}
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[layout] = plan if len(given) == len(tensors) and plan.find(given) else None  # none of them is given twice


def _unsqueezed(value: Tensor, given: dict[int, tuple[int, Tensor]]) -> int | None:
    """The index of the argument that a tensor of a call is, seen with a leading axis; None if there is none."""
    for index, each in given.values():
        if value.data_ptr() == each.data_ptr() and value.shape == (1, *each.shape) and value.dtype is each.dtype:
            return index if value.stride()[1:] == each.stride() else None
    return None
