"""From which size on a kernel is faster than PyTorch's operator on a CPU, and the calls that "auto" leaves for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops import _crossover_table
from transformer_kernels.ops._crossover_table import NEVER, TABLE
from transformer_kernels.ops._dropout import compiled
from transformer_kernels.ops._plan import dispatch_modes, is_jit_tracing

TABLE_FILE = _crossover_table.__file__
LEVELS = {"avx512": "avx512", "avx512_bf16": "avx512", "amx": "amx"}
"""The table of an instruction set; "avx2" that of all others."""


def level() -> str:
    """The table of the instruction set that the CPU kernels use."""
    module = compiled()
    return "avx2" if module is None else LEVELS.get(module.instruction_set(), "avx2")


def crossover(name: str, itemsize: int) -> tuple[int, int]:
    """Elements from which our kernel is the faster one, forward alone and with gradients; 0 without an entry."""
    return TABLE[level()].get((name, itemsize), (0, 0))


def described(name: str, x: Tensor) -> str | None:
    """Which calls `patch` and `accelerate` leave to PyTorch in "auto" on a CPU, for `explain`."""
    forward, training = crossover(name, x.dtype.itemsize)
    if not x.is_cpu or (forward, training) == (0, 0):
        return None
    sizes = ["of any size" if each == NEVER else f"of fewer than {each} elements" for each in (forward, training)]
    return f"patch and accelerate leave calls {sizes[0]}, with gradients {sizes[1]}, to PyTorch ({level()})"


def prefers_torch(
    name: str, elements: int, itemsize: int, *, recorded: bool, random: bool = False, column: str | None = None
) -> bool:
    """Whether PyTorch computes an operation on a CPU in less time than this package: the decision of "auto".

    A function of its arguments and of the instruction set in use.

    Args:
        name: an operation of the table of crossovers; no other one is PyTorch's.
        elements: as counted in the table.
        itemsize: bytes of an element, in the dtype in which it is computed.
        recorded: whether autograd records the call.
        random: whether it draws random numbers. Then `recorded` is ignored: activation checkpointing runs a call
            without gradients, and again with them, and both must draw the same numbers.
        column: of the table; that of the instruction set in use unless given.
    """
    forward, training = TABLE[column or level()].get((name, itemsize), (0, 0))
    return elements < (training if recorded or random else forward)


def is_small(name: str, x: Tensor, elements: int, backend: str | None, random: bool = False) -> bool:
    """Whether an operation of so many elements is inference on a CPU in which PyTorch's operators are faster.

    Not so where it draws random numbers, which recomputation with gradients must draw again.
    """
    if random or torch.is_grad_enabled() or not is_automatic(x, backend):
        return False
    return elements < crossover(name, x.dtype.itemsize)[0]


def is_automatic(x: Tensor, backend: str | None) -> bool:
    """Whether a call that reads x on a CPU is eager and in the backend "auto", so that the sizes above decide."""
    if not x.is_cpu or is_compiling() or dispatch_modes() or is_jit_tracing():
        return False
    return requested(backend) == "auto"


def small_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float | None, backend: str | None
) -> Tensor | None:
    """PyTorch's attention where it is the faster one and means the same; None for all other calls.

    Args:
        q: (B, H, Lq, D). k, v: (B, Hk, Lk, D), Hk divides H. bias: broadcasts to (B, H, Lq, Lk).
    """
    queries, keys = q.shape[2], k.shape[2]
    sees_all = queries == 1 or not causal
    if not sees_all and (queries != keys or bias is not None):
        return None
    if not is_small("attention", q, math.prod(q.shape[:3]) * keys, backend):
        return None
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, bias, is_causal=not sees_all, scale=scale, enable_gqa=grouped)
