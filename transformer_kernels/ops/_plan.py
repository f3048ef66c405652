"""Plans: the decisions made for the first call of a layout, cached for later calls of the same layout.

Whether a call is valid and which backend computes it depends on its layout alone: the dtypes, shapes, strides and
devices of its tensors, the values of its options, the requested backend and what autograd records. Only the
values of integer tensors, ids and classes, are checked in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from transformer_kernels.backends.dispatch import get_backend
from transformer_kernels.ops._dropout import draw_seed
from transformer_kernels.ops._kernels import Kernels

MAX_PLANS = 1024
"""Per operation; above this all are dropped. A plan occupies about a kilobyte."""

INDICES = (torch.int64, torch.int32)

dispatch_modes = torch._C._len_torch_dispatch_stack
functorch_is_active = torch._C._are_functorch_transforms_active
any_autocast = torch._C._is_any_autocast_enabled
is_jit_tracing = torch._C._is_tracing
_grad_enabled = torch.is_grad_enabled
_strided, _new = torch.strided, tuple.__new__


def layout(backend: str | None, values: Sequence[Any], of_primals: bool = False) -> Hashable:
    """The layout of a call with these arguments; None if it is not planned.

    Not planned are calls that a tracer or a transform changes, and those with a tensor of a subclass, without strides
    or with a negative bit, or with an option of another class. `of_primals`: the tensors are without their tangents,
    so forward-mode AD does not matter.
    """
    if dispatch_modes() or functorch_is_active() or is_jit_tracing():
        return None
    if forward_ad._current_level >= 0 and not of_primals:
        return None
    if backend is None:
        backend = get_backend()
    elif type(backend) is not str:
        return None
    key: list[Any] = [backend, torch.is_grad_enabled(), any_autocast() and _autocast()]
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


_is_nested = operator.attrgetter("is_nested")
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)  # not public: see `guard`


def guard(backend: str, values: Sequence[Any]) -> Callable[[str | None, Sequence[Any]], bool]:
    """Whether a call has the layout of this one, in a third of the time of `layout`; false if unknown.

    Dynamo's guards compare class, dispatch keys (transforms, autocast and tracing change them), dtype, device, sizes,
    strides and requires_grad of distinct tensors in one call. They abort on a nested tensor, and do not see a dispatch
    mode that ignores what torch.compile has made, as captures do after `compile`.
    """
    first: dict[int, int] = {}  # of each tensor, by id
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            first.setdefault(id(value), i)
    tensors = list(first.values())
    again = [(i, first[id(x)]) for i, x in enumerate(values) if isinstance(x, Tensor) and first[id(x)] != i]
    compared = [(i, value) for i, value in enumerate(values) if type(value) in (float, tuple)]
    others = [
        i for i, value in enumerate(values) if not isinstance(value, Tensor) and type(value) not in (float, tuple)
    ]
    if _Guards is None or not tensors or any(values[i].is_nested for i in tensors):
        return lambda backend, values: False
    given, options = items(tensors), items(others)
    check = _Guards(*given(values), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    kept, recorded, count = options(values), _grad_enabled(), len(values)

    def fits(asked: str | None, values: Sequence[Any]) -> bool:
        if (
            len(values) != count
            or (get_backend() if asked is None else asked) != backend
            or _grad_enabled() is not recorded
            or dispatch_modes()
            or forward_ad._current_level >= 0
            or any_autocast()  # whose dtype no key has
        ):
            return False
        if not all(map(operator.is_, options(values), kept)):
            return False
        for i, expected in compared:
            value = values[i]
            if value is expected or (type(value) is float and value == expected):
                continue
            if type(value) is not tuple or repr(value) != repr(expected):
                return False
        for i, other in again:
            if values[i] is not values[other]:
                return False
        found = given(values)
        try:
            return not any(map(_is_nested, found)) and check(*found)
        except AttributeError:  # no tensor
            return False

    return fits


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """The state of autocast on the devices whose calls it changes."""
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))


class Record:
    """Rebuilds a call, or a record in one, from the arguments."""

    __slots__ = ("_fields", "_kind", "_positions", "_records", "_seed")

    def __init__(self, record: Any) -> None:
        self._kind, self._fields = type(record), list(record)
        self._seed: int | None = None
        self._positions: list[tuple[int, int, Callable[[Tensor], Tensor] | None]] = []
        self._records: list[tuple[int, Record]] = []

    def make(self, values: tuple[Any, ...]) -> Any:
        """The record of these arguments."""
        fields = self._fields.copy()
        for position, index, view in self._positions:
            fields[position] = values[index] if view is None else view(values[index])
        for position, record in self._records:
            fields[position] = record.make(values)
        if self._seed is not None:
            fields[self._seed] = draw_seed(fields[0].device)
        return _new(self._kind, fields)

    def find(self, given: dict[int, tuple[int, Tensor]]) -> bool:
        """Find the record's tensors among the arguments, by id, and views of them; whether all are there."""
        for position, value in enumerate(self._fields):
            if isinstance(value, Tensor):
                found = given.get(id(value))
                if found is not None:
                    self._positions.append((position, found[0], None))
                elif self._kind._fields[position] == "seed":
                    self._seed = position
                elif (viewed := _viewed(value, given)) is not None:
                    self._positions.append((position, *viewed))
                else:  # it was copied
                    return False
                self._fields[position] = None
            elif isinstance(value, tuple) and hasattr(value, "_fields"):
                record = Record(value)
                if not record.find(given):
                    return False
                if record._positions:
                    self._records.append((position, record))
                    self._fields[position] = None
        return True


class ByPyTorch:
    """The plan of calls that are PyTorch's own function of the arguments."""

    def __init__(self, native: Callable[..., Any], public: int) -> None:
        self.native, self.public = native, public
        self.fits: Callable[[str | None, Sequence[Any]], bool]


class Plan:
    """The kernels for calls of one layout, and the tensors that autograd saves.

    Attributes:
        kernels: of the backend.
        forward: its variant for calls that return one output: `forward_recorded`, `forward_alone`, or all: `forward`.
        ahead, below, composed: its `forward_with_gradient`, `below` and `composed`, or None.
        recorded: whether autograd records the call.
        public, outputs: the number of results that are returned, and the function that selects them.
        fits: whether arguments have this layout (`guard`).
        check: the check that runs in every call, or None.
        call: the arguments -> the validated call, once the plan is cached.
        inputs: the call -> its differentiable tensors, which autograd records.
        wanted: which of the differentiable fields' gradients are wanted.
        returned: (*gradients, None) -> the results of backward: None for plan and call, and the gradient of each input.
    """

    native = None

    def __init__(self, operation: Any, call: Any, kernels: Kernels, recorded: bool, public: int) -> None:
        self.kernels = kernels
        self.forward = kernels.forward
        if public == 1:
            self.forward = kernels.forward_recorded if recorded else kernels.forward_alone
        self.ahead, self.below, self.composed = kernels.forward_with_gradient, kernels.below, kernels.composed
        self.fits: Callable[[str | None, Sequence[Any]], bool]
        self.operation, self.recorded, self.check = operation, recorded, operation.call.check_when_run
        self.public, self.outputs = public, operator.itemgetter(0 if public == 1 else slice(public))
        self.call: Callable[[tuple[Any, ...]], Any]
        if recorded:
            self._find_saved(operation, call)
            given = operation.inputs(call)
            present = [i for i, value in enumerate(given) if value is not None]
            self.inputs = attributes(call, [operation.names[i] for i in present])
            self.wanted = tuple(value is not None and value.requires_grad for value in given)
            self.returned = items([-1, -1, *(i if self.wanted[i] else -1 for i in present)])

    def _find_saved(self, operation: Any, call: Any) -> None:
        """Find the fields of the call that are saved; the others are constants of the layout, or dropped."""
        self._flat = any(isinstance(part, Tensor) for value in call if isinstance(value, tuple) for part in value)
        values = operation.flat(call) if self._flat else call
        dropped = operation.dropped_in(call)
        described = {operation.fields.index(field) for field in call.described()}
        saved = [i for i, value in enumerate(values) if isinstance(value, Tensor) and i not in dropped]
        self._described = [position for position, i in enumerate(saved) if i in described]
        constants = [i for i, value in enumerate(values) if not isinstance(value, Tensor)]
        self._constants = None, *(values[i] for i in constants)
        position = {i: index for index, i in enumerate((*constants, *saved), start=1)}
        self._saved, self._record = items(saved), type(call)
        self._fields = items([position.get(i, 0) for i in range(len(values))])
        results = {i: index for index, i in enumerate(operation.kept_results, start=len(position) + 1)}
        self._results = items([results.get(i, 0) for i in range(operation.results)])

    def keep(self, ctx: Any, call: Any, results: Any, *more: Tensor) -> None:
        """Save the tensors that `kept` restores on an autograd context, followed by `more`."""
        operation = self.operation
        tensors = self._saved(operation.flat(call) if self._flat else call)
        if self._described:  # outside autograd's check of writes
            tensors = tuple(x.data if i in self._described else x for i, x in enumerate(tensors))
        ctx.save_for_backward(*tensors, *operation.saved_results(results), *more)
        if self.public > 1:
            ctx.set_materialize_grads(False)

    def kept(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        """The call and the results from their saved fields, None in the other fields."""
        values, operation = (*self._constants, *tensors), self.operation
        fields, results = self._fields(values), self._results(values)
        call = operation.nested(fields) if self._flat else _new(self._record, fields)
        return call, results[0] if operation.result is None else _new(operation.result, results)


Plans = dict[Hashable, Any]
"""Cached plans of an operation, by (number of outputs, layout of the arguments), or by the shape of the first
tensor for the last such plan, by (number of outputs, Call, layout of a validated call), and, for the registered
operators, by (Kernels, layout). None if a call cannot be rebuilt from unchanged arguments."""


def apart(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a view in place of a repeated tensor, so that each field of the call has its own object."""
    seen: set[int] = set()
    found = []
    for value in values:
        if isinstance(value, Tensor):
            value = value.view_as(value) if id(value) in seen else value
            seen.add(id(value))
        found.append(value)
    return tuple(found)


def remember(plans: Plans, layout: Hashable, plan: Plan, values: tuple[Any, ...], call: Any) -> None:
    """Cache the plan of the call with these arguments, in which no tensor occurs twice."""
    tensors = [(index, value) for index, value in enumerate(values) if isinstance(value, Tensor)]
    if not any(tensor.dtype in INDICES for _, tensor in tensors):
        plan.check = None
    given = {id(tensor): (index, tensor) for index, tensor in tensors}
    record = Record(call)
    plan.call = record.make
    keep(plans, layout, plan if record.find(given) else None)


def keep(plans: dict[Any, Any], layout: Hashable, plan: Any) -> None:
    """Keep a plan, or what else is known of calls of a layout, and at most MAX_PLANS of them."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[layout] = plan


def items(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """The function that picks the items at these indices from a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    if not indices:
        return operator.itemgetter(slice(0, 0))
    index = indices[0]
    return operator.itemgetter(slice(index, index + 1 or None))


def attributes(record: Any, names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns these fields of such a record, at least one, as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    index = record._fields.index(names[0])
    return operator.itemgetter(slice(index, index + 1))


def _viewed(value: Tensor, given: dict[int, tuple[int, Tensor]]) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """The index of the argument that a tensor of a call is a view of, and how it is viewed; None if there is none."""
    found = [(index, tensor) for index, tensor in given.values() if tensor.data_ptr() == value.data_ptr()]
    if len(found) != 1 or found[0][1].dtype is not value.dtype or not value.numel():
        return None
    index, tensor = found[0]
    if not tensor.requires_grad:
        return index, operator.methodcaller("as_strided", tuple(value.shape), value.stride())
    leading = value.shape == (1, *tensor.shape) and value.stride()[1:] == tensor.stride()
    return (index, operator.methodcaller("unsqueeze", 0)) if leading else None
