"""Activations in Triton, fp32 arithmetic: GELU over flat tensors, f(x + bias), and f(gate) * up.

x + bias is not rounded; dbias sums unrounded dx without atomics.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, gelu_slope, gelu_value, to_fp32
from transformer_kernels.backends.triton_reduce import Partials
from transformer_kernels.backends.triton_tiles import Tiles, column_blocks, flat, persistent_blocks
from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.activation import ActivationCall

GELU_FORWARD = Tiles("gelu forward", flat, widest=1, narrowest=2)  # one tile size for every count
GELU_BACKWARD = Tiles("gelu backward", flat, widest=1, narrowest=2)
BIAS_GELU_FORWARD = Tiles("bias_gelu forward", column_blocks, widest=256, narrowest=64)
BIAS_GELU_BACKWARD = Tiles("bias_gelu backward", persistent_blocks, widest=256, narrowest=64)
BIAS_RELU_FORWARD = Tiles("bias_relu forward", column_blocks, widest=256, narrowest=64)
BIAS_RELU_BACKWARD = Tiles("bias_relu backward", persistent_blocks, widest=256, narrowest=64)
GATED = Tiles("gated activation", column_blocks, widest=512)


@triton.jit(do_not_specialize=["count"])
def gelu_forward_kernel(x, y, count, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns BLOCK_N elements; only the last program masks, so any count uses 16-byte vectors."""
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


@triton.jit
def activated(x, KIND: tl.constexpr):
    """f(x) in fp32 for a kind of `ActivationCall`."""
    if KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x)  # propagates NaN
    if KIND == "silu":
        return x * tl.sigmoid(x)
    return gelu_value(x, KIND == "gelu_tanh")


@triton.jit
def activated_backward(gradient, x, KIND: tl.constexpr):
    """gradient * f'(x) in fp32. relu takes f(x) as x and selects: 0 also for an infinite gradient."""
    if KIND == "relu":
        return tl.where(x <= 0.0, 0.0, gradient)
    if KIND == "silu":
        gate = tl.sigmoid(x)
        return gradient * (gate + x * gate * (1.0 - gate))
    return gradient * gelu_slope(x, KIND == "gelu_tanh")


@triton.jit(do_not_specialize=["M", "N"])
def bias_activation_forward_kernel(
    x, bias, y, M, N, KIND: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program owns a tile of ROWS x BLOCK_N elements; adjacent programs own adjacent columns."""
    N = N // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    column_blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = program % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (row < M) & (columns < N)
    shift = to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))  # [1, BLOCK_N]
    values = to_fp32(tl.load(x + row * N + columns, mask=inside, other=0.0)) + shift  # [ROWS, BLOCK_N]
    tl.store(y + row * N + columns, from_fp32(activated(values, KIND), y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def bias_activation_backward_kernel(
    dy, saved, bias, dx, partials, M, N, KIND: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N columns of every num_programs(1)-th tile of rows: dx, and its sum for dbias.

    `saved` is x if `bias` is given, else the input of the activation's gradient (y of relu).
    """
    N = N // VECTOR * VECTOR
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    if bias is not None:
        shift = to_fp32(tl.load(bias + columns, mask=columns < N, other=0.0))
    dbias_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(share, tl.cdiv(M, ROWS), shares, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + rows
        inside = (row < M) & (columns < N)
        gradient = to_fp32(tl.load(dy + row * N + columns, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
        values = to_fp32(tl.load(saved + row * N + columns, mask=inside, other=0.0))
        if bias is not None:
            values += shift
        gradient = activated_backward(gradient, values, KIND)
        dbias_sum += gradient
        tl.store(dx + row * N + columns, from_fp32(gradient, dx.dtype.element_ty), mask=inside)
    partial = partials + share.to(tl.int64) * N + columns  # [1, BLOCK_N] of (shares, N)
    tl.store(partial, tl.sum(dbias_sum, axis=0, keep_dims=True), mask=columns < N)


@triton.jit
def tile_offsets(up, M, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mask, offsets in (M, N) and offsets in `gate` of one program's tile [ROWS, BLOCK_N].

    If `up` is None, `gate` is packed (M, 2 N): each row is a row of gate followed by a row of up.
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
    N = N // VECTOR * VECTOR  # a multiple of VECTOR: aligned rows without specialising N
    inside, offsets, gate_offsets = tile_offsets(up, M, N, ROWS, BLOCK_N)
    source = gate + N if up is None else up
    values = to_fp32(tl.load(gate + gate_offsets, mask=inside, other=0.0))  # [ROWS, BLOCK_N]
    factor = to_fp32(tl.load(source + gate_offsets, mask=inside, other=0.0))
    tl.store(y + offsets, from_fp32(activated(values, KIND) * factor, y.dtype.element_ty), mask=inside)


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
    result = activated_backward(gradient * factor, values, KIND)
    tl.store(dgate + gate_offsets, from_fp32(result, dgate.dtype.element_ty), mask=inside)
    result = gradient * activated(values, KIND)
    tl.store(target + gate_offsets, from_fp32(result, dgate.dtype.element_ty), mask=inside)


Gradients = tuple[Tensor, Tensor | None, Tensor | None]


class Kernels(_kernels.Kernels):
    """Activations by Triton for calls of one layout."""

    def __init__(self, call: ActivationCall) -> None:
        x, kind = call.x, call.kind
        if call.gated:
            y = call.fake()
            tile, M, N = GATED.of_rows(y)
            constants = (kind, _triton.vector_width(x.element_size(), N))
            kernels = gated_forward_kernel, gated_backward_kernel
            self._forward, self._backward = (
                tile.launch(kernel, tile.grid(M, N), (M, N), constants) for kernel in kernels
            )
        elif call.bias is None:
            self._forward = _flat(gelu_forward_kernel, GELU_FORWARD, call)
            self._backward = _flat(gelu_backward_kernel, GELU_BACKWARD, call)
        else:
            relu = kind == "relu"
            tile, M, N = (BIAS_RELU_FORWARD if relu else BIAS_GELU_FORWARD).of_rows(x)
            vector, tiles = _triton.vector_width(x.element_size(), N), math.prod(tile.grid(M, N))
            self._forward = tile.launch(bias_activation_forward_kernel, (tiles,), (M, N), (kind, vector))
            tile = (BIAS_RELU_BACKWARD if relu else BIAS_GELU_BACKWARD).of_rows(x)[0]
            blocks = _triton.ceil_div(N, tile.columns)
            shares, kernel = tile.shares(M, x.device, blocks), bias_activation_backward_kernel
            self._backward = tile.launch(kernel, (blocks, shares), (M, N), (kind, vector, tile.num_stages))
            self._partials = Partials(1, shares, N)

    def forward(self, call: ActivationCall) -> Tensor:
        """f(x + bias), or f(gate) * up."""
        y = call.fake()
        if call.gated:
            self._forward(call.x, call.up, y)
        elif call.bias is None:
            self._forward(call.x, y)
        else:
            self._forward(call.x, call.bias, y)
        return y

    def backward(self, call: ActivationCall, result: Tensor | None, grads: Grads, wanted: Wanted) -> Gradients:
        """dx, dbias and dup; for a packed projection dx contains both gradients."""
        (dy,), saved = grads, call.x if result is None else result
        dx, dup = torch.empty_like(saved), None if call.up is None else torch.empty_like(call.up)
        if call.gated:
            self._backward(dy, saved, call.up, dx, dup)
            return dx, None, dup
        if call.bias is None:
            self._backward(dy, saved, dx)
            return dx, None, None
        partials = self._partials.empty(saved.device)
        self._backward(dy, saved, call.bias if result is None else None, dx, partials)
        return dx, self._partials.sum(partials, call.bias.dtype)[0], None


def _flat(kernel: Any, tiles: Tiles, call: ActivationCall) -> _triton.Launch:
    """A launch over the elements of x."""
    x = call.x
    tile, count = tiles.find(_triton.capability(x.device), x.element_size(), x.numel()), x.numel()
    constants = (call.kind == "gelu_tanh", tile.columns)
    return _triton.Launch(kernel, (_triton.ceil_div(count, tile.columns),), (count,), constants, tile.num_warps)
