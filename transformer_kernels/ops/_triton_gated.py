"""Triton kernels of swiglu and geglu: activation(gate) * up and both gradients, each in one pass."""

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
    tile, grid, numbers = _tiling(y)
    with _triton.launching_on(gate.device):
        gated_forward_kernel[grid](
            gate, up, y, *numbers[:2], kind, numbers[2], tile.rows, tile.columns, num_warps=tile.num_warps, num_stages=1
        )
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup); dup is None where gate holds both, and then so does dgate."""
    dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    tile, grid, numbers = _tiling(dy)
    with _triton.launching_on(gate.device):
        gated_backward_kernel[grid](
            dy, gate, up, dgate, dup, *numbers[:2], kind, numbers[2], tile.rows, tile.columns,
            num_warps=tile.num_warps, num_stages=1,
        )  # fmt: skip
    return dgate, dup


def _tiling(y: Tensor) -> tuple[RowTile, tuple[int, int], tuple[int, int, int]]:
    """The tile, the grid, and M, N, VECTOR."""
    N = y.shape[-1]
    M = y.numel() // N
    tile = TILES.find(_triton.capability(y.device), y.element_size(), N)
    grid = _triton.ceil_div(M, tile.rows), _triton.ceil_div(N, tile.columns)
    return tile, grid, (M, N, _triton.vector_width(y.element_size(), N))
