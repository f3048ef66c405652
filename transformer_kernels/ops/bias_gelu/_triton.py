"""gelu(x + bias) in Triton, and its gradients: the bias is added in fp32, dbias is summed without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels import _triton
from transformer_kernels._triton import Configuration
from transformer_kernels._triton_language import from_fp32, gelu_slope, gelu_value, to_fp32
from transformer_kernels._triton_reduce import sum_partials
from transformer_kernels.ops.bias_gelu._triton_table import BACKWARD, FORWARD


@triton.jit(do_not_specialize=["M", "N"])
def bias_gelu_forward_kernel(
    x, bias, y, M, N, TANH: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
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
    tl.store(y + row * N + columns, from_fp32(gelu_value(values, TANH), y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def bias_gelu_backward_kernel(
    dy, x, bias, dx, partials, M, N, TANH: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N columns of every num_programs(1)-th tile of rows: their dx, and its sum for dbias."""
    N = N // VECTOR * VECTOR
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    shift = to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(share, tl.cdiv(M, ROWS), shares, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        values = to_fp32(tl.load(x + row * N + columns, mask=inside, other=0.0)) + shift
        gradient *= gelu_slope(values, TANH)
        dbias_sum += gradient
        tl.store(dx + row * N + columns, from_fp32(gradient, dx.dtype.element_ty), mask=inside)
    partial = partials + share.to(tl.int64) * N + columns  # [1, BLOCK_N] of (shares, N)
    tl.store(partial, tl.sum(dbias_sum, axis=0, keep_dims=True), mask=columns < N)


def unsupported(x: Tensor, bias: Tensor, approximate: str) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)


def forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """y = gelu(x + bias), the sum in fp32."""
    N = x.shape[-1]
    M = x.numel() // N
    tile = FORWARD.find(_triton.capability(x.device), x.element_size(), N)
    vector = _triton.vector_width(x.element_size(), N)
    y = torch.empty_like(x)
    grid = (_triton.ceil_div(M, tile.rows) * _triton.ceil_div(N, tile.columns),)
    with _triton.launching_on(x.device):
        bias_gelu_forward_kernel[grid](
            x, bias, y, M, N, approximate == "tanh", vector, tile.rows, tile.columns,
            num_warps=tile.num_warps, num_stages=1,
        )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(dx, dbias) with dx = dy * gelu'(x + bias) and dbias the sum of its unrounded rows."""
    N = x.shape[-1]
    M = x.numel() // N
    tile = BACKWARD.find(_triton.capability(x.device), x.element_size(), N)
    vector = _triton.vector_width(x.element_size(), N)
    column_blocks = _triton.ceil_div(N, tile.columns)
    programs = tile.programs * _triton.multiprocessors(x.device)
    shares = min(_triton.ceil_div(M, tile.rows), _triton.ceil_div(programs, column_blocks))
    dx = torch.empty_like(x)
    partials = torch.empty((1, shares, N), dtype=torch.float32, device=x.device)
    with _triton.launching_on(x.device):
        bias_gelu_backward_kernel[(column_blocks, shares)](
            dy, x, bias, dx, partials, M, N, approximate == "tanh", vector, tile.num_stages, tile.rows, tile.columns,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        (dbias,) = sum_partials(partials, bias.dtype)
    return dx, dbias


def configurations() -> list[Configuration]:
    """Every compilation that the tables lead to for aligned rows, for the ahead-of-time report."""
    return [
        _triton.configuration(
            f"bias_gelu {direction} {approximate} {_triton.width_label(dtype, width)}",
            kernel,
            {
                **dict.fromkeys(("dy", "x", "bias", "y", "dx"), dtype),
                "partials": torch.float32,
                "M": "i32",
                "N": "i32",
                "TANH": approximate == "tanh",
                "VECTOR": 16 // dtype.itemsize,
                "STAGES": tile.num_stages,
            },
            tile,
            capability,
        )
        for direction, kernel, table in (
            ("forward", bias_gelu_forward_kernel, FORWARD),
            ("backward", bias_gelu_backward_kernel, BACKWARD),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for capability in table.capabilities(dtype.itemsize)
        for width, tile in table.entries(capability, dtype.itemsize)
        for approximate in ("none", "tanh")
    ]
