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
from transformer_kernels.ops.attention._call import Scores
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
    """Attention by Triton for calls of one layout."""

    def __init__(self, call: AttentionCall) -> None:
        self._launches = dict[Any, _Launches]()

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

    def launches(self, call: AttentionCall, angles: Angles | None = None, *gradients: Tensor) -> _Launches:
        """Those for these angles and, in the backward pass, for the strides of dout, dq, dk and dv."""
        precision = _triton.fp32_precision() if call.q.dtype is torch.float32 else "tf32"  # ignored for 16 bits
        strides = tuple([x.stride() for x in gradients])
        key = precision, None if angles is None else angles.layout(), strides
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = _Launches(call, angles, strides, precision)
        return found

    def forward(self, call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
        """Output and log-sum-exp."""
        launches, q, device = self.launches(call, angles), call.q, call.q.device
        out = torch.empty(launches.out_shape, dtype=q.dtype, device=device).transpose(1, 2)
        lse = torch.empty(launches.lse_shape, dtype=torch.float32, device=device)
        statistics = torch.empty(launches.statistics_shape, dtype=torch.float32, device=device)
        pointers = Inputs(q, call.k, call.v), out, lse, statistics
        if launches.is_decode:
            launches.run_decode(*pointers, launches.extras(call, angles))
        else:
            launches.forward(*pointers, launches.extras(call, angles))
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
        (dout, dlse), statistics, q, k = grads, result.statistics, call.q, call.k
        out = result.out if result.out.transpose(1, 2).is_contiguous() else like_output(q).copy_(result.out)
        if into is None:  # in the layout of `out`, cheaper than `like_output`
            dk = torch.empty_like(out) if k.shape == out.shape else like_output(k)
            into = torch.empty_like(out), dk, torch.empty_like(dk)
        launches = self.launches(call, angles, dout, *into)
        inputs, extras = Inputs(q, k, call.v), launches.extras(call, angles)
        own = into if launches.in_place else (into[0], like_output(k), like_output(k))
        delta = None
        if launches.short_backward is None or wanted[3]:
            delta = torch.empty(launches.lse_shape, dtype=torch.float32, device=q.device)
        pointers = Backward(out, statistics, dout, dlse, delta, *own)
        without_dlse = pointers if dlse is None else pointers._replace(dlse=None)
        if launches.short_backward is not None:
            launches.short_backward(inputs, pointers, extras)
        else:
            launches.query_gradient(inputs, pointers, extras)
            launches.key_gradient(inputs, without_dlse, extras)
        dbias = None
        if wanted[3] and extras.bias.shape[3] == 1:
            dbias = shift_gradient(dlse, statistics, extras.bias)
        elif wanted[3]:
            dbias = launches.run_bias_gradient(inputs, without_dlse, extras)
        if own is not into:
            into[1].copy_(own[1])
            into[2].copy_(own[2])
        return *into, dbias


class _Launches:
    """The arguments of the kernels besides tensors (sizes, strides, scalars, compile-time options), and launches, each
    created when it is first used."""

    def __init__(
        self, call: AttentionCall, angles: Angles | None, gradients: tuple[tuple[int, ...], ...], precision: str
    ) -> None:
        """`gradients` are the strides of dout, dq, dk and dv in the backward pass."""
        q, k, scores, bias = call.q, call.k, call.scores, _bias(call.scores)
        self.batch, self.query_heads, self.queries, self.head_dim = q.shape
        self.key_heads, self.keys = k.shape[1:3]
        self.group, self.itemsize = self.query_heads // self.key_heads, q.element_size()
        self.capability, self.multiprocessors = _triton.capability(q.device), _triton.multiprocessors(q.device)
        self.block_d = max(16, _triton.next_power_of_2(self.head_dim))
        self.packed, self.sloped = scores.cu_seqlens is not None, scores.alibi_slopes is not None
        self.entries = 0 if scores.cu_seqlens is None else len(scores.cu_seqlens)
        tokens = self.queries + self.keys
        left, right = (min(limit, tokens) for limit in (scores.left, scores.right))
        causal, windowed = right == 0, left < tokens or 0 < right < tokens
        heavy = call.seed is not None or windowed or bias is not None or scores.softcap > 0.0
        rows = Body.LONG if self.keys >= tiles.LONG_KEYS else Body.CAUSAL
        rows = rows if scores.key_padding_mask is None else Body.PADDED
        light = Body.ROTATED if angles is not None else rows if causal else Body.LIGHT
        self.body = Body.PACKED if self.packed else Body.HEAVY if heavy else light
        self.sizes = (self.query_heads, self.queries, self.keys)
        self.strides = _without_columns((q.stride(), k.stride(), call.v.stride()))
        self.query_strides = _without_columns(gradients[:2])
        self.bias_shape = None if bias is None else bias.shape
        self.bias_strides = (0, 0, 0, 0) if bias is None else broadcast_strides(bias)
        self.out_shape = (self.batch, self.queries, self.query_heads, self.head_dim)
        self.lse_shape = q.shape[:3]
        self.statistics_shape = (*q.shape[:2], 2, self.queries)
        out_row, key_row = self.query_heads * self.head_dim, self.key_heads * self.head_dim
        out_strides = (self.queries * out_row, self.head_dim, out_row)
        self.key_strides = (self.keys * key_row, self.head_dim, key_row)  # of dk and dv, or of copies of them
        dkv_strides = {*gradients[2:]}
        self.in_place = len(dkv_strides) == 1 and (self.key_heads == 1 or gradients[2][1] == self.head_dim)
        if self.in_place:
            self.key_strides = (gradients[2][0], self.head_dim, gradients[2][2])
        self.dropout_p = call.dropout_p
        self.numbers = (scores.scale, left, right, keep_threshold(call.dropout_p))
        self.scalars = (*self.bias_strides[:3], *self.numbers)
        self._options: dict[Tile, Options] = {}
        self._static: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "SCORES": ScoreOptions(
                CAUSAL=causal and self.queries > 1,  # a single query attends to all keys
                WINDOW=windowed,
                BIAS="slope" if self.sloped else _varying(self.bias_shape),
                BIAS_ALIGNMENT=1 if bias is None else alignment(bias.element_size(), self.bias_strides[:3]),
                SOFTCAP=scores.softcap,
                NEGATE=scores.scale < 0.0,
            ),
            "ALIGNMENT": alignment(
                self.itemsize, (*self.strides, *self.query_strides, *out_strides, *self.key_strides)
            ),
            "PAIRS": 0 if angles is None else angles.cos.shape[2],
            "INTERLEAVED": angles is not None and angles.interleaved,
            "OWN_ANGLES": angles is not None and len(angles.cos) > 1,
            "NATURAL": self.itemsize == tiles.SINGLE,
            "PRECISION": precision,
        }

    def extras(self, call: AttentionCall, angles: Angles | None) -> Extras:
        """The optional tensors of a call."""
        scores, sequences = call.scores, None
        if scores.cu_seqlens is not None:  # start and end of each token's sequence, computed on the device
            sequences = torch.empty((2, self.keys), dtype=torch.int32, device=call.q.device)
            self.sequences(scores.cu_seqlens, sequences)
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        return Extras(scores.key_padding_mask, sequences, _bias(scores), call.seed, cos, sin)

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
        tile = self.short_tile(Kernel.SHORT_FORWARD)
        if tile is None:
            return self.over_queries(attention_forward_kernel, Kernel.FORWARD, self.strides)
        grid = (_triton.ceil_div(self.queries, tile.queries) * self.batch * self.query_heads,)
        return self.launch(attention_short_forward_kernel, tile, grid, (*self.sizes, *self.strides, *self.scalars))

    @functools.cached_property
    def sequences(self) -> _triton.Launch:
        grid, constants = (_triton.ceil_div(self.keys, tiles.SEQUENCES_TOKENS),), (tiles.SEQUENCES_TOKENS,)
        numbers = (self.entries, self.entries.bit_length(), self.keys)
        return _triton.Launch(attention_sequences_kernel, grid, numbers, constants, num_warps=4)

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

    def run_bias_gradient(self, inputs: Inputs, pointers: Backward, extras: Extras) -> Tensor:
        """dbias, summed over broadcast axes: each program sums dS over one split, then the splits are reduced."""
        bias, (splits, launch) = extras.bias, self.bias_gradient
        dtype = bias.dtype if splits == 1 else torch.float32
        partial = torch.empty((splits, *bias.shape), dtype=dtype, device=bias.device)
        launch(inputs, pointers, partial, extras)
        return partial[0] if splits == 1 else partial.sum(0).to(bias.dtype)

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

    def run_decode(self, inputs: Inputs, out: Tensor, lse: Tensor, statistics: Tensor, extras: Extras) -> None:
        """Forward over splits of the keys, which are then combined."""
        splits, launch, combine = self.decode
        partials: tuple[Tensor | None, ...] = (None, None, None)
        if splits > 1:
            rows = (splits, *self.lse_shape)
            shapes = (*rows, self.head_dim), rows, rows
            partials = tuple([torch.empty(shape, dtype=torch.float32, device=out.device) for shape in shapes])
        launch(inputs, out, lse, statistics, *partials, extras)
        if splits > 1:
            combine(*partials, out, lse, statistics)

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


def _bias(scores: Scores) -> Tensor | None:
    """What is added to the scores: the bias, or the slopes of ALiBi."""
    return scores.bias if scores.alibi_slopes is None else scores.alibi_slopes


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


def _splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """The number of key splits: 1 if the device is full without splits or the keys are few, else the smallest number
    with at least 85 % of the best wave occupancy."""
    if programs >= 0.8 * multiprocessors or blocks <= 4:
        return 1
    candidates = range(1, min(blocks, tiles.MAXIMUM_SPLITS) + 1)
    waves = [programs * count / multiprocessors for count in candidates]
    efficiency = [wave / -(-wave // 1) for wave in waves]
    return next(count for count, value in zip(candidates, efficiency, strict=True) if value >= 0.85 * max(efficiency))
