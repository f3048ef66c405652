"""How faults are planted in a training run (`planted_faults.Run`), from outside of the certificate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from transformer_kernels.backends import dispatch
from transformer_kernels.graphs import Graphed, _host
from transformer_kernels.ops._kernels import Kernels
from transformer_kernels.verification.memory import current_recording

Plant = Callable[[Any, pytest.MonkeyPatch], None]
"""(run, monkeypatch) -> None."""


# Wrong kernels


class Faulty(Kernels):
    """A backend's kernels of which one call in each step is wrong.

    The calls of a step are counted by a stack, since backward passes run in the reverse order of forward passes.
    """

    backend = "cpu"

    def __init__(
        self, operation: Any, kind: Any, call: Any, direction: str, change: Any, nth: int | None, stack: list[int]
    ) -> None:
        self.operation, self.kind, self.inner, self.stack = operation, kind, kind.of(call), stack
        self.direction, self.change, self.nth = direction, change, nth
        self.composed = self.inner.composed
        if self.inner.forward_with_gradient is not None:
            self.forward_with_gradient, self.scale_gradient = self._ahead, self.inner.scale_gradient
            self.below = None if self.inner.below is None else self._below

    def forward(self, call: Any) -> Any:
        return self._forward("forward", call)

    def forward_recorded(self, call: Any) -> Any:
        return self._forward("forward_recorded", call)

    def forward_alone(self, call: Any) -> Any:
        return self._called("forward", "forward_alone", None, call)

    def backward(self, call: Any, *rest: Any) -> Any:
        return self._called("backward", "backward", self.stack.pop(), call, *rest)

    def _forward(self, name: str, call: Any) -> Any:
        self.stack.append(len(self.stack))
        return self._called("forward", name, self.stack[-1], call)

    def _called(self, direction: str, name: str, index: int | None, call: Any, *rest: Any) -> Any:
        if direction != self.direction or self.nth not in (None, index):
            return getattr(self.inner, name)(call, *rest)

        def compute(call, *rest):
            shaped = self.operation._with_shapes(call, rest[0]) if rest else call
            return getattr(self.kind.of(shaped), name)(call, *rest)

        return self.change(compute, call, *rest)

    def _ahead(self, call: Any) -> Any:
        """Result and gradient of a loss."""
        result, *gradient = self.inner.forward_with_gradient(call)
        if self.direction == "forward":
            return self.change(lambda call: self.kind.of(call).forward_with_gradient(call)[0], call), *gradient
        if self.inner.below is None:
            return result, *self.change(lambda call: self.kind.of(call).forward_with_gradient(call)[1:], call)
        return result, *gradient

    def _below(self, call: Any, *rest: Any) -> Any:
        if self.direction == "forward":
            return self.inner.below(call, *rest)
        return self.change(lambda call, *rest: self.kind.of(call).below(call, *rest), call, *rest)


def kernel(op: str, direction: str, change: Callable[..., Any], nth: int | None = None) -> Plant:
    """The nth call of an operation in each step, or each, is `change(compute, call, ...)`."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        select, stack = dispatch.select, []

        def selected(operation, backend, call):
            kind = select(operation, backend, call)
            if operation.name != op:
                return kind
            of = partial(Faulty, operation, kind, direction=direction, change=change, nth=nth, stack=stack)
            return type("Kind", (), {"of": staticmethod(of)})

        monkeypatch.setattr(dispatch, "select", selected)

    return plant


def altered(alter: Callable[[torch.Tensor], Any], index: int = 0) -> Callable[..., Any]:
    """One of the results is changed in place."""

    def change(compute, *arguments):
        results = compute(*arguments)
        alter(results if isinstance(results, torch.Tensor) else results[index])
        return results

    return change


def kept(field: str) -> Callable[..., Any]:
    """A result that only backward reads is wrong."""

    def change(compute, call):
        result = compute(call)
        getattr(result, field).add_(0.01)
        return result

    return change


def called(**fields: Any) -> Callable[..., Any]:
    """The call has other fields: values, or functions of the call."""

    def change(compute, call, *rest):
        values = {name: value(call) if callable(value) else value for name, value in fields.items()}
        return compute(call._replace(**values), *rest)

    return change


def scores(**fields: Any) -> Callable[..., Any]:
    """Attention's scores have other fields."""
    return called(scores=lambda call: call.scores._replace(
        **{name: value(call.scores) if callable(value) else value for name, value in fields.items()}
    ))  # fmt: skip


def scaled(factor: float) -> Callable[[torch.Tensor], Any]:
    return lambda x: x.mul_(factor)


def swapped(first: slice, second: slice, axis: int) -> Callable[[torch.Tensor], Any]:
    def alter(x):
        x = x.movedim(axis, 0)
        kept = x[first].clone()
        x[first] = x[second]
        x[second] = kept

    return alter


def repeated_row(x: torch.Tensor) -> None:
    rows = x.view(-1, x.shape[-1])
    rows[-1].copy_(rows[-2])


def without_last_row(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1, x.shape[-1])[:-1], x.new_zeros(1, x.shape[-1])]).view(x.shape)


def summed_without_last_row(index: int) -> Callable[..., Any]:
    """A sum over rows lacks the last one."""

    def change(compute, call, result, grads, wanted):
        right = list(compute(call, result, grads, wanted))
        right[index] = compute(call, result, (without_last_row(grads[0]), *grads[1:]), wanted)[index]
        return tuple(right)

    return change


def untransposed(compute, call, result, grads, wanted):
    """dx of a square linear layer by W^T instead of W."""
    dx, *rest = compute(call, result, grads, wanted)
    return dx.copy_(grads[0] @ call.weight.t()), *rest


def stale(index: int) -> Callable[..., Any]:
    """A gradient is that of the step before."""
    before: list[torch.Tensor] = []

    def change(compute, *arguments):
        results = compute(*arguments)
        now = results[index].clone()
        if before:
            results[index].copy_(before[0])
        before[:] = [now]
        return results

    return change


def without(index: int) -> Callable[..., Any]:
    """An incoming gradient is left out."""
    return lambda compute, call, result, grads, wanted: compute(
        call, result, tuple(torch.zeros_like(x) if i == index else x for i, x in enumerate(grads)), wanted
    )


def once_per_token(compute, call, result, grads, wanted):
    """A token that occurs several times has the gradient of its last occurrence."""
    dweight, *rest = compute(call, result, grads, wanted)
    tokens, gradient = call.tokens.view(-1), grads[0].reshape(-1, grads[0].shape[-1])
    return dweight.index_copy_(0, tokens, gradient * call.scale), *rest


# Memory


def flip(x: torch.Tensor, *bits: int, index: int = 5) -> None:
    """Change bits of one element past PyTorch's count of writes."""
    flat = torch.as_strided(x.detach(), (x.numel(),), (1,), x.storage_offset()).numpy().view("int32")
    for bit in bits:
        flat[min(index, len(flat) - 1)] ^= 1 << bit


def after_forward(function: Callable[[Any], None]) -> Plant:
    """Something happens between the forward and the backward pass of each step from `ONSET` on, in replays too."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        backward = torch.autograd.backward

        def happens():
            if run.is_due():
                function(run)

        def changed(*arguments, **options):
            recording = current_recording()
            happens() if recording is None else recording.calls.append((happens, ()))
            return backward(*arguments, **options)

        monkeypatch.setattr(torch.autograd, "backward", changed)

    return plant


def between_steps(function: Callable[[Any], None]) -> Plant:
    """Something happens after each step from `ONSET` on."""
    return lambda run, monkeypatch: run.between.append(lambda: function(run) if run.is_due() else None)


def weight(path: str, *bits: int) -> Callable[[Any], None]:
    return lambda run: flip(run.parameter(path), *bits)


def state(path: str, name: str, *bits: int) -> Callable[[Any], None]:
    return lambda run: flip(run.optimizer.state[run.parameter(path)][name], *bits)


def activation(op: str, nth: int, tensor: Callable[[Any, Any], torch.Tensor], bit: int) -> Plant:
    """A bit of what the nth call keeps for backward, `tensor(call, results)`."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[torch.Tensor] = []

        def change(compute, call):
            results = compute(call)
            kept[:] = [tensor(call, results).detach()]
            return results

        kernel(op, "forward", change, nth)(run, monkeypatch)
        after_forward(lambda run: flip(kept[0], bit))(run, monkeypatch)

    return plant


def gradient(path: str, bit: int) -> Plant:
    """A bit of a gradient between the backward pass and the optimizer's step."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        backward = torch.autograd.backward

        def changed(*arguments, **options):
            backward(*arguments, **options)
            if run.is_due():
                flip(run.parameter(path).grad, bit)

        monkeypatch.setattr(torch.autograd, "backward", changed)

    return plant


# Values that are not finite


def module(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """A module's output is changed within it, by PyTorch's operators."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = run.model.get_submodule(path)
        forward = owner.forward
        monkeypatch.setattr(owner, "forward", lambda *arguments, **options: function(forward(*arguments, **options)))

    return plant


def compiled(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """As `module`, in a block that torch.compile has compiled."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module(path, function)(run, monkeypatch)
        torch._dynamo.reset()
        block, _, _ = path.partition(".feed_forward")
        owner = run.model.get_submodule(block)
        owner.compile(backend="aot_eager")

    return plant


def poisoned(path: str, value: float) -> Plant:
    """A weight that the run is given."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with torch.no_grad():
            run.parameter(path).view(-1)[3] = value

    return plant


def masked(x):
    return torch.softmax(x.masked_fill(torch.ones_like(x) > 0, -math.inf), -1)


def without_row(x, value):
    return x / torch.where(torch.arange(x.shape[-2])[:, None] == 2, value, 1.0)


def input_of(path: str, bit: int) -> Plant:
    """A bit of what a module of PyTorch keeps of its input."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[torch.Tensor] = []
        owner = run.model.get_submodule(path)
        forward = owner.forward
        monkeypatch.setattr(owner, "forward", lambda x: (kept.__setitem__(slice(None), [x.detach()]), forward(x))[1])
        after_forward(lambda run: flip(kept[0], bit))(run, monkeypatch)

    return plant


# Stale recordings


def left_out(op: str, direction: str, nth: int) -> Plant:
    """From `ONSET` on, replays skip the kernels of a call."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(compute, *arguments):
            recording = current_recording()
            first = 0 if recording is None else len(recording.calls)
            results = compute(*arguments)
            if recording is not None:
                recording.calls[first:] = [(gated(run, call), arguments) for call, arguments in recording.calls[first:]]
            return results

        kernel(op, direction, change, nth)(run, monkeypatch)

    return plant


def gated(run: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: None if run.is_due() else function(*arguments)


def stale_argument(index: int) -> Plant:
    """Replays read the argument of the step before."""

    def happens(run: Any) -> None:
        for graphs in run.step._captured.values():
            for graph in graphs:
                graph.buffers[index] = graph.buffers[index].clone()

    return between_steps(happens)


def stale_seed(nth: int) -> Plant:
    """Replays do not draw the nth seed of dropout."""

    def plant(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        complete = _host.Recording.complete

        def changed(recording, result):
            draws = [i for i, (call, _) in enumerate(recording.calls) if "random_" in repr(getattr(call, "func", ""))]
            call, arguments = recording.calls[draws[nth]]
            recording.calls[draws[nth]] = gated(run, call), arguments
            return complete(recording, result)

        monkeypatch.setattr(_host.Recording, "complete", changed)

    return plant


def stale_rate(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has the learning rate of the capture."""
    prepare = Graphed._prepare_rates

    def changed(graphed: Graphed) -> None:
        prepare(graphed)
        if run.is_due():
            graphed._rates[0].fill_(1e-3)

    monkeypatch.setattr(Graphed, "_prepare_rates", changed)
    run.between.append(lambda: run.optimizer.param_groups[0].update(lr=1e-3 / (1 + run.steps)))
