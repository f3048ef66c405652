"""Dropout for the torch backend: the philox mask of `python_ref.ops`, in compiled code or else in fewer passes.

A mask is a pure function of its seed. On the CPU a compiled kernel (csrc/cpu/rows/dropout.cpp) draws it while it is
applied, and draws it again in the backward pass, as the kernels do. Where it was not built, on other devices and for
other dtypes the mask is made in tensor algebra; that costs eighty passes, so it is cached for as long as its seed
lives. The bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from transformer_kernels.backends import address, cpu
from transformer_kernels.backends.errors import BackendUnavailable

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 0xFFFFFFFF

GROUPS_AT_ONCE = 1 << 17  # enough for all cores to share an operation, and few enough to stay in the cache

Region = tuple[int, int, int, int, int, int]  # first head, heads, rows, columns, first row, first column

_cached: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def compiled() -> Any | None:
    """The module of the CPU kernels; None where it does not load."""
    try:
        return cpu.load()
    except BackendUnavailable:
        return None


def draw_seed(device: torch.device) -> Tensor:
    """One dropout seed, int64 (1,) in [0, 2^63), from torch's default generator of `device`."""
    return torch.randint(0, 2**63 - 1, (1,), device=device, dtype=torch.int64)


def keep_threshold(p: float) -> int:
    """The least 16 bits that keep an element."""
    return round(p * 2**16)


def keep_scale(p: float) -> float:
    """The factor of a kept element: one over the expected fraction of kept elements; 0 if all are dropped."""
    kept = 1.0 - keep_threshold(p) / 2**16
    return 1.0 / kept if kept > 0.0 else 0.0


def drop(
    x: Tensor,
    seed: Tensor,
    p: float,
    *,
    scale: float = 1.0,
    residual: Tensor | None = None,
    first_head: int = 0,
    first: int = 0,
    first_column: int | None = None,
    in_place: bool = False,
) -> Tensor:
    """(x * scale where an element is kept, else 0) + residual, for a contiguous x (..., rows, columns).

    The counter of an element is (column // 8, row, head, 0). Heads (the flattened leading axes) are counted from
    `first_head`, rows and columns from `first`, the offset of one packed sequence. If the columns are packed
    differently, they are counted from `first_column`.
    """
    *heads, rows, columns = x.shape
    first_column = first if first_column is None else first_column
    shape = math.prod(heads), rows, columns
    alike = x.device.type == "cpu" and x.dtype in cpu.DTYPE_CODES and first == first_column
    kernels = compiled() if alike else None
    if kernels is not None:
        out = x if in_place else torch.empty_like(x)
        addresses = x.data_ptr(), address(residual), out.data_ptr(), seed.data_ptr()
        kernels.dropout(cpu.DTYPE_CODES[x.dtype], *addresses, p, scale, first_head, *shape, first)
        return out
    mask = _dropped(seed, p, (first_head, *shape, first, first_column)).view(x.shape)
    kept = x.masked_fill_(mask, 0.0) if in_place else x.masked_fill(mask, 0.0)
    if residual is not None:
        return torch.add(residual, kept, alpha=scale)
    return kept if scale == 1.0 else kept.mul_(scale)


def dropped_rows(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Dropout of the rows of x (..., N), by PyTorch's differentiable operators."""
    return _kept(x, seed, p, 1, math.prod(x.shape[:-1]))


def _kept(x: Tensor, seed: Tensor, p: float, heads: int, rows: int) -> Tensor:
    """Dropout of x (..., N) as so many heads and rows, by PyTorch's differentiable operators."""
    mask = dropped_in(seed, p, (0, heads, rows, x.shape[-1], 0, 0))
    return x.masked_fill(mask.view(x.shape), 0.0) * keep_scale(p)


def dropped_in(seed: Tensor, p: float, region: Region) -> Tensor:
    """Where dropout drops, bool (heads, rows, columns), drawn anew; vmap may batch the seed."""
    if not torch._C._are_functorch_transforms_active():
        return _draw(seed, p, region)
    first_head, heads, rows, columns, first, first_column = region
    skipped = first_column % 8
    counts = -(-(skipped + columns) // 8), rows, heads
    group, row, head = (torch.arange(count, device=seed.device) for count in counts)
    counters = group + first_column // 8, row[:, None] + first, head[:, None, None] + first_head
    words = _philox(_keys(seed & WORD, seed >> 32), *counters, _mixed_out_of_place)
    shifted = torch.broadcast_tensors(*(word >> shift & 0xFFFF for word in words for shift in (0, 16)))
    return (torch.stack(shifted, dim=-1) < keep_threshold(p)).flatten(-2)[..., skipped : skipped + columns]


def _dropped(seed: Tensor, p: float, region: Region) -> Tensor:
    """Where dropout drops, bool (heads, rows, columns)."""
    masks = _cached.setdefault(seed, {})
    if (p, region) not in masks:
        masks[p, region] = _draw(seed, p, region)
    return masks[p, region]


def _draw(seed: Tensor, p: float, region: Region) -> Tensor:
    """The mask, made in chunks of whole rows that stay in the cache."""
    first_head, heads, rows, columns, first, first_column = region
    skipped = first_column % 8  # columns of the first group of eight
    groups = -(-(skipped + columns) // 8)
    total = heads * rows
    mask = torch.empty(total, groups * 8, dtype=torch.bool, device=seed.device)
    group = torch.arange(groups, device=seed.device) + first_column // 8
    keys = _key_schedule(seed)
    at_once = max(1, GROUPS_AT_ONCE // max(groups, 1)) if seed.device.type == "cpu" else total
    for start in range(0, total, max(at_once, 1)):
        index = torch.arange(start, min(start + at_once, total), device=seed.device)
        head = torch.div(index, max(rows, 1), rounding_mode="floor")
        _philox_below(
            keys,
            group,
            (index - head * rows + first)[:, None],
            (head + first_head)[:, None],
            keep_threshold(p),
            mask[start : start + len(index)],
        )
    return mask.view(heads, rows, groups * 8)[..., skipped : skipped + columns]


def _key_schedule(seed: Tensor) -> list:
    """The key of each round: Python numbers on the CPU, tensors where reading the seed would stop the device."""
    return _keys(*((int(seed) & WORD, int(seed) >> 32) if seed.device.type == "cpu" else (seed & WORD, seed >> 32)))


def _keys(low: Any, high: Any) -> list:
    return [((low + i * WEYL[0]) & WORD, (high + i * WEYL[1]) & WORD) for i in range(ROUNDS)]


def _philox_below(keys: list, c0: Tensor, c1: Tensor, c2: Tensor, threshold: int, out: Tensor) -> None:
    """out[..., 8 g + i] = (16 bits i of counter (g, row, head, 0)) < threshold.

    Early rounds depend on one or two of the three coordinates only and stay small by broadcasting. Words are masked to
    32 bits just before they are multiplied; the high bits that an xor carries along until then do no harm.
    """
    halves = out.view(*out.shape[:-1], -1, 8)
    for i, word in enumerate(_philox(keys, c0, c1, c2, _mixed)):
        torch.lt(word & 0xFFFF, threshold, out=halves[..., 2 * i])
        torch.lt(word >> 16 & 0xFFFF, threshold, out=halves[..., 2 * i + 1])


def _philox(keys: list, c0: Tensor, c1: Tensor, c2: Tensor, mixed: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """The four words of the counters (c0, c1, c2, 0)."""
    c3: Tensor | int = 0
    for key0, key1 in keys:
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = mixed(product1 >> 32, c1, key0)
        c2 = mixed(product0 >> 32, c3, key1)
        c1, c3 = product1, product0
    assert isinstance(c3, Tensor)
    return c0, c1, c2, c3


def _mixed_out_of_place(high: Tensor, other: Tensor | int, key: Tensor | int) -> Tensor:
    """(high ^ other ^ key) in 32 bits."""
    return (high ^ other ^ key) & WORD


def _mixed(high: Tensor, other: Tensor | int, key: Tensor | int) -> Tensor:
    """(high ^ other ^ key) in 32 bits, written over `high` where the shapes allow."""
    if isinstance(other, Tensor) and torch.broadcast_shapes(high.shape, other.shape) != high.shape:
        return (high ^ other).bitwise_xor_(key).bitwise_and_(WORD)
    return high.bitwise_xor_(other).bitwise_xor_(key).bitwise_and_(WORD)


MIN_DROPPED = 1 << 13
"""Elements from which the kernel is faster than torch's dropout."""


class _Dropout(torch.autograd.Function):
    """dropout(x) + residual; the mask is drawn again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, p: float) -> Tensor:
        seed = draw_seed(x.device)
        ctx.save_for_backward(seed)
        ctx.p, ctx.has_residual = p, residual is not None
        return drop(x, seed, p, scale=keep_scale(p), residual=residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():  # under create_graph
            dx = _kept(dy, seed, ctx.p, math.prod(dy.shape[:-2]), dy.shape[-2])
        elif ctx.needs_input_grad[0]:
            dx = drop(dy.contiguous(), seed, ctx.p, scale=keep_scale(ctx.p))
        return dx, dy if ctx.has_residual else None, None


def has_dropout_kernel(x: Tensor) -> bool:
    """Whether a compiled kernel draws the mask of x as it is applied."""
    return x.is_cpu and x.dtype in cpu.DTYPE_CODES and x.dim() >= 2 and compiled() is not None


def dropout(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """dropout(x) + residual in one pass, without a mask in memory.

    Args:
        x: (..., N) with two axes or more.
        p: the probability with which an element is dropped.
        residual: in the shape and dtype of x, or None.
    """
    residual = None if residual is None else residual.contiguous()
    result: Tensor = _Dropout.apply(x.contiguous(), residual, p)
    return result
