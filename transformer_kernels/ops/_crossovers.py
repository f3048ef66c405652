"""From which size on a kernel is faster than PyTorch's operator on a CPU, and the calls that "auto" leaves for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import get_backend
from transformer_kernels.ops import _crossover_table
from transformer_kernels.ops._checks import PLAIN
from transformer_kernels.ops._crossover_table import NEVER, TABLE, Limit
from transformer_kernels.ops._dropout import compiled
from transformer_kernels.ops._plan import any_autocast, is_jit_tracing

TABLE_FILE = _crossover_table.__file__
LEVELS = {"avx512": "avx512", "avx512_bf16": "avx512", "amx": "amx"}
"""The column of the table for an instruction set; all others use "avx2"."""


@functools.cache
def level() -> str:
    """The table of the instruction set that the CPU kernels use."""
    module = compiled()
    return "avx2" if module is None else LEVELS.get(module.instruction_set(), "avx2")


cpu.dependents.append(level.cache_clear)


def crossover(name: str, itemsize: int, column: str | None = None) -> tuple[Limit, Limit]:
    """The sizes that are PyTorch's, forward alone and with gradients; none without an entry."""
    limits = TABLE[column or level()]
    return limits.get((name, itemsize)) or limits.get((name, 0), (0, 0))


def described(name: str, x: Tensor) -> str | None:
    """Which calls on a CPU "auto" leaves to PyTorch, for `explain`."""
    forward, training = crossover(name, x.dtype.itemsize)
    if not x.is_cpu or (forward, training) == (0, 0):
        return None
    return f"auto leaves calls {_size(forward)}, with gradients {_size(training)}, to PyTorch ({level()})"


def _size(limit: Limit) -> str:
    first, end = limit if isinstance(limit, tuple) else (0, limit)
    if end == NEVER:
        return f"of {first} elements or more" if first else "of any size"
    return f"of {first} to {end - 1} elements" if first else f"of fewer than {end} elements"


@functools.cache
def of_pytorch(name: str, itemsize: int, recorded: bool | None, column: str | None = None) -> tuple[int, int]:
    """The first size that PyTorch computes on a CPU in less time than this package, and the first that it does not.

    It decides for "auto" everywhere: in operations, patched modules, `accelerate` and graphs. A function of its
    arguments, of the instruction set in use, and of whether results are reproducible: then no size is PyTorch's.

    Args:
        name: a row of the table of crossovers; PyTorch computes nothing else.
        itemsize: bytes of an element, in the dtype in which it is computed.
        recorded: whether autograd records the call; None: the sizes that are PyTorch's in both cases.
        column: of the table; by default the column of the instruction set in use.
    """
    if cpu.is_reproducible():
        return 0, 0
    limits = [limit if isinstance(limit, tuple) else (0, limit) for limit in crossover(name, itemsize, column)]
    if recorded is None:
        return max(first for first, _ in limits), min(end for _, end in limits)
    return limits[recorded]


cpu.dependents.append(of_pytorch.cache_clear)


def prefers_torch(name: str, elements: int, itemsize: int, *, recorded: bool, random: bool = False) -> bool:
    """Whether a call of so many elements is PyTorch's.

    `random`: it draws random numbers. Then `recorded` is ignored: activation checkpointing runs a call without
    gradients, and again with them, and both must draw the same numbers.
    """
    first, end = of_pytorch(name, itemsize, recorded or random)
    return first <= elements < end


class Native(NamedTuple):
    """PyTorch's own function for a call, and what decides whether it is the faster one."""

    name: str  # in the table
    elements: int
    function: Callable[..., Any]  # of the arguments of the public function


def native(found: Native | None, call: Any, values: Sequence[Any]) -> Callable[..., Any] | None:
    """PyTorch's own function for calls of this layout in "auto", where it is exact and the faster one.

    Only in inference (in training a recorded step would have other bits than an eager one), in float32 on a CPU,
    without autocast, of tensors in one dtype, none of them empty, the first read in place.
    """
    x = call[0]
    if found is None or torch.is_grad_enabled() or any_autocast():
        return None
    if not x.is_cpu or x.dtype is not torch.float32 or x is not values[0]:
        return None
    for value in values:
        if isinstance(value, Tensor) and (value.dtype is not x.dtype or not value.numel()):
            return None
    return found.function if prefers_torch(found.name, found.elements, x.dtype.itemsize, recorded=False) else None


def is_small(name: str, x: Tensor, backend: str | None, recorded: bool, per_element: float = 1) -> bool:
    """Whether a module that reads x runs PyTorch's code: in "auto" on a CPU, for the sizes of a row of the table.

    Not where a graph for other sizes is made of it. The size is the number of elements of x times `per_element`.
    """
    if type(x) not in PLAIN or not x.is_cpu or is_dynamo_compiling() or is_jit_tracing():
        return False
    if (get_backend() if backend is None else backend) != "auto":
        return False
    first, end = of_pytorch(name, x.dtype.itemsize, recorded)
    return first <= x.numel() * per_element < end
