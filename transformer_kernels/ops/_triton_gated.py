"""Triton kernels of swiglu and geglu: activation(gate) * up and both gradients, each in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, gelu_slope, gelu_value, to_fp32
from transformer_kernels.backends.triton_tiles import RowTile, Tiles, column_blocks
from transformer_kernels.ops._gated import output_like

TILES = Tiles("gated activation", column_blocks, widest=512)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """silu(x), or gelu(x) of the kind "none" or "tanh", and its slope."""
    if KIND == "silu":
        gate = tl.sigmoid(x)
        value = x * gate
        slope = gate + value * (1.0 - gate)
    else:
        value = gelu_value(x, KIND == "tanh")
        slope = gelu_slope(x, KIND == "tanh")
    return value, slope


@triton.jit
def tile_offsets(up, M, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of one program's tile [ROWS, BLOCK_N]: what is inside, its offsets in (M, N), and in gate's rows.

    Without `up` a row of gate is followed by the row of up that it is multiplied by: they are N apart, rows 2 N.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < M) & (column < N)
    offsets = row * N + column
    return inside, offsets, offsets + (row * N if up is None else 0)


@triton.jit(do_not_specialize=["M", "N"])
def gated_forward_kernel(
    gate, up, y, M, N, KIND: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program owns ROWS x BLOCK_N elements: y = activation(gate) * up."""
    N = N // VECTOR * VECTOR  # tells the compiler the alignment of a row without a recompilation for each width
    inside, offsets, gate_offsets = tile_offsets(up, M, N, ROWS, BLOCK_N)
    source = gate + N if up is None else up
    values = to_fp32(tl.load(gate + gate_offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
    factor = to_fp32(tl.load(source + gate_offsets, mask=inside, other=0.0))
    value, _ = activation(values, KIND)
    tl.store(y + offsets, from_fp32(value * factor, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def gated_backward_kernel(
    dy, gate, up, dgate, dup, M, N, KIND: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program owns ROWS x BLOCK_N elements: dgate = dy * up * slope(gate), dup = dy * activation(gate)."""
    N = N // VECTOR * VECTOR
    inside, offsets, gate_offsets = tile_offsets(up, M, N, ROWS, BLOCK_N)
    source = gate + N if up is None else up
    target = dgate + N if up is None else dup
    gradient = to_fp32(tl.load(dy + offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
    values = to_fp32(tl.load(gate + gate_offsets, mask=inside, other=0.0))
    factor = to_fp32(tl.load(source + gate_offsets, mask=inside, other=0.0))
    value, slope = activation(values, KIND)
    tl.store(dgate + gate_offsets, from_fp32(gradient * factor * slope, dgate.dtype.element_ty), mask=inside)
    tl.store(target + gate_offsets, from_fp32(gradient * value, dgate.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """activation(gate) * up."""
    y = output_like(gate, up)
    _launch(gated_forward_kernel, y, kind)(gate, up, y)
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup); dup is None where gate holds both, and then so does dgate."""
    dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    _launch(gated_backward_kernel, dy, kind)(dy, gate, up, dgate, dup)
    return dgate, dup


def _launch(kernel: Any, y: Tensor, kind: str) -> _triton.Launch:
    """The launch of a kernel whose rows are those of y."""
    N, itemsize = y.shape[-1], y.element_size()
    tile = TILES.find(_triton.capability(y.device), itemsize, N)
    return _planned_launch(kernel, tile, y.numel() // N, N, itemsize, kind)


@_triton.planned
def _planned_launch(kernel: Any, tile: RowTile, M: int, N: int, itemsize: int, kind: str) -> _triton.Launch:
    grid = _triton.ceil_div(M, tile.rows), _triton.ceil_div(N, tile.columns)
    constants = (kind, _triton.vector_width(itemsize, N), tile.rows, tile.columns)
    return _triton.Launch(kernel, grid, (M, N), constants, tile.num_warps)
