"""Attention in Triton: which kernel takes a call, and the launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels._dropout import keep_scale, keep_threshold
from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention import _triton_config as config
from transformer_kernels.ops.attention._triton_backward import attention_backward_query_kernel
from transformer_kernels.ops.attention._triton_backward_bias import attention_backward_bias_kernel
from transformer_kernels.ops.attention._triton_backward_key import attention_backward_key_kernel
from transformer_kernels.ops.attention._triton_config import Tile
from transformer_kernels.ops.attention._triton_decode import attention_combine_kernel, attention_decode_kernel
from transformer_kernels.ops.attention._triton_forward import attention_forward_kernel
from transformer_kernels.ops.attention._triton_sequences import attention_sequences_kernel
from transformer_kernels.ops.attention._triton_short import (
    attention_short_backward_kernel,
    attention_short_forward_kernel,
)

__all__ = ["backward", "forward", "unsupported"]


def unsupported(call: AttentionCall) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    if call.q.shape[3] > config.MAXIMUM_HEAD_DIM:
        return f"supports head dimensions up to {config.MAXIMUM_HEAD_DIM}, not {call.q.shape[3]}; use backend='torch'"
    return None


def forward(arguments: AttentionCall) -> AttentionResult:
    """Output and log-sum-exp, by the path that suits the lengths."""
    call, q = _Call(arguments, ()), arguments.q
    out = like_output(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with _triton.launching_on(q.device):
        call.find_sequences()
        if call.is_decode():
            _launch_decode(call, out, lse)
        elif (tile := call.short_tile("forward")) is not None:
            _launch_short_forward(call, tile, out, lse)
        else:
            _launch_forward(call, out, lse)
    return AttentionResult(out, lse)


def backward(
    arguments: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, into: Into | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and, if it needs one, of the bias."""
    (out, lse), (dout, dlse), bias_wanted = result, grads, wanted[3]
    into = into or (like_output(arguments.q), like_output(arguments.k), like_output(arguments.v))
    call = _Call(arguments, (dout, *into))
    out = out if out.transpose(1, 2).is_contiguous() else out.transpose(1, 2).contiguous().transpose(1, 2)
    tile = call.short_tile("backward")
    statistics = _Statistics(lse, dlse)
    if bias_wanted or tile is None:
        statistics.delta = torch.empty_like(lse)
        if call.itemsize == config.SINGLE:
            statistics.correction = torch.empty_like(lse)
    with _triton.launching_on(dout.device):
        call.find_sequences()
        if tile is not None:
            _launch_short_backward(call, tile, statistics)
        else:
            _launch_backward(call, out, statistics)
        dbias = _bias_gradient(call, statistics) if bias_wanted else None
    return *into, dbias


@dataclass
class _Statistics:
    """What the backward kernels know of each query, (B, Hq, Lq) in fp32; the last two they write for each other."""

    lse: Tensor
    dlse: Tensor | None
    delta: Tensor | None = None
    correction: Tensor | None = None


class _Call:
    """One call as kernels are told of it: tensors, sizes, strides and numbers, and the compile-time constants."""

    def __init__(self, arguments: AttentionCall, gradients: tuple[Tensor, ...]) -> None:
        q, k, v, key_padding_mask, attn_bias, seed, cu_seqlens, causal, window, dropout_p, scale = arguments
        self.q, self.k, self.v = q, k, v
        self.gradients = gradients  # dout, dq, dk, dv in the backward pass
        self.batch, self.query_heads, self.queries, self.head_dim = q.shape
        self.key_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.query_heads // self.key_heads
        self.itemsize = q.element_size()
        self.capability = _triton.capability(q.device)
        self.block_d = max(16, _triton.next_power_of_2(self.head_dim))
        if window is not None and window >= self.queries + self.keys:
            window = None  # it hides nothing
        self.padding, self.bias, self.seed, self.cu_seqlens = key_padding_mask, attn_bias, seed, cu_seqlens
        self.sequences: Tensor | None = None  # starts and ends (2, Lk), see `find_sequences`
        self.sizes = (self.query_heads, self.queries, self.keys)
        self.strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        self.gradient_strides = tuple(stride for x in gradients for stride in x.stride()[:3])
        self.bias_strides = _broadcast_strides(attn_bias)
        self.scale = scale
        light = attn_bias is None and seed is None and window is None and cu_seqlens is None
        self.heavy = "" if light else " heavy"
        self.numbers = (scale, window or 0, keep_threshold(dropout_p), keep_scale(dropout_p))
        self.constants: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "CAUSAL": causal,
            "WINDOW": window is not None,
            "PADDING": key_padding_mask is not None,
            "BIAS": _bias_kind(attn_bias),
            "BIAS_ALIGNMENT": 1 if attn_bias is None else _alignment(attn_bias.element_size(), self.bias_strides[:3]),
            "DROPOUT": seed is not None,
            "ALIGNMENT": _alignment(self.itemsize, self.strides + self.gradient_strides),
            "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        }
        if self.itemsize == config.HALF:
            self.constants["PRECISION"] = "tf32"  # of no account for 16-bit operands, so never a second compilation

    def find_sequences(self) -> None:
        """Find start and end of each token's sequence, on the device; cu_seqlens is not read again."""
        if self.cu_seqlens is None:
            return
        entries = len(self.cu_seqlens)
        self.sequences = torch.empty((2, self.keys), dtype=torch.int32, device=self.q.device)
        attention_sequences_kernel[(triton.cdiv(self.keys, config.SEQUENCES_TOKENS),)](
            self.cu_seqlens, self.sequences, entries, entries.bit_length(), self.keys,
            BLOCK=config.SEQUENCES_TOKENS, num_warps=4,
        )  # fmt: skip

    def is_decode(self) -> bool:
        """Whether there are few queries and many keys: then keys are split among programs."""
        return (
            self.cu_seqlens is None
            and self.queries <= config.DECODE_QUERIES
            and self.keys >= config.DECODE_MINIMUM_KEYS
            and self.queries * self.group <= config.DECODE_MAXIMUM_ROWS
        )

    def short_tile(self, direction: str) -> Tile | None:
        """The tile of the short-sequence path, None where not all keys of a head fit into one."""
        if self.cu_seqlens is not None or self.queries > config.SHORT_QUERIES:
            return None
        if self.block_d not in config.SHORT_HEAD_DIMS:
            return None
        table = f"short {direction} {self.block_d}{self.heavy}"
        return _find_within(table, self.capability, self.itemsize, self.keys)

    def section(self, rows: int) -> int:
        """How many heads, of which each program walks over `rows` rows of two tensors, fit into the L2 cache."""
        return max(1, config.L2_BYTES // (2 * rows * self.head_dim * self.itemsize))

    def tile(self, table: str) -> Tile:
        """The tile of this call in a table of `_triton_config`."""
        return _find(table, self.capability, self.itemsize, self.block_d)


@functools.cache
def _find(table: str, capability: _triton.Capability, itemsize: int, width: int) -> Tile:
    return config.TABLES[table].find(capability, itemsize, width)


@functools.lru_cache(maxsize=4096)
def _find_within(table: str, capability: _triton.Capability, itemsize: int, width: int) -> Tile | None:
    rows = config.TABLES[table]
    newest = max(known for known in rows.capabilities(itemsize) if known <= capability)
    return next((tile for largest, tile in rows.entries(newest, itemsize) if largest and width <= largest), None)


def _alignment(itemsize: int, strides: tuple[int, ...]) -> int:
    """Elements of 16 bytes if every stride, (batch, head, row) of each tensor, is a multiple of them, else 1; 0 if a
    tile's offsets overflow 32 bits."""
    elements = 16 // itemsize
    if max(strides[2::3]) >= 1 << 23:
        return 0
    return elements if all(stride % elements == 0 for stride in strides) else 1


def _bias_kind(bias: Tensor | None) -> str:
    """What varies within a head: see `load_bias`."""
    if bias is None:
        return "none"
    if bias.shape[3] > 1:
        return "full" if bias.shape[2] > 1 else "row"
    return "column" if bias.shape[2] > 1 else "scalar"


def _broadcast_strides(bias: Tensor | None) -> tuple[int, int, int, int]:
    if bias is None:
        return (0, 0, 0, 0)
    first, second, third, fourth = (
        stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    return first, second, third, fourth


def _launch_forward(call: _Call, out: Tensor, lse: Tensor) -> None:
    descriptors = _takes_descriptors(call)
    tile = call.tile("forward descriptors" if descriptors else f"forward{call.heavy}")
    sources: tuple[Any, ...] = (call.q, call.k, call.v)
    if descriptors:
        rows = (tile.queries, tile.keys, tile.keys)
        sources = tuple(_descriptor(x, size, call.block_d) for x, size in zip(sources, rows, strict=True))
    grid = (triton.cdiv(call.queries, tile.queries) * call.batch * call.query_heads,)
    attention_forward_kernel[grid](
        *sources, out, lse, call.padding, call.sequences, call.bias, call.seed, *call.sizes, *call.strides,
        *call.bias_strides[:3], *call.numbers, call.section(call.keys) * call.group,
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, MASKED_N=tile.masked, NEGATE=call.scale < 0.0,
        SEQUENCES=call.sequences is not None, DESCRIPTOR=descriptors,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _takes_descriptors(call: _Call) -> bool:
    """Whether q, k and v are read through tensor descriptors: where that pays, and the layout allows it."""
    return (
        _descriptors_pay(call)
        and call.constants["ALIGNMENT"] > 1
        and all(x.data_ptr() % 16 == 0 for x in (call.q, call.k, call.v))
        and all(stride > 0 for stride in call.strides)
    )


def _descriptors_pay(call: _Call) -> bool:
    head_dims = config.DESCRIPTOR_HEAD_DIMS if call.padding is None else config.DESCRIPTOR_PADDED_HEAD_DIMS
    return (
        call.q.is_cuda
        and call.capability >= config.HOPPER
        and call.itemsize == config.HALF
        and call.block_d in head_dims
        and not call.heavy
        and call.queries >= config.DESCRIPTOR_MINIMUM_QUERIES
    )


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _launch_short_forward(call: _Call, tile: Tile, out: Tensor, lse: Tensor) -> None:
    grid = (triton.cdiv(call.queries, tile.queries) * call.batch * call.query_heads,)
    attention_short_forward_kernel[grid](
        call.q, call.k, call.v, out, lse, call.padding, call.bias, call.seed, *call.sizes, *call.strides,
        *call.bias_strides[:3], *call.numbers,
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_decode(call: _Call, out: Tensor, lse: Tensor) -> None:
    tile = call.tile("decode")
    programs = call.batch * call.key_heads
    blocks = triton.cdiv(call.keys, tile.keys)
    split_blocks = triton.cdiv(blocks, _splits(programs, blocks, _triton.multiprocessors(call.q.device)))
    splits = triton.cdiv(blocks, split_blocks)
    partial = partial_max = partial_sum = None
    if splits > 1:
        rows = (splits, *call.q.shape[:3])
        partial = torch.empty((*rows, call.head_dim), dtype=torch.float32, device=call.q.device)
        partial_max, partial_sum = (torch.empty(rows, dtype=torch.float32, device=call.q.device) for _ in range(2))
    constants = {name: value for name, value in call.constants.items() if name != "BIAS_ALIGNMENT"}
    constants["BIAS"] = call.bias is not None
    attention_decode_kernel[(programs, splits)](
        call.q, call.k, call.v, out, lse, partial, partial_max, partial_sum, call.padding, call.bias, call.seed,
        *call.sizes, split_blocks * tile.keys, *call.strides, *call.bias_strides, *call.numbers,
        **constants, BLOCK_M=max(16, _triton.next_power_of_2(call.queries * call.group)), BLOCK_N=tile.keys,
        NEGATE=call.scale < 0.0, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        attention_combine_kernel[(call.batch * call.query_heads * call.queries,)](
            partial, partial_max, partial_sum, out, lse, call.query_heads, call.queries, splits, call.numbers[3],
            HEAD_DIM=call.head_dim, BLOCK_D=call.block_d, BLOCK_SPLITS=config.COMBINED_SPLITS, num_warps=1,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """Into how many parts the keys are split: one where the device is busy anyway or the keys are few, else the fewest
    that fill the waves of programs to 85 % of what the best number does."""
    if programs >= 0.8 * multiprocessors or blocks <= 4:
        return 1
    candidates = range(1, min(blocks, config.MAXIMUM_SPLITS) + 1)
    waves = [programs * count / multiprocessors for count in candidates]
    efficiency = [wave / -(-wave // 1) for wave in waves]
    return next(count for count, value in zip(candidates, efficiency, strict=True) if value >= 0.85 * max(efficiency))


def _launch_backward(call: _Call, out: Tensor, statistics: _Statistics) -> None:
    lse, delta, correction = statistics.lse, statistics.delta, statistics.correction
    sequences = call.sequences is not None
    dout, dq, dk, dv = call.gradients
    tile = call.tile(f"query gradient{call.heavy}")
    grid = (triton.cdiv(call.queries, tile.queries) * call.batch * call.query_heads,)
    attention_backward_query_kernel[grid](
        call.q, call.k, call.v, out, lse, dout, statistics.dlse, delta, correction, dq, call.padding, call.sequences,
        call.bias, call.seed, *call.sizes, *call.strides, *call.gradient_strides[:6], *call.bias_strides[:3],
        *call.numbers, call.section(call.keys) * call.group,
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, MASKED_N=tile.masked, SEQUENCES=sequences,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    tile = call.tile("key gradient packed" if sequences else f"key gradient{call.heavy}")
    grid = (triton.cdiv(call.keys, tile.keys) * call.batch * call.key_heads,)
    attention_backward_key_kernel[grid](
        call.q, call.k, call.v, lse, dout, delta, correction, dk, dv, call.padding, call.sequences, call.bias,
        call.seed, *call.sizes, *call.strides, *call.gradient_strides[:3], *call.gradient_strides[6:],
        *call.bias_strides[:3], *call.numbers,
        call.section(call.queries * call.group),
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, MASKED_M=tile.masked, SEQUENCES=sequences,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_short_backward(call: _Call, tile: Tile, statistics: _Statistics) -> None:
    dout, *gradients = call.gradients
    attention_short_backward_kernel[(call.batch * call.key_heads,)](
        call.q, call.k, call.v, statistics.lse, dout, statistics.dlse, statistics.delta, statistics.correction,
        *gradients, call.padding, call.bias, call.seed, *call.sizes, *call.strides, *call.gradient_strides,
        *call.bias_strides[:3], *call.numbers,
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _bias_gradient(call: _Call, statistics: _Statistics) -> Tensor:
    """dbias, summed over the axes on which the bias is broadcast."""
    bias = call.bias
    assert bias is not None
    if bias.shape[3] > 1:
        return _launch_bias_gradient(call, bias, statistics)
    dlse = statistics.dlse
    if dlse is None:  # over all keys of a query dS sums to dlse: softmax does not feel a shift
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    return dlse.masked_fill(statistics.lse == float("-inf"), 0.0).unsqueeze(-1).sum_to_size(bias.shape).to(bias.dtype)


def _launch_bias_gradient(call: _Call, bias: Tensor, statistics: _Statistics) -> Tensor:
    """Each program sums dS over a share of what the bias is broadcast over; the shares are added up at the end."""
    tile = call.tile("bias gradient")
    blocks = (triton.cdiv(call.queries, tile.queries), triton.cdiv(call.keys, tile.keys))
    own = bias.shape[0] * bias.shape[1] * (blocks[0] if bias.shape[2] > 1 else 1) * blocks[1]
    shared = call.batch * call.query_heads * blocks[0] * blocks[1] // own
    splits = max(1, min(shared, config.MAXIMUM_SPLITS, 2 * _triton.multiprocessors(bias.device) // own))
    partial = torch.empty((splits, *bias.shape), dtype=bias.dtype if splits == 1 else torch.float32, device=bias.device)
    attention_backward_bias_kernel[(own * splits,)](
        call.q, call.k, call.v, statistics.lse, call.gradients[0], statistics.delta, statistics.correction, partial,
        call.padding, call.sequences, bias, call.seed, call.batch,
        *call.sizes, bias.shape[0], bias.shape[1], splits, *call.strides, *call.gradient_strides[:3],
        *call.bias_strides[:3], *call.numbers,
        **call.constants, BLOCK_M=tile.queries, BLOCK_N=tile.keys, SEQUENCES=call.sequences is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0).to(bias.dtype)
