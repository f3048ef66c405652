"""f(x + bias) in Triton and its gradients, for the activations of bias_gelu and bias_relu.

The bias is added in fp32 and the sum is not rounded; dbias is summed without atomics, over dx before it is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, gelu_slope, gelu_value, to_fp32
from transformer_kernels.backends.triton_reduce import sum_partials
from transformer_kernels.backends.triton_tiles import RowTile, Tiles

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2}
"""What ACTIVATION stands for in the kernels."""

GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
RELU = tl.constexpr(ACTIVATIONS["relu"])


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """f(x) in fp32 for one of ACTIVATIONS."""
    if ACTIVATION == RELU:
        return tl.where(x <= 0.0, 0.0, x)  # NaN stays
    return gelu_value(x, ACTIVATION == GELU_TANH)


@triton.jit
def activated_backward(gradient, x, ACTIVATION: tl.constexpr):
    """gradient * f'(x) in fp32. relu takes f(x) for x, and selects: 0 also where an infinite gradient meets it."""
    if ACTIVATION == RELU:
        return tl.where(x <= 0.0, 0.0, gradient)
    return gradient * gelu_slope(x, ACTIVATION == GELU_TANH)


@triton.jit(do_not_specialize=["M", "N"])
def bias_activation_forward_kernel(
    x, bias, y, M, N, ACTIVATION: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program owns a tile of ROWS x BLOCK_N elements; neighbouring programs own neighbouring columns."""
    N = N // VECTOR * VECTOR  # tells the compiler the alignment of a row without a recompilation for each width
    column_blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = program % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    shift = to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    values = to_fp32(tl.load(x + row * N + columns, mask=inside, other=0.0)) + shift  # [ROWS, BLOCK_N]
    tl.store(y + row * N + columns, from_fp32(activated(values, ACTIVATION), y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def bias_activation_backward_kernel(
    dy, saved, bias, dx, partials, M, N, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N columns of every num_programs(1)-th tile of rows: their dx, and its sum for dbias.

    `saved` is x where the bias is to be added again, else what the activation's gradient is taken from (y of relu).
    """
    N = N // VECTOR * VECTOR
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    if HAS_BIAS:
        shift = to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(share, tl.cdiv(M, ROWS), shares, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        values = to_fp32(tl.load(saved + row * N + columns, mask=inside, other=0.0))
        if HAS_BIAS:
            values += shift
        gradient = activated_backward(gradient, values, ACTIVATION)
        dbias_sum += gradient
        tl.store(dx + row * N + columns, from_fp32(gradient, dx.dtype.element_ty), mask=inside)
    partial = partials + share.to(tl.int64) * N + columns  # [1, BLOCK_N] of (shares, N)
    tl.store(partial, tl.sum(dbias_sum, axis=0, keep_dims=True), mask=columns < N)


def forward(x: Tensor, bias: Tensor, activation: str, tiles: Tiles) -> Tensor:
    """y = f(x + bias), the sum in fp32."""
    N = x.shape[-1]
    M = x.numel() // N
    tile = tiles.find(_triton.capability(x.device), x.element_size(), N)
    y = torch.empty_like(x)
    _forward_launch(tile, M, N, x.element_size(), activation)(x, bias, y)
    return y


@_triton.planned
def _forward_launch(tile: RowTile, M: int, N: int, itemsize: int, activation: str) -> _triton.Launch:
    grid = (_triton.ceil_div(M, tile.rows) * _triton.ceil_div(N, tile.columns),)
    constants = (ACTIVATIONS[activation], _triton.vector_width(itemsize, N), tile.rows, tile.columns)
    return _triton.Launch(bias_activation_forward_kernel, grid, (M, N), constants, tile.num_warps)


def backward(
    dy: Tensor, saved: Tensor, bias: Tensor | None, dbias_dtype: torch.dtype, activation: str, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """(dx, dbias), from x and the bias or, without one, from what f's gradient is taken from."""
    N = saved.shape[-1]
    M = saved.numel() // N
    tile = tiles.find(_triton.capability(saved.device), saved.element_size(), N)
    programs = tile.programs * _triton.multiprocessors(saved.device)
    shares, launch = _backward_launch(tile, M, N, saved.element_size(), activation, bias is not None, programs)
    dx = torch.empty_like(saved)
    partials = torch.empty((1, shares, N), dtype=torch.float32, device=saved.device)
    launch(dy, saved, bias, dx, partials)
    (dbias,) = sum_partials(partials, dbias_dtype)
    return dx, dbias


@_triton.planned
def _backward_launch(
    tile: RowTile, M: int, N: int, itemsize: int, activation: str, has_bias: bool, programs: int
) -> tuple[int, _triton.Launch]:
    """Into how many shares the rows are split, and the launch."""
    column_blocks = _triton.ceil_div(N, tile.columns)
    shares = min(_triton.ceil_div(M, tile.rows), _triton.ceil_div(programs, column_blocks))
    vector = _triton.vector_width(itemsize, N)
    constants = (ACTIVATIONS[activation], has_bias, vector, tile.num_stages, tile.rows, tile.columns)
    grid = (column_blocks, shares)
    return shares, _triton.Launch(
        bias_activation_backward_kernel, grid, (M, N), constants, tile.num_warps, tile.num_stages
    )
