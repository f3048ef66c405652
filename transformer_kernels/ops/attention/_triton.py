"""Attention in Triton: kernel selection and launches."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops._dropout import keep_scale, keep_threshold
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention import _tiles as tiles
from transformer_kernels.ops.attention._common import (
    Angles,
    AttentionKernels,
    beyond,
    broadcast_strides,
    shift_gradient,
)
from transformer_kernels.ops.attention._tiles import Body, Kernel, Tile
from transformer_kernels.ops.attention._triton_backward import Backward, attention_backward_query_kernel
from transformer_kernels.ops.attention._triton_backward_bias import attention_backward_bias_kernel
from transformer_kernels.ops.attention._triton_backward_key import attention_backward_key_kernel
from transformer_kernels.ops.attention._triton_decode import attention_combine_kernel, attention_decode_kernel
from transformer_kernels.ops.attention._triton_forward import attention_forward_kernel
from transformer_kernels.ops.attention._triton_masks import attention_sequences_kernel
from transformer_kernels.ops.attention._triton_scores import Extras, ScoreOptions
from transformer_kernels.ops.attention._triton_short import (
    attention_short_backward_kernel,
    attention_short_forward_kernel,
)
from transformer_kernels.ops.attention._triton_tile import Inputs, Options


class Kernels(AttentionKernels):
    """Attention by Triton."""

    @classmethod
    def unsupported(cls, call: AttentionCall) -> str | None:
        """Why these kernels do not support the call, or None."""
        if (reason := beyond(call)) is not None:
            return reason
        if call.q.shape[3] > tiles.MAXIMUM_HEAD_DIM:
            return (
                f"supports head dimensions up to {tiles.MAXIMUM_HEAD_DIM}, not {call.q.shape[3]}; use backend='torch'"
            )
        return None

    @staticmethod
    def score_unit(dtype: torch.dtype) -> float:
        """Factor from natural logarithms to the unit of the statistics."""
        return 1.0 if dtype.itemsize == tiles.SINGLE else math.log2(math.e)

    @classmethod
    def rotates(cls, call: AttentionCall) -> bool:
        """Whether kernels rotate queries and keys as they load them; otherwise they receive rotated copies."""
        scores, keys = call.scores, call.k.shape[2]  # keys: visible per query, on average
        keys = keys // 2 if scores.causal else keys
        # The lengths of packed sequences are on the device; sequences are packed because they are short.
        keys = 0 if scores.cu_seqlens is not None else min(keys, scores.left + 1)
        narrow = (
            scores.bias is None and call.q.shape[3] <= tiles.ROTATED_HEAD_DIM and call.q.element_size() == tiles.HALF
        )
        return narrow and keys <= tiles.ROTATED_KEYS

    def forward(self, call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
        """Output and log-sum-exp."""
        inputs = _Inputs(call, angles)
        plan, q = inputs.plan, call.q
        out = torch.empty(plan.out_shape, dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
        statistics = torch.empty(plan.statistics_shape, dtype=torch.float32, device=q.device)
        if plan.is_decode:
            _decode(inputs, out, lse, statistics)
        elif (short := plan.short_forward) is not None:
            short(inputs.pointers, out, lse, statistics, inputs.extras)
        else:
            plan.forward(inputs.pointers, out, lse, statistics, inputs.extras)
        return AttentionResult(out, lse, statistics)

    def backward(
        self,
        call: AttentionCall,
        result: AttentionResult,
        grads: Grads,
        wanted: Wanted,
        into: Into | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv and, if required, dbias; dq, dk and dv are written to `into` if given."""
        (dout, dlse), statistics, q, k, v = grads, result.statistics, call.q, call.k, call.v
        out = result.out if result.out.transpose(1, 2).is_contiguous() else like_output(q).copy_(result.out)
        if into is None:  # in the layout of `out`, cheaper than `like_output`
            dk = torch.empty_like(out) if k.shape == out.shape else like_output(k)
            into = torch.empty_like(out), dk, torch.empty_like(dk)
        inputs = _Inputs(call, angles, dout, *into)
        plan = inputs.plan
        own = into if plan.in_place else (into[0], like_output(k), like_output(v))
        delta = None
        if plan.short_backward is None or wanted[3]:
            delta = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
        pointers = Backward(out, statistics, dout, dlse, delta, *own)
        without_dlse = pointers if dlse is None else pointers._replace(dlse=None)
        if plan.short_backward is not None:
            plan.short_backward(inputs.pointers, pointers, inputs.extras)
        else:
            plan.query_gradient(inputs.pointers, pointers, inputs.extras)
            plan.key_gradient(inputs.pointers, without_dlse, inputs.extras)
        dbias = _bias_gradient(inputs, without_dlse, dlse) if wanted[3] else None
        if own is not into:
            into[1].copy_(own[1])
            into[2].copy_(own[2])
        return *into, dbias


class _Plan:
    """The arguments of the kernels besides tensors (sizes, strides, scalars, compile-time options), and launches."""

    def __init__(
        self,
        q_shape: torch.Size,
        k_shape: torch.Size,
        strides: tuple[tuple[int, ...], ...],
        gradient_strides: tuple[tuple[int, ...], ...],
        bias: tuple[torch.Size, tuple[int, ...], int] | None,
        masks: tuple[bool, bool, bool, bool],
        rotary: tuple[int, bool, bool],
        reach: tuple[int, int],
        dropout_p: float,
        scale: float,
        softcap: float,
        dtype: torch.dtype,
        capability: _triton.Capability,
        multiprocessors: int,
        precision: str,
    ) -> None:
        padded, dropped, self.packed, self.sloped = masks
        self.batch, self.query_heads, self.queries, self.head_dim = q_shape
        self.key_heads, self.keys = k_shape[1], k_shape[2]
        self.group = self.query_heads // self.key_heads
        self.multiprocessors = multiprocessors
        self.itemsize, self.capability = dtype.itemsize, capability
        self.block_d = max(16, _triton.next_power_of_2(self.head_dim))
        tokens = self.queries + self.keys
        left, right = (min(limit, tokens) for limit in reach)
        causal, windowed = right == 0, left < tokens or 0 < right < tokens
        heavy = dropped or windowed or bias is not None or softcap > 0.0
        rows = Body.PADDED if padded else Body.LONG if self.keys >= tiles.LONG_KEYS else Body.CAUSAL
        light = Body.ROTATED if rotary[0] else rows if causal else Body.LIGHT
        self.body = Body.PACKED if self.packed else Body.HEAVY if heavy else light
        self.sizes = (self.query_heads, self.queries, self.keys)
        self.strides, self.query_strides = _without_columns(strides), _without_columns(gradient_strides[:2])
        self.bias_shape = None if bias is None else bias[0]
        self.bias_strides = (0, 0, 0, 0) if bias is None else bias[1]
        self.out_shape = (self.batch, self.queries, self.query_heads, self.head_dim)
        self.lse_shape = q_shape[:3]
        self.statistics_shape = (*q_shape[:2], 2, self.queries)
        out_row = self.query_heads * self.head_dim
        out_strides = (self.queries * out_row, self.head_dim, out_row)
        key_row = self.key_heads * self.head_dim
        self.key_strides = (self.keys * key_row, self.head_dim, key_row)  # of dk and dv, or of copies of them
        dkv_strides = {*gradient_strides[2:]}
        self.in_place = len(dkv_strides) == 1 and (self.key_heads == 1 or gradient_strides[2][1] == self.head_dim)
        if self.in_place:
            self.key_strides = (gradient_strides[2][0], self.head_dim, gradient_strides[2][2])
        self.dropout_p = dropout_p
        self.numbers = (scale, left, right, keep_threshold(dropout_p))
        self.scalars = (*self.bias_strides[:3], *self.numbers)
        self._options: dict[Tile, Options] = {}
        self._static: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "SCORES": ScoreOptions(
                CAUSAL=causal and self.queries > 1,  # a single query sees all keys
                WINDOW=windowed,
                BIAS="slope" if self.sloped else _varying(bias and bias[0]),
                BIAS_ALIGNMENT=1 if bias is None else alignment(bias[2], self.bias_strides[:3]),
                SOFTCAP=softcap,
                NEGATE=scale < 0.0,
            ),
            "ALIGNMENT": alignment(
                self.itemsize, (*self.strides, *self.query_strides, *out_strides, *self.key_strides)
            ),
            "PAIRS": rotary[0],
            "INTERLEAVED": rotary[1],
            "OWN_ANGLES": rotary[2],
            "NATURAL": self.itemsize == tiles.SINGLE,
            "PRECISION": precision,
        }

    def options(self, tile: Tile) -> Options:
        """Compile-time options for this tile."""
        found = self._options.get(tile)
        if found is None:
            found = Options(BLOCK_M=tile.queries, BLOCK_N=tile.keys, MASKED=tile.masked, **self._static)
            self._options[tile] = found
        return found

    @functools.cached_property
    def is_decode(self) -> bool:
        """Whether keys are split among programs: few queries, many keys."""
        return (
            self.queries <= tiles.DECODE_QUERIES
            and self.keys >= tiles.DECODE_MINIMUM_KEYS
            and self.queries * self.group <= tiles.DECODE_MAXIMUM_ROWS
            and not self.packed
            and not self.sloped
        )

    def short_tile(self, kernel: Kernel) -> Tile | None:
        """The tile of the short-sequence path, or None if a head's keys do not fit into one."""
        if self.packed or self.queries > tiles.SHORT_QUERIES:
            return None
        return tiles.find_short(kernel, self.body, self.capability, self.itemsize, self.block_d, self.keys)

    def section(self, rows: int, heads: int) -> int:
        """The number of heads, up to `heads`, whose `rows` rows of two tensors fit into the L2 cache."""
        return min(heads, max(1, tiles.L2_BYTES // (2 * rows * self.head_dim * self.itemsize)))

    def tile(self, kernel: Kernel) -> Tile:
        """The tile of a kernel for this call."""
        return tiles.find(kernel, self.body, self.capability, self.itemsize, self.block_d)

    def launch(self, kernel: Any, tile: Tile, grid: tuple[int, ...], numbers: tuple[float, ...]) -> _triton.Launch:
        """A launch with this tile."""
        return _triton.Launch(kernel, grid, numbers, (self.options(tile),), tile.num_warps, tile.num_stages)

    def over_queries(self, kernel: Any, table: Kernel, strides: tuple[int, ...]) -> _triton.Launch:
        """A launch with one program per query tile, in sections of heads that share the L2 cache."""
        tile = self.tile(table)
        section = self.group * self.section(self.keys, self.batch * self.key_heads)
        grid = (_triton.ceil_div(self.queries, tile.queries) * self.batch * self.query_heads,)
        return self.launch(kernel, tile, grid, (*self.sizes, *strides, *self.scalars, section))

    @functools.cached_property
    def forward(self) -> _triton.Launch:
        return self.over_queries(attention_forward_kernel, Kernel.FORWARD, self.strides)

    @functools.cached_property
    def short_forward(self) -> _triton.Launch | None:
        tile = self.short_tile(Kernel.SHORT_FORWARD)
        if tile is None:
            return None
        grid = (_triton.ceil_div(self.queries, tile.queries) * self.batch * self.query_heads,)
        return self.launch(attention_short_forward_kernel, tile, grid, (*self.sizes, *self.strides, *self.scalars))

    @functools.cached_property
    def query_gradient(self) -> _triton.Launch:
        strides = (*self.strides, *self.query_strides)
        return self.over_queries(attention_backward_query_kernel, Kernel.QUERY_GRADIENT, strides)

    @functools.cached_property
    def key_gradient(self) -> _triton.Launch:
        tile = self.tile(Kernel.KEY_GRADIENT)
        heads = self.batch * self.key_heads
        strides = (*self.strides, *self.query_strides[:3], *self.key_strides)
        numbers = (*self.sizes, *strides, *self.scalars, self.section(self.queries * self.group, heads))
        grid = (_triton.ceil_div(self.keys, tile.keys) * heads,)
        return self.launch(attention_backward_key_kernel, tile, grid, numbers)

    @functools.cached_property
    def short_backward(self) -> _triton.Launch | None:
        tile = self.short_tile(Kernel.SHORT_BACKWARD)
        if tile is None:
            return None
        numbers = (*self.sizes[1:], *self.strides, *self.query_strides, *self.key_strides[::2], *self.scalars)
        return self.launch(attention_short_backward_kernel, tile, (self.batch, self.key_heads), numbers)

    @functools.cached_property
    def bias_gradient(self) -> tuple[int, _triton.Launch]:
        """The number of splits of each sum, and the launch."""
        assert self.bias_shape is not None
        batches, heads, rows = self.bias_shape[:3]
        tile = self.tile(Kernel.BIAS_GRADIENT)
        blocks = (_triton.ceil_div(self.queries, tile.queries), _triton.ceil_div(self.keys, tile.keys))
        own = batches * heads * (blocks[0] if rows > 1 else 1) * blocks[1]
        shared = self.batch * self.query_heads * blocks[0] * blocks[1] // own
        splits = max(1, min(shared, tiles.MAXIMUM_SPLITS, 2 * self.multiprocessors // own))
        numbers = (self.batch, *self.sizes, batches, heads, *self.strides, *self.query_strides[:3], *self.scalars)
        return splits, self.launch(attention_backward_bias_kernel, tile, (own * splits,), numbers)

    @functools.cached_property
    def decode(self) -> tuple[int, _triton.Launch, _triton.Launch]:
        """The number of key splits, the launch, and the launch that combines the splits."""
        tile = self.tile(Kernel.DECODE)
        programs = self.batch * self.key_heads
        blocks = _triton.ceil_div(self.keys, tile.keys)
        split_blocks = _triton.ceil_div(blocks, _splits(programs, blocks, self.multiprocessors))
        splits = _triton.ceil_div(blocks, split_blocks)
        options = self.options(tile)
        scores = options.SCORES._replace(BIAS="strided" if options.SCORES.BIAS else "", BIAS_ALIGNMENT=1)
        rows = max(16, _triton.next_power_of_2(self.queries * self.group))
        options = options._replace(BLOCK_M=rows, SCORES=scores)
        numbers = (*self.sizes, split_blocks * tile.keys, *self.strides, *self.bias_strides, *self.numbers)
        grid = (programs, splits)
        launch = _triton.Launch(attention_decode_kernel, grid, numbers, (options,), tile.num_warps, tile.num_stages)
        combine = _triton.Launch(
            attention_combine_kernel, (self.batch * self.query_heads * self.queries,),
            (self.query_heads, self.queries, splits, keep_scale(self.dropout_p)),
            (self.head_dim, self.block_d, tiles.COMBINED_SPLITS), num_warps=1, num_stages=3,
        )  # fmt: skip
        return splits, launch, combine


def _without_columns(strides: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Strides (batch, head, row) of each tensor; the column stride is 1."""
    return tuple([stride for axes in strides for stride in axes[:3]])


_plan = _triton.planned(_Plan)
"""Cached by layouts and options: building a plan costs more than the launch."""


class _Inputs:
    """The arguments of one call: its optional tensors and its plan."""

    def __init__(self, call: AttentionCall, angles: Angles | None, *gradients: Tensor) -> None:
        """`gradients` are dout, dq, dk and dv in the backward pass."""
        q, k, v, scores = call.q, call.k, call.v, call.scores
        padding, self.pointers = scores.key_padding_mask, Inputs(q, k, v)
        sloped = scores.alibi_slopes is not None
        self.bias = scores.alibi_slopes if sloped else scores.bias
        dtype, device = q.dtype, q.device
        self.plan = _plan(
            q.shape, k.shape, (q.stride(), k.stride(), v.stride()), tuple([x.stride() for x in gradients]),
            None if self.bias is None else (self.bias.shape, broadcast_strides(self.bias), self.bias.element_size()),
            (padding is not None, call.seed is not None, scores.cu_seqlens is not None, sloped),
            (0, False, False) if angles is None else (angles.cos.shape[2], angles.interleaved, len(angles.cos) > 1),
            (scores.left, scores.right), call.dropout_p, scores.scale, scores.softcap, dtype,
            _triton.capability(device), _triton.multiprocessors(device),
            _triton.fp32_precision() if dtype is torch.float32 else "tf32",  # ignored for 16 bits
        )  # fmt: skip

        sequences = None if scores.cu_seqlens is None else _sequences(scores.cu_seqlens, k.shape[2])
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        self.extras = Extras(padding, sequences, self.bias, call.seed, cos, sin)


def _sequences(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Start and end of each token's sequence (2, tokens), computed on the device."""
    sequences = torch.empty((2, tokens), dtype=torch.int32, device=cu_seqlens.device)
    _sequences_launch(len(cu_seqlens), tokens)(cu_seqlens, sequences)
    return sequences


@_triton.planned
def _sequences_launch(entries: int, tokens: int) -> _triton.Launch:
    grid, constants = (_triton.ceil_div(tokens, tiles.SEQUENCES_TOKENS),), (tiles.SEQUENCES_TOKENS,)
    numbers = (entries, entries.bit_length(), tokens)
    return _triton.Launch(attention_sequences_kernel, grid, numbers, constants, num_warps=4)


def alignment(itemsize: int, strides: tuple[int, ...]) -> int:
    """The number of elements in 16 bytes if it divides every stride (batch, head, row), else 1; 0 if offsets within a
    tile overflow 32 bits."""
    elements = 16 // itemsize
    if max(strides[2::3]) >= 1 << 23:
        return 0
    return elements if functools.reduce(operator.or_, strides) % elements == 0 else 1


def _varying(bias: torch.Size | None) -> str:
    """`ScoreOptions.BIAS` for a bias of this shape."""
    if bias is None:
        return ""
    if bias[3] > 1:
        return "full" if bias[2] > 1 else "row"
    return "column" if bias[2] > 1 else "scalar"


def _decode(inputs: _Inputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
    device = out.device
    splits, launch, combine = inputs.plan.decode
    partial = partial_max = partial_sum = None
    if splits > 1:
        rows = (splits, *inputs.plan.lse_shape)
        partial = torch.empty((*rows, inputs.plan.head_dim), dtype=torch.float32, device=device)
        partial_max, partial_sum = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    launch(inputs.pointers, out, lse, statistics, partial, partial_max, partial_sum, inputs.extras)
    if splits > 1:
        combine(partial, partial_max, partial_sum, out, lse, statistics)


def _splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """The number of key splits: 1 if the device is full without splits or the keys are few, else the smallest number
    with at least 85 % of the best wave occupancy."""
    if programs >= 0.8 * multiprocessors or blocks <= 4:
        return 1
    candidates = range(1, min(blocks, tiles.MAXIMUM_SPLITS) + 1)
    waves = [programs * count / multiprocessors for count in candidates]
    efficiency = [wave / -(-wave // 1) for wave in waves]
    return next(count for count, value in zip(candidates, efficiency, strict=True) if value >= 0.85 * max(efficiency))


def _bias_gradient(inputs: _Inputs, pointers: Backward, dlse: Tensor | None) -> Tensor:
    """dbias, summed over broadcast axes: each program sums dS over one split, then the splits are reduced."""
    bias = inputs.bias
    assert bias is not None
    if bias.shape[3] == 1:
        return shift_gradient(dlse, pointers.statistics, bias)
    splits, launch = inputs.plan.bias_gradient
    partial = torch.empty((splits, *bias.shape), dtype=bias.dtype if splits == 1 else torch.float32, device=bias.device)
    launch(inputs.pointers, pointers, partial, inputs.extras)
    return partial[0] if splits == 1 else partial.sum(0).to(bias.dtype)
