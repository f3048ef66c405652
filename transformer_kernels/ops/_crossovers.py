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
from transformer_kernels.ops._crossover_table import NEVER, TABLE, Limit
from transformer_kernels.ops._dropout import compiled
from transformer_kernels.ops._plan import any_autocast, dispatch_modes, is_jit_tracing

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
    return TABLE[column or level()].get((name, itemsize), (0, 0))


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


def prefers_torch(
    name: str, elements: int, itemsize: int, *, recorded: bool, random: bool = False, column: str | None = None
) -> bool:
    """Whether PyTorch computes an operation on a CPU in less time than this package: the decision of "auto".

    A function of its arguments, of the instruction set in use, and of whether results are reproducible: then never.

    Args:
        name: an operation of the table of crossovers; no other one is PyTorch's.
        elements: as counted in the table.
        itemsize: bytes of an element, in the dtype in which it is computed.
        recorded: whether autograd records the call.
        random: whether it draws random numbers. Then `recorded` is ignored: activation checkpointing runs a call
            without gradients, and again with them, and both must draw the same numbers.
        column: of the table; by default the column of the instruction set in use.
    """
    if cpu.is_reproducible():
        return False
    forward, training = crossover(name, itemsize, column)
    limit = training if recorded or random else forward
    return limit[0] <= elements < limit[1] if isinstance(limit, tuple) else elements < limit


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


def is_small(limit: int | str, x: Tensor, backend: str | None) -> bool:
    """Whether a call that reads x is eager inference on a CPU in "auto", of fewer elements than a limit.

    Not for calls that draw random numbers, which recomputation with gradients must draw again.

    Args:
        limit: a number of elements, or an operation whose crossover it is.
    """
    if torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() or is_jit_tracing() or not x.is_cpu:
        return False
    if (get_backend() if backend is None else backend) != "auto":
        return False
    first, end = _of_pytorch(limit, x.dtype)
    return first <= x.numel() < end


@functools.cache
def _of_pytorch(limit: int | str, dtype: torch.dtype) -> tuple[int, int]:
    """The first size that is PyTorch's in inference, and the first that is not."""
    if cpu.is_reproducible():
        return 0, 0
    found = limit if isinstance(limit, int) else crossover(limit, dtype.itemsize)[0]
    return found if isinstance(found, tuple) else (0, found)


cpu.dependents.append(_of_pytorch.cache_clear)
