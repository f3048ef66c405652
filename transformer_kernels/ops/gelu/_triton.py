"""GELU in Triton: flat tensors, 16-byte accesses, fp32 arithmetic."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, gelu_slope, gelu_value, to_fp32
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, flat
from transformer_kernels.ops.gelu import GeluCall

FORWARD = Tiles("gelu forward", flat, widest=1, narrowest=2)  # one tile for every count
BACKWARD = Tiles("gelu backward", flat, widest=1, narrowest=2)


@triton.jit(do_not_specialize=["count"])
def gelu_forward_kernel(x, y, count, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns BLOCK_N elements; only the last one pays for a mask, so any count is read in 16-byte vectors."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    x += start
    y += start
    if start + BLOCK_N <= count:
        values = to_fp32(tl.load(x + lanes))  # [BLOCK_N]
        tl.store(y + lanes, from_fp32(gelu_value(values, TANH), y.dtype.element_ty))
    else:
        inside = lanes < count - start
        values = to_fp32(tl.load(x + lanes, mask=inside, other=0.0))
        tl.store(y + lanes, from_fp32(gelu_value(values, TANH), y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def gelu_backward_kernel(dy, x, dx, count, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns BLOCK_N elements: dx = dy * gelu'(x)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    dy += start
    x += start
    dx += start
    if start + BLOCK_N <= count:
        gradient = to_fp32(tl.load(dy + lanes))  # [BLOCK_N]
        values = to_fp32(tl.load(x + lanes))
        tl.store(dx + lanes, from_fp32(gradient * gelu_slope(values, TANH), dx.dtype.element_ty))
    else:
        inside = lanes < count - start
        gradient = to_fp32(tl.load(dy + lanes, mask=inside, other=0.0))
        values = to_fp32(tl.load(x + lanes, mask=inside, other=0.0))
        tl.store(dx + lanes, from_fp32(gradient * gelu_slope(values, TANH), dx.dtype.element_ty), mask=inside)


def forward(call: GeluCall) -> Tensor:
    """y = gelu(x)."""
    x = call.x
    count = x.numel()
    tile = FORWARD.find(_triton.capability(x.device), x.element_size(), count)
    y = torch.empty_like(x)
    _launch(gelu_forward_kernel, tile, count, call.approximate)(x, y)
    return y


def backward(call: GeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor]:
    """dx = dy * gelu'(x)."""
    x, (dy,) = call.x, grads
    count = x.numel()
    tile = BACKWARD.find(_triton.capability(x.device), x.element_size(), count)
    dx = torch.empty_like(x)
    _launch(gelu_backward_kernel, tile, count, call.approximate)(dy, x, dx)
    return (dx,)


@_triton.planned
def _launch(kernel: Any, tile: RowTile, count: int, approximate: str) -> _triton.Launch:
    grid = (_triton.ceil_div(count, tile.columns),)
    return _triton.Launch(kernel, grid, (count,), (approximate == "tanh", tile.columns), tile.num_warps)
