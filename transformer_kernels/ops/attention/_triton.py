"""Attention in Triton: which kernel takes a call, and the launches."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels._dropout import keep_scale, keep_threshold
from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention import _tiles as tiles
from transformer_kernels.ops.attention._common import Angles, beyond, broadcast_strides, shift_gradient
from transformer_kernels.ops.attention._tiles import Body, Kernel, Tile
from transformer_kernels.ops.attention._triton_backward import attention_backward_query_kernel
from transformer_kernels.ops.attention._triton_backward_bias import attention_backward_bias_kernel
from transformer_kernels.ops.attention._triton_backward_key import attention_backward_key_kernel
from transformer_kernels.ops.attention._triton_decode import attention_combine_kernel, attention_decode_kernel
from transformer_kernels.ops.attention._triton_forward import attention_forward_kernel
from transformer_kernels.ops.attention._triton_sequences import attention_sequences_kernel
from transformer_kernels.ops.attention._triton_short import (
    attention_short_backward_kernel,
    attention_short_forward_kernel,
)
from transformer_kernels.ops.attention._triton_tile import Options


def unsupported(call: AttentionCall) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    if (reason := beyond(call)) is not None:
        return reason
    if call.q.shape[3] > tiles.MAXIMUM_HEAD_DIM:
        return f"supports head dimensions up to {tiles.MAXIMUM_HEAD_DIM}, not {call.q.shape[3]}; use backend='torch'"
    return None


def turns(call: AttentionCall) -> bool:
    """Whether rotary positions turn queries and keys as they are loaded, or the kernels are given rotated copies."""
    keys = call.k.shape[2] // 2 if call.causal else call.k.shape[2]  # that a query sees, on average
    if call.cu_seqlens is not None:  # lengths are not known here, and sequences are packed because they are short
        keys = 0
    elif call.window is not None:
        keys = min(keys, call.window)
    narrow = call.q.shape[3] <= tiles.TURNED_HEAD_DIM and call.q.element_size() == tiles.HALF
    return narrow and keys <= tiles.TURNED_KEYS


def forward(call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
    """Output and log-sum-exp, by the path that suits the lengths."""
    launch = _Launch(call, angles)
    out = like_output(call.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    with _triton.launching_on(call.q.device):
        if launch.plan.is_decode():
            _launch_decode(launch, out, lse)
        elif (tile := launch.plan.short_tile(Kernel.SHORT_FORWARD)) is not None:
            _launch_short_forward(launch, tile, out, lse)
        else:
            launch.find_sequences()
            _launch_forward(launch, out, lse)
    return AttentionResult(out, lse)


def backward(
    call: AttentionCall,
    result: AttentionResult,
    grads: Grads,
    wanted: Wanted,
    into: Into | None = None,
    angles: Angles | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and, if it is wanted, of the bias; the first three are `into` where it is given."""
    dout, dlse = grads
    out = result.out if result.out.transpose(1, 2).is_contiguous() else like_output(call.q).copy_(result.out)
    dq, dk, dv = into or (like_output(call.q), like_output(call.k), like_output(call.v))
    alike = dk.stride() == dv.stride()  # kernels know one layout for both
    own = (dk, dv) if alike else (like_output(call.k), like_output(call.v))
    launch = _Launch(call, angles, dout, dq, *own)
    tile = launch.plan.short_tile(Kernel.SHORT_BACKWARD)
    statistics = None  # delta and correction of each query, (B, Hq, 2, Lq), which kernels write for each other
    if tile is None or wanted[3]:
        statistics = torch.empty((*call.q.shape[:2], 2, call.q.shape[2]), dtype=torch.float32, device=call.q.device)
    with _triton.launching_on(call.q.device):
        if tile is not None:
            _launch_short_backward(launch, tile, result.lse, dlse, statistics)
        else:
            launch.find_sequences()
            _launch_backward(launch, out, result.lse, dlse, statistics)
        dbias = _bias_gradient(launch, result.lse, dlse, statistics) if wanted[3] else None
    if not alike:
        dk.copy_(own[0])
        dv.copy_(own[1])
    return dq, dk, dv, dbias


class _Plan:
    """What kernels are told of a call besides its tensors: sizes, strides and numbers, and the compile-time options."""

    def __init__(
        self,
        q_shape: torch.Size,
        k_shape: torch.Size,
        strides: tuple[int, ...],
        gradient_strides: tuple[int, ...],
        bias: tuple[torch.Size, tuple[int, ...], int] | None,
        masks: tuple[bool, bool, bool],
        rotary: tuple[int, bool, bool],
        causal: bool,
        window: int | None,
        right: int | None,
        dropout_p: float,
        scale: float,
        softcap: float | None,
        itemsize: int,
        capability: _triton.Capability,
        precision: str,
    ) -> None:
        dropped, self.packed, self.sloped = masks
        self.batch, self.query_heads, self.queries, self.head_dim = q_shape
        self.key_heads, self.keys = k_shape[1], k_shape[2]
        self.group = self.query_heads // self.key_heads
        self.itemsize, self.capability = itemsize, capability
        self.block_d = max(16, _triton.next_power_of_2(self.head_dim))
        if window is not None and min(window, right or window) >= self.queries + self.keys:
            window = None  # it hides nothing
        heavy = dropped or not (bias is window is softcap is None)
        light = Body.TURNED if rotary[0] else Body.CAUSAL if causal else Body.LIGHT
        self.body = Body.PACKED if self.packed else Body.HEAVY if heavy else light
        self.sizes = (self.query_heads, self.queries, self.keys)
        self.strides, self.gradient_strides = strides, gradient_strides
        self.bias_strides = (0, 0, 0, 0) if bias is None else bias[1]
        out_row = self.query_heads * self.head_dim
        out_strides = (self.queries * out_row, self.head_dim, out_row)
        reach = (window or 1) - 1 if right is None else right
        self.numbers = (scale, window or 0, reach, keep_threshold(dropout_p))
        self.scalars = (*self.bias_strides[:3], *self.numbers)
        self._options: dict[Tile, Options] = {}
        self._static: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "CAUSAL": causal and self.queries > 1,  # a single query sees all keys
            "WINDOW": window is not None,
            "BIAS": "slope" if self.sloped else _varying(bias and bias[0]),
            "BIAS_ALIGNMENT": 1 if bias is None else alignment(bias[2], self.bias_strides[:3]),
            "ALIGNMENT": alignment(self.itemsize, strides + gradient_strides + out_strides),
            "SOFTCAP": softcap or 0.0,
            "PAIRS": rotary[0],
            "INTERLEAVED": rotary[1],
            "OWN_ANGLES": rotary[2],
            "NEGATE": scale < 0.0,
            "NATURAL": self.itemsize == tiles.SINGLE,
            "PRECISION": precision,
        }

    def options(self, tile: Tile) -> Options:
        """The compile-time options of a launch with this tile."""
        found = self._options.get(tile)
        if found is None:
            found = Options(BLOCK_M=tile.queries, BLOCK_N=tile.keys, MASKED=tile.masked, **self._static)
            self._options[tile] = found
        return found

    def is_decode(self) -> bool:
        """Whether there are few queries and many keys: then keys are split among programs."""
        return (
            self.queries <= tiles.DECODE_QUERIES
            and self.keys >= tiles.DECODE_MINIMUM_KEYS
            and self.queries * self.group <= tiles.DECODE_MAXIMUM_ROWS
            and not self.packed
            and not self.sloped
        )

    def short_tile(self, kernel: Kernel) -> Tile | None:
        """The tile of the short-sequence path, None where not all keys of a head fit into one."""
        if self.packed or self.queries > tiles.SHORT_QUERIES:
            return None
        return tiles.find_short(kernel, self.body, self.capability, self.itemsize, self.block_d, self.keys)

    def section(self, rows: int, heads: int) -> int:
        """How many of `heads`, of which each program walks over `rows` rows of two tensors, fit into the L2 cache."""
        return min(heads, max(1, tiles.L2_BYTES // (2 * rows * self.head_dim * self.itemsize)))

    def tile(self, kernel: Kernel) -> Tile:
        """The tile of this call in the tables of a kernel."""
        return tiles.find(kernel, self.body, self.capability, self.itemsize, self.block_d)


_plan = functools.lru_cache(maxsize=1024)(_Plan)
"""The same plan for the same layouts and options: it costs more than the launch."""


class _Launch:
    """One call as kernels are told of it: its tensors, and its plan."""

    def __init__(self, call: AttentionCall, angles: Angles | None, *gradients: Tensor) -> None:
        q, k, v, self.padding, bias, self.seed, self.cu_seqlens = call[:7]
        self.bias = bias if call.alibi_slopes is None else call.alibi_slopes
        self.q, self.k, self.v = q, k, v
        self.angles = (None, None) if angles is None else angles[:2]
        self.gradients = gradients  # dout, dq, dk, dv in the backward pass; dk and dv have the same strides
        self.sequences: Tensor | None = None  # starts and ends (2, Lk), see `find_sequences`
        self.dropout_p, itemsize = call.dropout_p, q.element_size()
        self.plan = _plan(
            q.shape, k.shape, q.stride()[:3] + k.stride()[:3] + v.stride()[:3],
            tuple([stride for x in gradients[:3] for stride in x.stride()[:3]]),
            None if self.bias is None else (self.bias.shape, broadcast_strides(self.bias), self.bias.element_size()),
            (self.seed is not None, self.cu_seqlens is not None, call.alibi_slopes is not None),
            (0, False, False) if angles is None else (angles.cos.shape[2], angles.interleaved, len(angles.cos) > 1),
            call.causal, call.window, call.right, call.dropout_p, call.scale, call.softcap, itemsize,
            _triton.capability(q.device),
            _triton.fp32_precision() if itemsize == tiles.SINGLE else "tf32",  # which 16 bits ignore
        )  # fmt: skip

    def find_sequences(self) -> None:
        """Find start and end of each token's sequence, on the device; cu_seqlens is not read again."""
        if self.cu_seqlens is None:
            return
        entries = len(self.cu_seqlens)
        self.sequences = torch.empty((2, self.plan.keys), dtype=torch.int32, device=self.q.device)
        _triton.launch(
            attention_sequences_kernel, (_triton.ceil_div(self.plan.keys, tiles.SEQUENCES_TOKENS),),
            (self.cu_seqlens, self.sequences), (entries, entries.bit_length(), self.plan.keys),
            (tiles.SEQUENCES_TOKENS,), num_warps=4,
        )  # fmt: skip


def alignment(itemsize: int, strides: tuple[int, ...]) -> int:
    """Elements of 16 bytes if every stride, (batch, head, row) of each tensor, is a multiple of them, else 1; 0 if a
    tile's offsets overflow 32 bits."""
    elements = 16 // itemsize
    if max(strides[2::3]) >= 1 << 23:
        return 0
    return elements if functools.reduce(operator.or_, strides) % elements == 0 else 1


def _varying(bias: torch.Size | None) -> str:
    """What varies within a head, of a bias of that shape: see `Options.BIAS`."""
    if bias is None:
        return ""
    if bias[3] > 1:
        return "full" if bias[2] > 1 else "row"
    return "column" if bias[2] > 1 else "scalar"


def _launch_forward(launch: _Launch, out: Tensor, lse: Tensor) -> None:
    plan = launch.plan
    tile = plan.tile(Kernel.FORWARD)
    heads = plan.batch * plan.query_heads
    section = plan.group * plan.section(plan.keys, plan.batch * plan.key_heads)
    _triton.launch(
        attention_forward_kernel, (_triton.ceil_div(plan.queries, tile.queries) * heads,),
        (launch.q, launch.k, launch.v, out, lse, launch.padding, launch.sequences, launch.bias, launch.seed,
         *launch.angles),
        (*plan.sizes, *plan.strides, *plan.scalars, section),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip


def _launch_short_forward(launch: _Launch, tile: Tile, out: Tensor, lse: Tensor) -> None:
    plan = launch.plan
    grid = (_triton.ceil_div(plan.queries, tile.queries) * plan.batch * plan.query_heads,)
    _triton.launch(
        attention_short_forward_kernel, grid,
        (launch.q, launch.k, launch.v, out, lse, launch.padding, launch.bias, launch.seed, *launch.angles),
        (*plan.sizes, *plan.strides, *plan.scalars),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip


def _launch_decode(launch: _Launch, out: Tensor, lse: Tensor) -> None:
    plan = launch.plan
    tile = plan.tile(Kernel.DECODE)
    device = launch.q.device
    programs = plan.batch * plan.key_heads
    blocks = _triton.ceil_div(plan.keys, tile.keys)
    split_blocks = _triton.ceil_div(blocks, _splits(programs, blocks, _triton.multiprocessors(device)))
    splits = _triton.ceil_div(blocks, split_blocks)
    partial = partial_max = partial_sum = None
    if splits > 1:
        rows = (splits, *launch.q.shape[:3])
        partial = torch.empty((*rows, plan.head_dim), dtype=torch.float32, device=device)
        partial_max, partial_sum = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    options = plan.options(tile)._replace(
        BLOCK_M=max(16, _triton.next_power_of_2(plan.queries * plan.group)), BIAS="", BIAS_ALIGNMENT=1
    )
    pointers = (launch.q, launch.k, launch.v, out, lse, partial, partial_max, partial_sum)
    _triton.launch(
        attention_decode_kernel, (programs, splits), (*pointers, launch.padding, launch.bias, launch.seed),
        (*plan.sizes, split_blocks * tile.keys, *plan.strides, *plan.bias_strides, *plan.numbers),
        (options,), tile.num_warps, tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _triton.launch(
            attention_combine_kernel, (plan.batch * plan.query_heads * plan.queries,),
            (partial, partial_max, partial_sum, out, lse),
            (plan.query_heads, plan.queries, splits, keep_scale(launch.dropout_p)),
            (plan.head_dim, plan.block_d, tiles.COMBINED_SPLITS), num_warps=1, num_stages=3,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """Into how many parts the keys are split: one where the device is busy anyway or the keys are few, else the fewest
    that fill the waves of programs to 85 % of what the best number does."""
    if programs >= 0.8 * multiprocessors or blocks <= 4:
        return 1
    candidates = range(1, min(blocks, tiles.MAXIMUM_SPLITS) + 1)
    waves = [programs * count / multiprocessors for count in candidates]
    efficiency = [wave / -(-wave // 1) for wave in waves]
    return next(count for count, value in zip(candidates, efficiency, strict=True) if value >= 0.85 * max(efficiency))


def _launch_backward(launch: _Launch, out: Tensor, lse: Tensor, dlse: Tensor | None, statistics: Tensor | None) -> None:
    plan = launch.plan
    dout, dq, dk, dv = launch.gradients
    tile = plan.tile(Kernel.QUERY_GRADIENT)
    grid = (_triton.ceil_div(plan.queries, tile.queries) * plan.batch * plan.query_heads,)
    heads = plan.batch * plan.key_heads
    masks = (launch.padding, launch.sequences, launch.bias, launch.seed, *launch.angles)
    _triton.launch(
        attention_backward_query_kernel, grid,
        (launch.q, launch.k, launch.v, out, lse, dout, dlse, statistics, dq, *masks),
        (*plan.sizes, *plan.strides, *plan.gradient_strides[:6], *plan.scalars,
         plan.group * plan.section(plan.keys, heads)),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip
    tile = plan.tile(Kernel.KEY_GRADIENT)
    _triton.launch(
        attention_backward_key_kernel, (_triton.ceil_div(plan.keys, tile.keys) * heads,),
        (launch.q, launch.k, launch.v, lse, dout, statistics, dk, dv, *masks),
        (*plan.sizes, *plan.strides, *plan.gradient_strides[:3], *plan.gradient_strides[6:], *plan.scalars,
         plan.section(plan.queries * plan.group, heads)),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip


def _launch_short_backward(
    launch: _Launch, tile: Tile, lse: Tensor, dlse: Tensor | None, statistics: Tensor | None
) -> None:
    plan = launch.plan
    dout, *gradients = launch.gradients
    pointers = (launch.q, launch.k, launch.v, lse, dout, dlse, statistics, *gradients)
    _triton.launch(
        attention_short_backward_kernel, (plan.batch, plan.key_heads),
        (*pointers, launch.padding, launch.bias, launch.seed, *launch.angles),
        (*plan.sizes[1:], *plan.strides, *plan.gradient_strides, *plan.scalars),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip


def _bias_gradient(launch: _Launch, lse: Tensor, dlse: Tensor | None, statistics: Tensor | None) -> Tensor:
    """dbias, summed over the axes on which the bias is broadcast. Each program sums dS over a share of those; the
    shares are added up at the end."""
    plan = launch.plan
    bias = launch.bias
    assert bias is not None
    if bias.shape[3] == 1:
        return shift_gradient(dlse, lse, bias)
    tile = plan.tile(Kernel.BIAS_GRADIENT)
    blocks = (_triton.ceil_div(plan.queries, tile.queries), _triton.ceil_div(plan.keys, tile.keys))
    own = bias.shape[0] * bias.shape[1] * (blocks[0] if bias.shape[2] > 1 else 1) * blocks[1]
    shared = plan.batch * plan.query_heads * blocks[0] * blocks[1] // own
    splits = max(1, min(shared, tiles.MAXIMUM_SPLITS, 2 * _triton.multiprocessors(bias.device) // own))
    partial = torch.empty((splits, *bias.shape), dtype=bias.dtype if splits == 1 else torch.float32, device=bias.device)
    pointers = (launch.q, launch.k, launch.v, lse, launch.gradients[0], statistics, partial)
    _triton.launch(
        attention_backward_bias_kernel, (own * splits,),
        (*pointers, launch.padding, launch.sequences, bias, launch.seed),
        (plan.batch, *plan.sizes, bias.shape[0], bias.shape[1], splits, *plan.strides,
         *plan.gradient_strides[:3], *plan.scalars),
        (plan.options(tile),), tile.num_warps, tile.num_stages,
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0).to(bias.dtype)
