"""Operation: the three routes of a call, written once.

A call without gradients goes straight to the backend (cheapest), one with gradients through an autograd.Function, and
one that is being traced (torch.compile, torch.jit.trace, fake or meta tensors, a dispatch mode) through an operator
registered with torch.library. The last costs several times the others, so it is taken only where it is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling

from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.ops import _crossovers, _plan
from transformer_kernels.ops._batching import by_kernels
from transformer_kernels.ops._derivatives import (
    absent_as_empty,
    are_batched,
    differentiated,
    is_differentiated_again,
    is_transformed,
    join_tangents,
    outside_transform,
    split_tangents,
)
from transformer_kernels.ops._kernels import Adapter, Call, Kernels, Wanted
from transformer_kernels.ops._plan import any_autocast, dispatch_modes, functorch_is_active, is_jit_tracing, items
from transformer_kernels.ops._tangents import outputs_and_tangents

P = TypeVar("P")

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
"""The types of a call's fields, and their spelling in torch.library."""


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record a call with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(x: Tensor) -> bool:
    """Whether a tracer must record this call: then it goes through the registered operator."""
    return is_compiling() or x.is_meta or dispatch_modes() > 0 or isinstance(x, FakeTensor) or is_jit_tracing()


def reads_values(x: Tensor) -> bool:
    """Whether x has values that a call can be checked for: not while it is traced or batched by vmap."""
    return not (is_traced(x) or functorch_is_active())


class Operation:
    """One operation: its call, its results, the tensors kept for backward, and the routes to a backend.

    Args:
        name: of the public function.
        call: a NamedTuple of the checked arguments, a `record` whose fields have the types in SCHEMA_TYPES; the first
            is a tensor. A field may be such a NamedTuple itself: its fields are then named "record.field" below.
        prepare: the arguments of `run` -> the validated call; its keyword-only parameters are the last ones of `run`.
        differentiable: the fields that have a gradient.
        result: a NamedTuple of what forward returns, or None where that is one tensor.
        public: how many of the results, the first ones, are the caller's.
        kept: results that backward needs, or () ; "" is the only one. The first has the shape of the first output if
            there are several outputs.
        dropped: tensor fields that backward does without where `call.drops()`, and the kept result, if any, as which
            the gradient of such a field is shaped.
        kernels: the family whose backend files are used, by default of `call`, or an `Adapter` and its family.
    """

    def __init__(
        self,
        name: str,
        call: type[Any],
        prepare: Callable[..., Any],
        *,
        differentiable: tuple[str, ...],
        result: type[Any] | None = None,
        public: int = 1,
        kept: tuple[str, ...] = (),
        dropped: Mapping[str, str | None] | None = None,
        kernels: str | tuple[type[Adapter], str] | None = None,
    ) -> None:
        self.name, self.call, self.result, self.public = name, call, result, public
        self.prepare, self._options = prepare, _keyword_only(prepare)
        self.adapter: type[Adapter] | None = None
        if isinstance(kernels, tuple):
            self.adapter, kernels = kernels
        self.folder = f"{__package__}.{kernels or name}"
        self._other_grads = (None,) * (public - 1)
        hints = get_type_hints(call)
        self._parts = tuple(_parts(hints.values()))
        self._has_records = any(record for record, _ in self._parts)
        types = dict(_schema_types(call))
        fields = tuple(types)
        results: tuple[str, ...] = ("",) if result is None else result._fields
        tensors = [field for field in fields if types[field].startswith("Tensor")]
        self.fields, self.differentiable = fields, tuple(fields.index(field) for field in differentiable)
        self.names, self.inputs = differentiable, _plan.attributes(call, differentiable)
        dropped = dropped or {}
        always = dropped if call.drops is Call.drops else ()
        self.kept_call = tuple(fields.index(field) for field in tensors if field not in always)
        self._dropped = frozenset(fields.index(field) for field in dropped)
        self.results, self.kept_results = len(results), tuple(results.index(field) for field in kept)
        self.saved_results = items(self.kept_results)
        self._numbers = tuple(i for i, field in enumerate(fields) if field not in tensors)
        saved = {field: index for index, field in enumerate((*self.kept_call, *self._numbers))}
        self._saved_tensors, self._saved_numbers = items(self.kept_call), items(self._numbers)
        self._restored = items([saved.get(i, -1) for i in range(len(fields))])
        found = {result: index for index, result in enumerate(self.kept_results)}
        self._restored_results = items([found.get(i, -1) for i in range(len(results))])
        shaped = {field: like for field, like in dropped.items() if like is not None}
        self._like = {fields.index(field): results.index(like) for field, like in shaped.items()}
        self.plans: _plan.Plans = {}
        cpu.dependents.append(self.forget_plans)
        dispatch.OPERATIONS[name] = self
        self._register(types)

    def forget_plans(self) -> None:
        """Validate and dispatch the next call of each layout again."""
        self.plans.clear()

    def run(self, backend: str | None, *arguments: Any, outputs: int | None = None) -> Any:
        """The public outputs for the arguments of `prepare`, or the first `outputs`: one tensor or a tuple of them."""
        public = self.public if outputs is None else outputs
        if is_compiling():
            return self(self.prepared(arguments), backend, public)
        try:
            plan = self.plans.get(arguments[0].shape)
        except (AttributeError, RuntimeError):  # no tensor, or a nested one
            plan = None
        if plan is None or plan.public != public or not plan.fits(backend, arguments):
            layout = _plan.layout(backend, arguments)
            plan = self.plans.get((public, layout))
            if plan is None:
                return self._first(backend, layout, arguments, public, outputs)
            _plan.keep(self.plans, arguments[0].shape, plan)
        if plan.native is not None:
            return plan.native(*arguments)
        call = plan.call(arguments)
        if plan.check is not None:
            plan.check(call)
        if plan.composed is not None:
            return self.computed(plan, call, backend)
        if plan.recorded:  # as in `computed`, without its call
            return _recorded(plan, call, *plan.inputs(call))
        results = plan.forward(call)
        return results if self.result is None else plan.outputs(results)

    def _first(
        self, backend: str | None, layout: Hashable, given: tuple[Any, ...], public: int, outputs: int | None
    ) -> Any:
        """The public outputs of a call without a plan, which is made if its layout is new."""
        arguments = given if layout is None else _plan.apart(given)
        call, key = self.prepared(arguments), (public, layout)
        if layout is None or key in self.plans or is_traced(call[0]):
            return self(call, backend, public)
        native = None
        if dispatch.requested(backend) == "auto" and (outputs is None or outputs == 1):
            native = _crossovers.native(call.native(), call, arguments)
        plan: Any = self.planned(call, backend, public) if native is None else _plan.ByPyTorch(native, public)
        plan.fits = _plan.guard(layout[0], given)  # type: ignore[index]
        if native is not None:
            _plan.keep(self.plans, key, plan)
            return native(*arguments)
        _plan.remember(self.plans, key, plan, arguments, call)
        return self.computed(plan, call, backend)

    def ordered(self, options: Mapping[str, Any]) -> Iterable[Any]:
        """The values of all options of `prepare`, in their order, by the names of those that are given."""
        values = {**self._options, **options}
        if len(values) > len(self._options):
            unknown = next(name for name in options if name not in self._options)
            raise TypeError(f"{self.name}() got an unexpected keyword argument {unknown!r}")
        return values.values()

    def prepared(self, arguments: tuple[Any, ...]) -> Any:
        """The validated call of the arguments of `run`."""
        if not self._options:
            return self.prepare(*arguments)
        first = len(arguments) - len(self._options)
        return self.prepare(*arguments[:first], **dict(zip(self._options, arguments[first:], strict=True)))

    def __call__(self, call: Any, backend: str | None, public: int | None = None) -> Any:
        """The public outputs of a validated call, or the first ones, by the cheapest route that it allows."""
        public = self.public if public is None else public
        if is_compiling():  # Dynamo would guard every entry of `plans`
            transformed = is_transformed(self.flat(call))
            return (self._transformed if transformed else self._traced)(call, backend, public)
        layout = _plan.layout(backend, self.flat(call))
        plan = self.plans.get((public, Call, layout))
        if plan is None:
            if layout is None and is_transformed(self.flat(call)):
                return self._transformed(call, backend, public)
            if is_traced(call[0]):
                return self._traced(call, backend, public)
            plan = self.planned(call, backend, public)
            if layout is not None:
                _plan.keep(self.plans, (public, Call, layout), plan)
        return self.computed(plan, call, backend)

    def planned(self, call: Any, backend: str | None, public: int) -> _plan.Plan:
        """The plan for calls of this layout, of which `public` outputs are returned."""
        return _plan.Plan(self, call, self._made(call, backend), needs_grad(*self.inputs(call)), public)

    def computed(self, plan: _plan.Plan, call: Any, backend: str | None) -> Any:
        """The public outputs, by other operators, through autograd or from the backend."""
        if plan.composed is not None:
            output = plan.composed(call, backend, plan.recorded)
            if output is not None:
                return output
        if plan.recorded:
            return _recorded(plan, call, *plan.inputs(call))
        results = plan.forward(call)
        return results if self.result is None else plan.outputs(results)

    def _traced(self, call: Any, backend: str | None, public: int) -> Any:
        """By the registered operator, or by those that it is composed of."""
        if not is_compiling() and call.may_be_composed():
            composed = dispatch.select(self, backend, call).of(call).composed
            output = None if composed is None else composed(call, backend, needs_grad(*self.inputs(call)))
            if output is not None:
                return output
        results = self._registered(*self.flat(call), backend)
        if self.result is None:
            return results
        return results[0] if public == 1 else results[:public]

    def _transformed(self, call: Any, backend: str | None, public: int) -> Any:
        """By PyTorch's operators, which have the transforms of torch.func and forward-mode AD."""
        name = "auto" if backend is None and is_compiling() else dispatch.requested(backend)
        if name != "auto":
            dispatch.select(self, name, call)
            if not dispatch.has_transforms(name):
                raise UnsupportedByBackend(
                    f"{self.name}: backend {name!r} does not support vmap, the transforms of torch.func and "
                    "forward-mode AD; use backend='auto', 'torch' or 'cpu', which compute them by PyTorch's operators"
                )
        outputs = self._with_tangents(call, backend, public)
        if outputs is None and not is_traced(call[0]):
            outputs = by_kernels(self, call, backend, public)
        outputs = outputs or call.in_pytorch(public)
        return outputs[0] if public == 1 else outputs

    def _with_tangents(self, call: Any, backend: str | None, public: int) -> tuple[Tensor, ...] | None:
        """The outputs and their tangents by kernels, where forward-mode AD, once, is all that is asked for."""
        if is_compiling() or call.is_empty() or (found := split_tangents(self.flat(call))) is None:
            return None
        primals, tangents = found
        given = tuple(tangents[i] for i in self.differentiable)
        others = any(x is not None and i not in self.differentiable for i, x in enumerate(tangents))
        if others or is_traced(primals[0]):
            return None
        with outside_transform(), without_autocast(primals[0]):
            plain = self.nested(primals)
            kernels = self.kernels(plain, backend, of_primals=True)
            computed = outputs_and_tangents(self, kernels, plain, given, public)
        return None if computed is None else join_tangents(*computed)

    def differentiated(self, call: Any, results: Any, grads: tuple[Any, ...], wanted: Wanted) -> tuple[Any, ...]:
        """The gradients by PyTorch's operators from the kept tensors, differentiable again."""
        grads = self.incoming(results, grads)
        gradients = call.second_order(results, grads, wanted)
        if gradients is not None:
            return gradients  # type: ignore[no-any-return]
        values = list(self.flat(self._with_shapes(call, results)))
        count = max(i for i, grad in enumerate(grads) if grad is not None) + 1

        def outputs(*inputs: Tensor | None) -> tuple[Tensor, ...]:
            for i, x in zip(self.differentiable, inputs, strict=True):
                values[i] = x
            return self.nested(values).in_pytorch(count)  # type: ignore[no-any-return]

        return differentiated(outputs, [values[i] for i in self.differentiable], grads, wanted)

    def kernels(self, call: Any, backend: str | None, of_primals: bool = False) -> Kernels:
        """The backend's kernels for a call of the registered operators, or of tensors without their tangents."""
        layout = _plan.layout(backend, self.flat(call), of_primals)
        kernels = self.plans.get((Kernels, layout))
        if kernels is None:
            kernels = self._made(call, backend)
            if layout is not None:
                _plan.keep(self.plans, (Kernels, layout), kernels)
        return kernels  # type: ignore[no-any-return]

    def _made(self, call: Any, backend: str | None) -> Kernels:
        """The selected kernels for calls of this layout, within the observer's if there is one."""
        kernels: Kernels = dispatch.select(self, backend, call).of(call)
        return kernels if dispatch.observer is None else dispatch.observer(self, kernels)

    def crossover(self, call: Any) -> str | None:
        """Which calls `patch` and `accelerate` leave to PyTorch, or None."""
        native = call.native()
        return _crossovers.described(self.name if native is None else native.name, call[0])

    def flat(self, call: Any) -> Any:
        """The values of `fields`: the fields of the call, with a nested record's fields in the record's position."""
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

    # Tensors kept between forward and backward

    def dropped_in(self, call: Any) -> frozenset[int]:
        """The fields that backward of this call does without."""
        return self._dropped if self._dropped and call.drops() else frozenset()

    def saved(self, call: Any) -> tuple[list[Tensor | None], tuple[Any, ...]]:
        """The tensors and the other fields of a call that backward reads."""
        values, dropped = self.flat(call), self.dropped_in(call)
        tensors = zip(self.kept_call, self._saved_tensors(values), strict=True)
        return [None if i in dropped else x for i, x in tensors], self._saved_numbers(values)

    def kept(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, Any]:
        """The call and the results from the fields that the operator saved, None in the other fields."""
        inputs = len(self.kept_call)
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
        first = self.call.gradient_layout(first)
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
            self.run_forward,
            self._fake,
        )
        kept = [f"{'Tensor?' if i in self._dropped else spelled[i]} {fields[i]}" for i in self.kept_call]
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
            f"transformer_kernels::{name}", self.gradient, setup_context=self.setup_context, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"transformer_kernels::{name}_backward", self._refuse_second_order, setup_context=_nothing, lib=LIBRARY
        )

    def run_forward(self, *arguments: Any) -> Any:
        """The outputs of the registered operator."""
        if self.call.check_when_run is not None:
            self.call.check_when_run(self.nested(arguments[:-1]))
        outputs = self.compute(*arguments)
        return outputs if self.result is None else _unaliased(outputs)

    def compute(self, *arguments: Any) -> Any:
        """The operator's outputs for a call and a backend, unchecked; two outputs may be one tensor."""
        *values, backend = arguments
        call = self.nested(values)
        with cpu.mode():
            outputs = self.kernels(call, backend).forward(call)
        if self.result is None:
            return outputs
        if any(output is None for output in outputs):
            pairs = zip(outputs, self._fake(*arguments), strict=True)
            outputs = [torch.zeros_like(like) if output is None else output for output, like in pairs]
        return tuple(outputs)

    def _fake(self, *arguments: Any) -> Any:
        call = self.nested(arguments[:-1])
        outputs = call.fake()
        if self.result is None:
            return outputs
        return tuple(call[0].new_empty(0) if output is None else output for output in outputs)

    def unpacked(self, arguments: Sequence[Any]) -> tuple[Any, Any, tuple[Any, ...], tuple[bool, ...], Any]:
        """The kept call and results, the incoming gradients, the wanted gradients and the backend."""
        *values, wanted, backend = arguments
        grads, values = tuple(values[: self.public]), values[self.public :]
        tensors = len(self.kept_call) + len(self.kept_results)
        call, results = self.kept(values[:tensors], values[tensors:])
        return call, results, self.incoming(results, grads), tuple(wanted), backend

    def as_run(self, backward: bool, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an operator with the structure that the values of masks have now, or the same tuple."""
        *values, backend = arguments
        call = self.call_of(backward, arguments)
        found = call.as_run(backend) if self.call.as_run is not None else call
        if found is call:
            return arguments
        flat = self.flat(found)
        if not backward:
            return *flat, backend
        tensors = self.public + len(self.kept_call)
        results = values[tensors : tensors + len(self.kept_results)]
        kept = *self._saved_tensors(flat), *results, *self._saved_numbers(flat)
        return *values[: self.public], *kept, values[-1], backend

    def call_of(self, backward: bool, arguments: Sequence[Any]) -> Any:
        """The call from the arguments of an operator; for backward only the kept fields are set."""
        if not backward:
            return self.nested(arguments[:-1])
        results = self.public + len(self.kept_call) + len(self.kept_results)
        return self.kept(arguments[self.public : results], arguments[results:-2])[0]

    def empty(self, backward: bool, arguments: tuple[Any, ...]) -> Any:
        """Empty tensors for what an operator returns."""
        return (self._fake_backward if backward else self._fake)(*arguments)

    def run_backward(self, *arguments: Any) -> Any:
        """The outputs of the gradient's operator."""
        call, results, grads, wanted, backend = self.unpacked(arguments)
        call = self._with_shapes(call, results)
        with cpu.mode():
            gradients = self.kernels(call, backend).backward(call, results, grads, wanted)
        return self._returned(_unaliased(absent_as_empty(gradients, wanted, grads[0])))

    def _fake_backward(self, *arguments: Any) -> Any:
        call, results, grads, wanted, _ = self.unpacked(arguments)
        call = self._with_shapes(call, results)
        gradients = call.empty_gradients() or self._empty_gradients(call)
        return self._returned(absent_as_empty(gradients, wanted, grads[0]))

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
        return tuple(
            None if tensor is None else torch.empty_like(tensor, memory_format=contiguous) for tensor in inputs
        )

    def _returned(self, gradients: tuple[Tensor, ...]) -> Any:
        return gradients if len(gradients) > 1 else gradients[0]

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Save the tensors and numbers that the operator's backward pass reads."""
        *call, ctx.backend = inputs
        saved, ctx.numbers = self.saved(self.nested(call))
        ctx.save_for_backward(*saved, *self.saved_results(output if self.result else (output,)))
        ctx.set_materialize_grads(False)  # else there would be one for each result, the public ones and the others
        if self.result is not None:
            ctx.mark_non_differentiable(*output[self.public :])

    def gradient(self, ctx: Any, *grads: Tensor | None, by: Callable[..., Any] | None = None) -> Any:
        """Gradients of the operator's arguments, by its registered backward operator or by the function `by`."""
        if all(grad is None for grad in grads[: self.public]):
            return (None,) * (len(self.fields) + 1)
        wanted = [ctx.needs_input_grad[i] for i in self.differentiable]
        arguments = (*grads[: self.public], *ctx.saved_tensors, *ctx.numbers)
        gradients = (by or self._registered_backward)(*arguments, wanted, ctx.backend)
        gradients = gradients if len(wanted) > 1 else (gradients,)
        return *self._placed(gradients, tuple(wanted)), None

    def _refuse_second_order(self, *_: Any) -> Any:
        raise RuntimeError(
            f"{self.name}: double backward of a traced call (torch.compile, a dispatch mode, meta tensors) is not "
            "supported; call it outside of them"
        )


saved_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True)
"""The hooks of saved tensors, or None; releases of PyTorch that cannot be asked are taken to have some."""


def _laid_out(x: Any, strides: Any) -> Any:
    """A saved tensor with the strides that the plan's kernels read, which hooks of saved tensors may change."""
    return x if x is None or x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


class _Recorded(torch.autograd.Function):
    """A call that autograd records: forward, and the backend's backward."""

    @staticmethod
    def forward(ctx: Any, plan: _plan.Plan, call: Any, *inputs: Tensor) -> Any:
        """`inputs` repeats the call's differentiable tensors: autograd records only tensors passed as arguments."""
        operation, ctx.plan = plan.operation, plan
        made = None if plan.ahead is None else plan.ahead(call)
        ctx.made_ahead = made is not None
        results = plan.forward(call) if made is None else made[0]
        plan.keep(ctx, call, results if operation.result else (results,), *(made or ())[1:])
        ctx.strides = saved_hooks(True) and [x.stride() if isinstance(x, Tensor) else None for x in ctx.to_save]
        return results if operation.result is None else plan.outputs(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: _plan.Plan = ctx.plan
        operation, tensors = plan.operation, ctx.saved_tensors
        if ctx.strides:
            tensors = tuple(map(_laid_out, tensors, ctx.strides))
        try:
            if is_differentiated_again():
                gradients = operation.differentiated(*plan.kept(tensors), grads, plan.wanted)
            elif ctx.made_ahead:
                ctx.made_ahead = False  # the caller may write to it: a second backward pass computes its own
                gradients = (tensors[-1].data,)
                plan.kernels.scale_gradient(*gradients, *grads)
                if plan.below is not None:
                    gradients = plan.below(plan.kept(tensors)[0], *gradients, plan.wanted)
            else:
                call, results = plan.kept(tensors)
                gradients = plan.kernels.backward(call, results, operation.incoming(results, grads), plan.wanted)
        except RuntimeError:
            if not are_batched(grads):  # a question that takes longer than the attempt
                raise
            gradients = operation.differentiated(*plan.kept(tensors), grads, plan.wanted)
        return plan.returned((*gradients, None))


_recorded = super(torch.autograd.Function, _Recorded).apply
"""`_Recorded.apply` without its check for transforms, which takes a microsecond; transforms never use plans."""


def takes_options_of(other: Callable[..., Any], *but: str) -> Callable[[P], P]:
    """Decorator: the signature names the keyword-only parameters of `other`, except `but`, in place of **options."""

    def decorated(function: P) -> P:
        own = inspect.signature(function)  # type: ignore[arg-type]
        named = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        options = inspect.signature(other).parameters.values()
        named += [option for option in options if option.kind is option.KEYWORD_ONLY and option.name not in but]
        function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
        return function

    return decorated


def _keyword_only(prepare: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters that are not bound, in their order, with their defaults."""
    bound = prepare.keywords if isinstance(prepare, partial) else {}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(prepare).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in bound
    }


def _schema_types(call: type[Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Each field of a call and how torch.library spells its type; fields of a nested record follow its name."""
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
    """The tensors, with a copy of each one that shares memory with an earlier one: operators must not return aliases.

    Kernels may allocate two small results together; only the traced route pays for the copy.
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
    """The tensors in the widest of their dtypes, as autocast casts operands of one dtype."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors)
