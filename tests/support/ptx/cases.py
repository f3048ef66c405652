"""The package's operations by the PTX of their Triton kernels: forward and backward within the error budget."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import transformer_kernels as tk
from benchmarks.compilers.launches import Launch
from benchmarks.compilers.triton import launches
from python_ref import ops as reference
from tests.support import parity as budget
from tests.support import random_calls
from tests.support.arguments import normal
from tests.support.operations import CPU, EXAMPLES
from tests.support.parity import check_parity
from tests.support.ptx.launch import Edit, Execution, capability_of, compile_launch, package_launches
from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import ONE_ULP, ZEROS, Global
from tests.support.ptx.syntax import parse
from tests.support.ptx.tensor_cores import NO_FENCE
from tests.support.random_calls import Draw

CP_ASYNC_PROXY = NO_FENCE[True]
"""Triton 3.6 emits no fence.proxy.async between the cp.async that fills a tile and the wgmma that reads it."""

KNOWN = {CP_ASYNC_PROXY, ONE_ULP, ZEROS}
"""Findings that are no faults of a kernel."""


@dataclass
class Outcome:
    """The outcome of one call, small enough to pass between processes."""

    share: float
    """The largest share of an error budget that was used."""
    kernels: list[str]
    findings: dict[str, int]
    """How often each message was reported."""
    lines: list[str] = field(default_factory=list)


@contextmanager
def poisoned() -> Iterator[None]:
    """Tensors of torch.empty and torch.empty_like are NaN until they are written."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

    def poison(make: Any) -> Any:
        return lambda *args, **kwargs: filled(make(*args, **kwargs))

    with mock.patch("torch.empty", poison(empty)), mock.patch("torch.empty_like", poison(empty_like)):
        yield


def outcome(share: float, executions: list[Execution]) -> Outcome:
    findings: Counter[str] = Counter()
    lines = []
    for each in executions:
        for (kind, message, text), count in each.findings.items():
            findings[message] += count
            lines.append(f"{each.kernel}: {kind}: {message}; at {text[:100]}")
    kernels = [each.kernel for each in executions]
    return Outcome(share, kernels, dict(findings), lines)


def parity(
    op: str,
    target: str,
    tensors: dict[str, Any],
    options: dict[str, Any],
    *,
    races: bool = True,
    edit: Edit | None = None,
) -> Outcome:
    """One call and its backward pass, checked against the error budget of tests/support/parity.py."""
    torch.manual_seed(0)
    with package_launches(target, races, edit) as executions, poisoned():
        share = check_parity(op, "triton", tensors, options, seed=7)
    return outcome(share, executions)


def example(op: str, target: str, dtype: torch.dtype, rows: int, columns: int, options: dict[str, Any]) -> Outcome:
    """The operation's example (tests/support/operations.py), with other options if given."""
    tensors = EXAMPLES[op].make(rows, columns, dtype)
    return parity(op, target, tensors, {**EXAMPLES[op].options, **options})


def any_length(target: str, dtype: torch.dtype) -> Outcome:
    """Attention by the kernels for any length, which walk over blocks of keys."""
    length, width = (80, 32) if dtype is torch.float32 else (150, 64)  # fewer keys go to the short kernels
    tensors = {name: normal(1, 1, length, width, dtype=dtype, device=CPU, seed=i) for i, name in enumerate("qkv")}
    return parity("attention", target, tensors, {"causal": True})


def forward(op: str, target: str, tensors: dict[str, Any], options: dict[str, Any], edit: Edit | None) -> Outcome:
    """One call without gradients, checked against the error budget of outputs."""
    inputs = {name: value.detach() for name, value in tensors.items()}
    dtype = next(iter(inputs.values())).dtype
    textbook = getattr(reference, op)
    exact, eager = (budget.run(textbook, inputs, options, dtype=each).outputs[0] for each in (torch.float64, dtype))
    with package_launches(target, True, edit) as executions, poisoned():
        got = budget.run(getattr(tk, op), inputs, {**options, "backend": "triton"}).outputs[0]
    share = budget.assert_within_budget(op, got, exact, eager, budget.OUTPUT_FACTOR, dtype)
    return outcome(share, executions)


def lengths(target: str, dtype: torch.dtype, queries: int, keys: int) -> Outcome:
    """Attention of the parity grid."""
    shapes = {"q": queries, "k": keys, "v": keys}
    tensors = {
        name: normal(1, 2, length, 64, dtype=dtype, device=CPU, seed=i)
        for i, (name, length) in enumerate(shapes.items())
    }
    return parity("attention", target, tensors, {"causal": (queries + keys) % 2 == 0, "return_lse": True})


def random_call(day: str, op: str, number: int, target: str) -> Outcome:
    """A call of tests/support/random_calls.py.

    Raises:
        AssertionError: with the call, so that it can be repeated.
    """
    try:
        with package_launches(target, True, None) as executions, poisoned():
            share = random_calls.check(op, "triton", Draw(f"{day}:{op}:{number}"), approximate=True)
    except Exception as error:
        raise AssertionError(f"{day}:{op}:{number} on {target}: {error}") from error
    return outcome(share, executions)


def problems(result: Outcome) -> list[str]:
    """The findings other than uninitialised registers. nvcc adds them where a select discards the sum, Triton for
    sm_120 in halves of pairs that nothing reads: they are NaN here, and a result that depends on one is not finite.
    """
    return [line for line in result.lines if ": uninitialised: " not in line]


@functools.cache
def _launches(operation: str, target: str) -> list[Launch]:
    return launches([operation], [capability_of(target)])


def decoded(operation: str, target: str, seed: str, count: int) -> int:
    """Compile some of the launches that the gates compile, and decode each instruction; returns how many.

    Raises:
        Refused: an instruction that is not implemented.
    """
    found = _launches(operation, target)
    instructions = 0
    for launch in random.Random(f"{seed}:{operation}:{target}").sample(found, min(count, len(found))):
        compiled = compile_launch(launch)
        kernel, shared = parse(compiled.asm["ptx"]), compiled.metadata.shared
        parameters = {name: bytes(size) for name, size in kernel.parameters}
        Machine(kernel, Global([], 4, False), parameters, (1, 1, 1), [0], kernel.threads or 32, max(shared, 16), True)
        instructions += len(kernel.code)
    return instructions
