"""Operation: the three routes of a call, written once.

A call without gradients goes straight to the backend (cheapest), one with gradients through an autograd.Function, and
one that is being traced (torch.compile, torch.jit.trace, fake or meta tensors, a dispatch mode) through an operator
registered with torch.library. The last costs several times the others, so it is taken only where it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops import _crossovers, _plan
from transformer_kernels.ops._plan import any_autocast, dispatch_modes, functorch_is_active, is_jit_tracing, items

Grads = tuple[Any, ...]
"""The incoming gradients of a backend's backward; None in one that did not come in, where there are several."""

Wanted = tuple[bool, ...]
"""Which of the differentiable fields' gradients are wanted."""

LIBRARY = torch.library.Library("transformer_kernels", "FRAGMENT")


SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    str: "str",
    str | None: "str?",
    torch.dtype: "ScalarType",
    list[bool]: "bool[]",
}
"""What a field of a call may be, and how torch.library spells it."""


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record a call with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(x: Tensor) -> bool:
    """Whether this call must be seen by a tracer: then it goes through the registered operator."""
    return is_compiling() or x.is_meta or dispatch_modes() > 0 or isinstance(x, FakeTensor) or is_jit_tracing()


def refuse_transforms(op: str, *tensors: Tensor | None) -> None:
    """Raise under vmap, functorch's grad and forward-mode AD, which these operations do not have."""
    if functorch_is_active():
        raise RuntimeError(f"{op}: vmap and the transforms of torch.func are not supported; use python_ref.ops.{op}")
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise RuntimeError(f"{op}: forward-mode AD is not supported; use python_ref.ops.{op}")


class Operation:
    """One operation: what its call and its results are, what backward keeps of them, and the routes to a backend.

    A backend is a module with `forward(call) -> result` and `backward(call, result, grads, wanted) -> gradients`. For
    backward, `call` and `result` hold None in the fields that are not kept; `grads` are those of the public outputs,
    and `wanted` says which of the differentiable fields' gradients are.

    Args:
        name: that of the public function.
        call: a NamedTuple of the checked arguments, its fields of the types in SCHEMA_TYPES; the first is a tensor. A
            field may be such a NamedTuple itself: its fields are then named "record.field" below.
        prepare: the public function's arguments, without `backend` -> the validated call.
        options: the names, separated by spaces, by which `prepare` takes the last arguments of `run`.
        fake: call -> the results as empty tensors (None for an absent one), which is what a tracer sees.
        differentiable: the fields that have a gradient.
        result: a NamedTuple of what forward returns, or None where that is one tensor.
        public: how many of the results, the first ones, are the caller's.
        all_outputs_if: the option of the public function without which only the first output is returned; None: always
            all of them.
        dropped: tensor fields of the call that backward does without,
        dropped_when: call -> whether it does so in this call; in every call unless given.
        described: tensor fields whose shape and dtype are all that backward needs: they may be written to before it.
        kept: results that backward needs, or () ; "" stands for the only one. The first has the shape of the first
            output wherever there are several outputs.
        like: for a dropped differentiable field, the kept result that its gradient is shaped as.
        sizes: the fields that make the call empty when one of them has no element; the first field unless given.
        composed: (module, call, backend, whether autograd records it) -> the output where other operators answer, which
            autograd then sees, else None.
        by_pytorch: the backends in which it is PyTorch's operator: the vendor's library computes it best.
        kernels: the operation whose backend files answer, and `adapt`: from such a module to one of this operation.
        ahead: a backend may have `forward_with_gradient(call) -> (result, the gradient of a loss) or None`,
            `scale_gradient(gradient, dloss)`, which multiplies it in place, and, where it is the gradient of an
            intermediate result, `below(call, gradient, wanted)`, which returns the gradients of the call's tensors.
        second_order: (call, result, grads, wanted) -> gradients, in differentiable PyTorch. Without it a gradient that
            is to be differentiated again is an error.
        layout: what backends want of an incoming gradient.
        empty_gradients: call -> empty tensors laid out as the gradients are; contiguous ones unless given.
        native: call -> PyTorch's own function that means the same, as `_crossovers.Native`, or None.
        check_when_run: call -> None, what a traced call could not check because its tensors had no values.
    """

    def __init__(
        self,
        name: str,
        call: type[Any],
        *,
        prepare: Callable[..., Any],
        options: str = "",
        fake: Callable[[Any], Any],
        differentiable: tuple[str, ...],
        result: type[Any] | None = None,
        public: int = 1,
        all_outputs_if: str | None = None,
        dropped: tuple[str, ...] = (),
        dropped_when: Callable[[Any], bool] | None = None,
        described: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
        like: Mapping[str, str] | None = None,
        sizes: tuple[str, ...] = (),
        composed: Callable[[Any, Any, str | None, bool], Tensor | None] | None = None,
        by_pytorch: tuple[str, ...] = (),
        kernels: str | None = None,
        adapt: Callable[[Any], Any] | None = None,
        ahead: bool = False,
        second_order: Callable[..., tuple[Tensor | None, ...]] | None = None,
        layout: Callable[[Tensor], Tensor] = Tensor.contiguous,
        empty_gradients: Callable[[Any], tuple[Tensor | None, ...]] | None = None,
        native: Callable[[Any], _crossovers.Native | None] | None = None,
        check_when_run: Callable[[Any], None] | None = None,
    ) -> None:
        self.name, self.call, self.result, self.public = name, call, result, public
        self._all_outputs_if, self._other_grads = all_outputs_if, (None,) * (public - 1)
        self.kernels, self.adapt, self.second_order = kernels or name, adapt, second_order
        self.folder, self.prepare, self._options = f"{__package__}.{self.kernels}", prepare, options.split()
        self.composed, self.by_pytorch, self.ahead, self.native = composed, by_pytorch, ahead, native
        self.fake, self.layout, self.check_when_run = fake, layout, check_when_run
        self.empty_gradients = empty_gradients or self._empty_gradients
        hints = get_type_hints(call)
        self._parts = tuple(_parts(hints.values()))
        self._has_records = any(record for record, _ in self._parts)
        types = dict(_schema_types(call))
        fields = tuple(types)
        results: tuple[str, ...] = ("",) if result is None else result._fields
        tensors = [field for field in fields if types[field].startswith("Tensor")]
        self.fields, self.differentiable = fields, tuple(fields.index(field) for field in differentiable)
        self.names, self.inputs = differentiable, _plan.attributes(call, differentiable)
        self._sizes = operator.attrgetter(*sizes) if len(sizes) > 1 else operator.itemgetter(slice(1))
        always = dropped if dropped_when is None else ()
        self._kept_call = tuple(fields.index(field) for field in tensors if field not in always)
        self._dropped = frozenset(fields.index(field) for field in dropped)
        self.dropped_when = dropped_when
        self.described = frozenset(fields.index(field) for field in described)
        self.results, self.kept_results = len(results), tuple(results.index(field) for field in kept)
        self.saved_results = items(self.kept_results)
        self._numbers = tuple(i for i, field in enumerate(fields) if field not in tensors)
        saved = {field: index for index, field in enumerate((*self._kept_call, *self._numbers))}
        self._saved_tensors, self._saved_numbers = items(self._kept_call), items(self._numbers)
        self._restored = items([saved.get(i, -1) for i in range(len(fields))])
        found = {result: index for index, result in enumerate(self.kept_results)}
        self._restored_results = items([found.get(i, -1) for i in range(len(results))])
        self._like = {fields.index(field): results.index(other) for field, other in (like or {}).items()}
        self.plans: _plan.Plans = {}  # by the layout of the arguments
        self.calls: _plan.Plans = {}  # by that of the call
        self.recent: _plan.Plans = {}  # the last plan of calls whose first tensor has a shape
        cpu.dependents.append(self.forget_plans)
        dispatch.OPERATIONS[name] = self
        self._register(types)

    def forget_plans(self) -> None:
        """Validate and dispatch the next call of each layout again."""
        for plans in (self.plans, self.calls, self.recent):
            plans.clear()

    def run(self, backend: str | None, *arguments: Any, **options: Any) -> Any:
        """The public outputs for the arguments of `prepare`: one tensor or a tuple of them."""
        if is_compiling():
            return self(self.prepared(arguments, options), backend)
        values = (*arguments, *options.values()) if options else arguments
        try:
            plan = self.recent.get(arguments[0].shape)
        except (AttributeError, RuntimeError):  # no tensor, or a nested one
            plan = None
        if plan is None or not plan.fits(backend, values):
            layout = _plan.layout(backend, values)
            plan = self.plans.get(layout)
            if plan is None:
                return self._first(backend, layout, arguments, options)
            _plan.keep(self.recent, arguments[0].shape, plan)
        if plan.native is not None:
            return plan.native(*values)
        call = plan.call(values)
        if plan.check is not None:
            plan.check(call)
        if plan.composed is not None:
            return self.computed(plan, call, backend)
        if plan.recorded:  # as in `computed`, without its call
            return _recorded(plan, call, *plan.inputs(call))
        outputs = plan.forward(call)
        return outputs if self.result is None else plan.outputs(outputs)

    def _first(
        self, backend: str | None, layout: Hashable, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """The public outputs of a call without a plan, which is made if its layout is new."""
        given = values = (*arguments, *options.values())
        if layout is not None:
            values = _plan.apart(given)
            arguments, options = values[: len(arguments)], dict(zip(options, values[len(arguments) :], strict=True))
        call, public = self.prepared(arguments, options), self._public_of(arguments)
        if layout is None or layout in self.plans or is_traced(call[0]):
            return self(call, backend, public)
        plan: Any = self._by_pytorch(call, backend, public, values)
        if plan is not None:
            plan.fits = _plan.guard(layout[0], given)  # type: ignore[index]
            _plan.keep(self.plans, layout, plan)
            return plan.native(*values)
        plan = self.planned(call, backend, public)
        plan.fits = _plan.guard(layout[0], given)  # type: ignore[index]
        _plan.remember(self.plans, layout, plan, values, call)
        return self.computed(plan, call, backend)

    def _by_pytorch(
        self, call: Any, backend: str | None, public: int, values: tuple[Any, ...]
    ) -> _plan.ByPyTorch | None:
        """The plan of calls that "auto" leaves to PyTorch's own function; None for all others."""
        if self.native is None or dispatch.requested(backend) != "auto":
            return None
        if self._all_outputs_if is not None and public > 1:
            return None
        function = _crossovers.native(self.native(call), call, values)
        return None if function is None else _plan.ByPyTorch(function)

    def _public_of(self, arguments: tuple[Any, ...]) -> int:
        """How many outputs a call of the public function returns."""
        name = self._all_outputs_if
        return self.public if name is None or arguments[self._options.index(name) - len(self._options)] else 1

    def prepared(self, arguments: tuple[Any, ...], options: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The validated call of the arguments of `run`."""
        if not self._options:
            return self.prepare(*arguments, **options)
        first = len(arguments) - len(self._options)
        return self.prepare(*arguments[:first], **dict(zip(self._options, arguments[first:], strict=True)))

    def __call__(self, call: Any, backend: str | None, public: int | None = None) -> Any:
        """The public outputs of a validated call, or the first ones, by the cheapest route that it allows."""
        if is_compiling():  # Dynamo would guard every entry of `calls`
            return self._traced(call, backend)
        public = self.public if public is None else public
        layout = _plan.layout(backend, self.flat(call))
        plan = self.calls.get((public, layout))
        if plan is None:
            if is_traced(call[0]):
                return self._traced(call, backend)
            plan = self.planned(call, backend, public)
            if layout is not None:
                _plan.keep(self.calls, (public, layout), plan)
        return self.computed(plan, call, backend)

    def planned(self, call: Any, backend: str | None, public: int) -> _plan.Plan:
        """What computes this call and those of its layout, of which `public` outputs are returned."""
        module, recorded = dispatch.select(self, backend, call), needs_grad(*self.inputs(call))
        return _plan.Plan(self, call, module, recorded, public)

    def computed(self, plan: _plan.Plan, call: Any, backend: str | None) -> Any:
        """The public outputs, by other operators, through autograd or from the backend."""
        if plan.composed is not None:
            output = plan.composed(plan.module, call, backend, plan.recorded)
            if output is not None:
                return output
        if plan.recorded:
            return _recorded(plan, call, *plan.inputs(call))
        outputs = plan.forward(call)
        return outputs if self.result is None else plan.outputs(outputs)

    def _traced(self, call: Any, backend: str | None) -> Any:
        """By the registered operator, or by those that it is composed of."""
        if self.composed is not None and not is_compiling():
            recorded = needs_grad(*self.inputs(call))
            output = self.composed(dispatch.select(self, backend, call), call, backend, recorded)
            if output is not None:
                return output
        outputs = self._registered(*self.flat(call), backend)
        return outputs if self.result is None else self._outputs(outputs)

    def is_empty(self, call: Any) -> bool:
        """Whether there is nothing to launch; such calls run in PyTorch."""
        for tensor in self._sizes(call):  # noqa: SIM110 - any() of a generator takes as long as the rest of dispatch
            if not tensor.numel():
                return True
        return False

    def crossover(self, call: Any) -> str | None:
        """Which calls `patch` and `accelerate` leave to PyTorch, or None."""
        kind = "gelu_tanh" if getattr(call, "kind", None) == "gelu_tanh" else self.name
        return _crossovers.described(kind, call[0])

    def flat(self, call: Any) -> Any:
        """The values of `fields`: those of the call, with those of a record that it holds in the record's position."""
        if not self._has_records:
            return call
        values: list[Any] = []
        for value, (record, _) in zip(call, self._parts, strict=True):
            if record is None:
                values.append(value)
            else:
                values += value
        return values

    def nested(self, values: Sequence[Any]) -> Any:
        """The call of the values of `fields`."""
        if not self._has_records:
            return self.call(*values)
        parts = [values[where] if record is None else record(*values[where]) for record, where in self._parts]
        return self.call(*parts)

    def _outputs(self, results: Any) -> Any:
        return results[0] if self.public == 1 else results[: self.public]

    # What is kept between forward and backward

    def dropped_in(self, call: Any) -> frozenset[int]:
        """The fields that backward of this call does without."""
        return self._dropped if self.dropped_when is None or self.dropped_when(call) else frozenset()

    def kept(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, Any]:
        """The call and the results from what the operator saved of them, None in the other fields."""
        inputs = len(self._kept_call)
        call = self.nested(self._restored((*tensors[:inputs], *numbers, None)))
        results = self._restored_results((*tensors[inputs:], None))
        return call, results[0] if self.result is None else self.result(*results)

    def incoming(self, results: Any, grads: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs in the layout of the kernels; zeros for an absent one of the first output."""
        first = grads[0]
        if first is None:
            first = torch.zeros_like(results[self.kept_results[0]])
        elif first.is_neg():
            first = first.resolve_neg()
        first = self.layout(first)
        if len(grads) == 1:
            return first, *self._other_grads
        return first, *[None if grad is None else grad.resolve_neg().contiguous() for grad in grads[1:]]

    def _placed(self, gradients: Iterable[Any], wanted: tuple[bool, ...]) -> list[Any]:
        """The gradients at the positions of their fields."""
        placed: list[Any] = [None] * len(self.fields)
        for i, gradient, want in zip(self.differentiable, gradients, wanted, strict=True):
            placed[i] = gradient if want else None
        return placed

    # The registered operator

    def _register(self, types: Mapping[str, str]) -> None:
        name = self.name
        returned = ", ".join(["Tensor"] * self.results)
        fields = tuple(field.rpartition(".")[2] for field in types)
        spelled = tuple(types.values())
        signature = ", ".join(f"{kind} {field}" for kind, field in zip(spelled, fields, strict=True))
        self._registered = _define(
            f"{name}({signature}, str? backend) -> {f'({returned})' if self.result else returned}",
            self._run,
            self._fake,
        )
        kept = [f"{'Tensor?' if i in self._dropped else spelled[i]} {fields[i]}" for i in self._kept_call]
        arguments = [f"Tensor? grad{i}" for i in range(self.public)] + kept
        arguments += [f"Tensor result{i}" for i in self.kept_results]
        arguments += [f"{spelled[i]} {fields[i]}" for i in self._numbers]
        gradients = ", ".join(["Tensor"] * len(self.differentiable))
        self._registered_backward = _define(
            f"{name}_backward({', '.join(arguments)}, bool[] gradients, str? backend)"
            f" -> {f'({gradients})' if len(self.differentiable) > 1 else gradients}",
            self.run_backward,
            self._fake_backward,
        )
        torch.library.register_autograd(
            f"transformer_kernels::{name}", self._gradient, setup_context=self._setup_context, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"transformer_kernels::{name}_backward", self._refuse_second_order, setup_context=_nothing, lib=LIBRARY
        )

    def _run(self, *arguments: Any) -> Any:
        if self.check_when_run is not None:
            self.check_when_run(self.nested(arguments[:-1]))
        outputs = self.compute(*arguments)
        return outputs if self.result is None else _unaliased(outputs)

    def compute(self, *arguments: Any) -> Any:
        """What the operator returns for a call and a backend, unchecked; two outputs may be one tensor."""
        *values, backend = arguments
        call = self.nested(values)
        outputs = dispatch.select(self, backend, call).forward(call)
        if self.result is None:
            return outputs
        if any(each is None for each in outputs):
            pairs = zip(outputs, self._fake(*arguments), strict=True)
            outputs = [torch.zeros_like(like) if each is None else each for each, like in pairs]
        return tuple(outputs)

    def _fake(self, *arguments: Any) -> Any:
        call = self.nested(arguments[:-1])
        outputs = self.fake(call)
        if self.result is None:
            return outputs
        return tuple(call[0].new_empty(0) if each is None else each for each in outputs)

    def _unpacked(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...], tuple[bool, ...], Any]:
        """The kept call and results, the incoming gradients, what is wanted and the backend."""
        *values, wanted, backend = arguments
        grads, values = tuple(values[: self.public]), values[self.public :]
        tensors = len(self._kept_call) + len(self.kept_results)
        call, results = self.kept(values[:tensors], values[tensors:])
        return call, results, self.incoming(results, grads), tuple(wanted), backend

    def run_backward(self, *arguments: Any) -> Any:
        """What its gradient's operator returns."""
        call, results, grads, wanted, backend = self._unpacked(arguments)
        call = self._with_shapes(call, results)
        gradients = dispatch.select(self, backend, call).backward(call, results, grads, wanted)
        return self._returned(_unaliased(_absent_as_empty(gradients, wanted, grads[0])))

    def _fake_backward(self, *arguments: Any) -> Any:
        call, results, grads, wanted, _ = self._unpacked(arguments)
        gradients = self.empty_gradients(self._with_shapes(call, results))
        return self._returned(_absent_as_empty(gradients, wanted, grads[0]))

    def _with_shapes(self, call: Any, results: Any) -> Any:
        """The kept call, with a kept result of its shape for each field that was dropped for one."""
        if not self._like:
            return call
        values = list(self.flat(call))
        for i, index in self._like.items():
            if values[i] is None:
                values[i] = results if self.result is None else results[index]
        return self.nested(values)

    def _empty_gradients(self, call: Any) -> tuple[Tensor | None, ...]:
        inputs, contiguous = self.inputs(call), torch.contiguous_format
        return tuple(None if each is None else torch.empty_like(each, memory_format=contiguous) for each in inputs)

    def _returned(self, gradients: tuple[Tensor, ...]) -> Any:
        return gradients if len(gradients) > 1 else gradients[0]

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *call, ctx.backend = inputs
        ctx.numbers, tensors = self._saved_numbers(call), self._saved_tensors(call)
        dropped = self.dropped_in(self.nested(call))
        saved = [None if i in dropped else each for i, each in zip(self._kept_call, tensors, strict=True)]
        ctx.save_for_backward(*saved, *self.saved_results(output if self.result else (output,)))
        ctx.set_materialize_grads(False)  # else there would be one for each result, the public ones and the others
        if self.result is not None:
            ctx.mark_non_differentiable(*output[self.public :])

    def _gradient(self, ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads[: self.public]):
            return (None,) * (len(self.fields) + 1)
        wanted = [ctx.needs_input_grad[i] for i in self.differentiable]
        arguments = (*grads[: self.public], *ctx.saved_tensors, *ctx.numbers)
        gradients = self._registered_backward(*arguments, wanted, ctx.backend)
        gradients = gradients if len(wanted) > 1 else (gradients,)
        return *self._placed(gradients, tuple(wanted)), None

    def _refuse_second_order(self, *_: Any) -> Any:
        raise RuntimeError(f"{self.name}: double backward is not supported; use python_ref.ops.{self.name}")


class _Recorded(torch.autograd.Function):
    """A call that autograd records: forward, and the backend's backward."""

    @staticmethod
    def forward(ctx: Any, plan: _plan.Plan, call: Any, *inputs: Tensor) -> Any:
        """`inputs` are the call's differentiable tensors once more: autograd sees those that stand alone."""
        operation, ctx.plan = plan.operation, plan
        made = None if plan.ahead is None else plan.ahead(call)
        ctx.made_ahead = made is not None
        results = plan.forward(call) if made is None else made[0]
        plan.keep(ctx, call, results if operation.result else (results,), *(made or ())[1:])
        return results if operation.result is None else plan.outputs(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: _plan.Plan = ctx.plan
        operation, tensors = plan.operation, ctx.saved_tensors
        if torch.is_grad_enabled():  # under create_graph
            if plan.second_order is None:
                return None, None, *_OnlyOnce.apply(plan, *grads, *tensors)
            call, results = plan.kept(tensors)
            gradients = plan.second_order(call, results, operation.incoming(results, grads), plan.wanted)
        elif ctx.made_ahead:
            ctx.made_ahead = False  # it is the caller's from here on, to write to: a second backward pass makes its own
            gradients = (tensors[-1].data,)
            plan.module.scale_gradient(*gradients, *grads)
            if plan.below is not None:
                gradients = plan.below(plan.kept(tensors)[0], *gradients, plan.wanted)
        else:
            call, results = plan.kept(tensors)
            gradients = plan.module.backward(call, results, operation.incoming(results, grads), plan.wanted)
        return plan.returned((*gradients, None))


_recorded = super(torch.autograd.Function, _Recorded).apply
"""`_Recorded.apply` without its search for transforms, under which `prepare` raises: that takes a microsecond."""


class _OnlyOnce(torch.autograd.Function):
    """A backward pass that stands in the graph between its gradients and all that they depend on, and refuses there."""

    @staticmethod
    def forward(ctx: Any, plan: _plan.Plan, *given: Any) -> Any:
        operation = ctx.operation = plan.operation
        grads, tensors = given[: plan.public], given[plan.public :]
        call, results = plan.kept(tensors)
        gradients = plan.module.backward(call, results, operation.incoming(results, grads), plan.wanted)
        return plan.returned((*gradients, None))[2:]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        ctx.operation._refuse_second_order()


def differentiated(
    outputs: Tensor, inputs: Iterable[Tensor | None], grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs`, computed in PyTorch from `inputs`, that are wanted: differentiable once more."""
    inputs = list(inputs)
    asked = [each for each, want in zip(inputs, wanted, strict=True) if want and each is not None]
    found = iter(torch.autograd.grad(outputs, asked, grad.to(outputs.dtype), create_graph=True))
    return tuple(next(found) if want and each is not None else None for each, want in zip(inputs, wanted, strict=True))


def _absent_as_empty(gradients: Iterable[Tensor | None], wanted: Wanted, like: Tensor) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: an empty tensor stands for one that is absent or not wanted."""
    pairs = zip(gradients, wanted, strict=True)
    return tuple(grad if want and grad is not None else like.new_empty(0) for grad, want in pairs)


def _schema_types(call: type[Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Each field of a call and how torch.library spells its type; those of a nested record behind its name."""
    for field, hint in get_type_hints(call).items():
        if hasattr(hint, "_fields"):
            yield from _schema_types(hint, f"{field}.")
        else:
            yield f"{prefix}{field}", SCHEMA_TYPES[hint]


def _parts(hints: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """For each field of a call None and its index among the flat values, or its record and a slice of them."""
    start = 0
    for hint in hints:
        if hasattr(hint, "_fields"):
            yield hint, slice(start, start := start + len(hint._fields))
        else:
            yield None, start
            start += 1


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A context for an operator whose gradient is always an error."""


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `transformer_kernels::<schema>` for every device and return the callable operator."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"transformer_kernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.transformer_kernels, name).default


def _unaliased(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
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
    if not any_autocast():
        return None
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on x's device."""
    return torch.autocast(x.device.type, enabled=False) if any_autocast() else nullcontext()


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their dtypes: what autocast does to operands that must agree."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors)
