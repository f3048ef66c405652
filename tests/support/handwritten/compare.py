"""Programs compiled by the graph route against eager PyTorch: outputs, gradients, dtypes, shapes."""

from __future__ import annotations

import collections
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.handwritten import Program
from tests.support.parity import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_within_budget
from transformer_kernels.backends import cpu
from transformer_kernels.ops import _pattern
from transformer_kernels.patching import graph

UNITS = {torch.float64: 2.0**-34, torch.float32: 2.0**-17, torch.bfloat16: 2.0**-7}
"""The rounding of a few operations in a row; in float64, where eager PyTorch is exact, the whole budget."""
TOGETHER = 12
"""Programs in one compilation."""


@dataclass(frozen=True)
class Mode:
    """How programs run: the dtype of their inputs, with gradients or without, under autocast to bfloat16."""

    dtype: torch.dtype
    gradients: bool = True
    autocast: bool = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        autocast = torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()
        with torch.set_grad_enabled(self.gradients), autocast:
            yield

    @property
    def kernels(self) -> str:
        """The backend: the CPU kernels in the dtypes that they have."""
        built = cpu.unavailable(torch.device("cpu")) is None
        return "cpu" if built and self.dtype is not torch.float64 else "torch"

    def takes(self, program: Program) -> bool:
        return not (self.gradients and program.without_gradients)


EXACT, EVALUATED = Mode(torch.float64), Mode(torch.float64, gradients=False)
SINGLE, AUTOCAST = Mode(torch.float32), Mode(torch.float32, autocast=True)
HALF = Mode(torch.bfloat16)


@dataclass
class Results:
    """The outputs of one program, the gradients of its inputs, and the inputs, which it may have written to."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    inputs: list[Tensor]


Compiled = tuple[Callable[..., Any], collections.Counter[str]]
"""A compiled function, and the matches of each operation so far."""


def routed_for(function: Callable[..., Any], backends: Sequence[str | None]) -> list[Compiled]:
    """The function compiled by the graph route for each of the backends, None is the fastest; traced once for all."""
    matched = [collections.Counter[str]() for _ in backends]
    chosen = 0

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        copies = [copy.deepcopy(graph_module) for _ in backends]
        for module, name, counter in zip(copies, backends, matched, strict=True):
            counter.update(graph.rewrite(module, torch.is_grad_enabled(), name).matched)
            module.graph.lint()
            module.recompile()
        return lambda *arguments: copies[chosen].forward(*arguments)

    compiled = torch.compile(function, backend=backend)

    def run(index: int, *arguments: Any, **options: Any) -> Any:
        nonlocal chosen
        chosen = index
        return compiled(*arguments, **options)

    return [(functools.partial(run, index), counter) for index, counter in enumerate(matched)]


def routed(function: Callable[..., Any], kernels: str) -> Compiled:
    """The function compiled by the graph route for the backend `kernels`, and the matches of each operation so far."""
    return routed_for(function, [kernels])[0]


@contextmanager
def float64_is_matched() -> Iterator[None]:
    """The patterns take float64 too, which has no fast kernels, but results without rounding."""
    floating = _pattern.FLOATING
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformer_kernels.") and getattr(module, "FLOATING", None) is floating:
                stack.enter_context(mock.patch.object(module, "FLOATING", (*floating, torch.float64)))
        yield


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def backward(program: Program, inputs: dict[str, Tensor], result: Any) -> Results:
    """Results, with the gradients of the inputs for random cotangents."""
    outputs = tensors(result)
    taken = [output for output in outputs if output.requires_grad]
    if taken:
        generator = torch.Generator().manual_seed(5)
        cotangents = [
            torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype) for output in taken
        ]
        torch.autograd.backward(taken, cotangents)
    gradients = {name: tensor.grad for name, tensor in inputs.items()}
    return Results([output.detach() for output in outputs], gradients, [each.detach() for each in inputs.values()])


def run_eager(programs: Sequence[Program], mode: Mode) -> list[Results]:
    found = []
    for program in programs:
        inputs = program.inputs(mode.dtype, mode.gradients)
        with mode():
            result = program.function(**inputs)
        found.append(backward(program, inputs, result))
    return found


def run_routed(programs: Sequence[Program], mode: Mode) -> Iterator[tuple[list[Results], collections.Counter[str]]]:
    """All programs in one compilation: by the named backend, and by the fastest, PyTorch's functions included."""
    functions = [program.function for program in programs]

    def together(*arguments: list[Tensor]) -> list[Any]:
        return [function(*given) for function, given in zip(functions, arguments, strict=True)]

    torch._dynamo.reset()
    for compiled, matched in routed_for(together, (mode.kernels, None)):
        inputs = [program.inputs(mode.dtype, mode.gradients) for program in programs]
        with mode(), float64_is_matched():
            results = compiled(*(list(each.values()) for each in inputs))
        yield [backward(*each) for each in zip(programs, inputs, results, strict=True)], matched


def check(program: Program, mode: Mode, ours: Results, exact: Results, eager: Results) -> None:
    """Raise where a result of the compiled program is outside its budget."""
    assert len(ours.outputs) == len(eager.outputs), program.name
    for index, (got, want, plain) in enumerate(zip(ours.outputs, exact.outputs, eager.outputs, strict=True)):
        name = f"{program.name}: output {index}"
        assert got.dtype == plain.dtype, f"{name} has dtype {got.dtype} instead of {plain.dtype}"
        if not got.is_floating_point():
            continue  # argmax of rounded numbers
        got = got.masked_fill(want.isnan() & (got == 0.0), math.nan)  # queries that see no key
        within(name, mode, got, want, plain, OUTPUT_FACTOR)
    for given, left in zip(ours.inputs, eager.inputs, strict=True):
        torch.testing.assert_close(given, left, msg=f"{program.name}: an input is not written to as in eager PyTorch")
    sizes = [gradient.abs().max().item() for gradient in exact.gradients.values() if gradient is not None]
    for key, want_gradient in exact.gradients.items():
        got_gradient, plain_gradient = ours.gradients[key], eager.gradients[key]
        name = f"{program.name}: gradient of {key}"
        if want_gradient is None or plain_gradient is None:
            assert got_gradient is None or not got_gradient.any(), f"{name}: there is one"
            continue
        assert got_gradient is not None, f"{name}: there is none"
        assert got_gradient.dtype == plain_gradient.dtype, f"{name} has dtype {got_gradient.dtype}"
        within(name, mode, got_gradient, want_gradient, plain_gradient, GRADIENT_FACTOR, max(sizes))


def within(
    name: str, mode: Mode, got: Tensor, want: Tensor, plain: Tensor, factor: float, magnitude: float | None = None
) -> None:
    rounded_to = torch.bfloat16 if mode.autocast else mode.dtype
    assert_within_budget(name, got, want, plain, factor, rounded_to, magnitude, UNITS[rounded_to])


def failures(programs: Sequence[Program], mode: Mode) -> list[str]:
    """What is wrong with the programs, compiled a few at a time; each that is suspected is compiled alone too."""
    programs = [program for program in programs if mode.takes(program)]
    assert programs or mode is EVALUATED, "no program runs in this mode"
    found: list[str] = []
    for wanted in dict.fromkeys(program.matched for program in programs):  # apart, so that no match hides a lost one
        alike = [program for program in programs if program.matched == wanted]
        for begin in range(0, len(alike), TOGETHER):
            found += _failures(alike[begin : begin + TOGETHER], mode)
    return found


def _failures(programs: Sequence[Program], mode: Mode) -> list[str]:
    exact = run_eager(programs, EXACT if mode.gradients else EVALUATED)
    eager = exact if mode.dtype is torch.float64 else run_eager(programs, mode)
    wrong: list[str] = []
    try:
        routes = list(run_routed(programs, mode))
    except Exception as error:
        while torch._C._functorch.peek_interpreter_stack() is not None:  # it was raised inside a transform
            torch._C._functorch.pop_dynamic_layer_stack()
        torch._C._autograd._saved_tensors_hooks_enable()
        if len(programs) > 1:
            return [line for program in programs for line in _failures([program], mode)]
        return [f"{programs[0].name}: {type(error).__name__}: {error}"]
    for ours, _ in routes:
        for program, *results in zip(programs, ours, exact, eager, strict=True):
            try:
                check(program, mode, *results)
            except AssertionError as error:
                wrong.append(str(error))
    matched = routes[0][1]
    expected = collections.Counter(word for program in programs for word in program.matched)
    for word, count in expected.items():
        if sum(number for name, number in matched.items() if word in name) >= count:
            continue
        if len(programs) > 1:
            return wrong + [line for each in programs for line in _failures([each], mode) if line not in wrong]
        wrong.append(f"{programs[0].name}: no {word} was recognised, only {dict(matched)}")
    return wrong
