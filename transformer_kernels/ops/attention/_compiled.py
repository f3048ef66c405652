"""Attention in C++: csrc/cpu/products/attention*.cpp and csrc/ops/attention*.cu, which take csrc/calls/attention.h."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, address, cuda, in_dtype_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into
from transformer_kernels.ops.attention._common import Angles, beyond, broadcast_strides, shift_gradient
from transformer_kernels.ops.rotary import Heads, RotaryCall
from transformer_kernels.ops.rotary._compiled import Kernels as RotaryKernels

MAX_HEAD_DIM = 256
MAX_FLOAT32_HEAD_DIM = 128
"""In fp32 on GPUs that give a block less than FLOAT32_WIDE_BYTES of shared memory, as those with 99 KiB do."""
FLOAT32_WIDE_BYTES = 131456

MAX_WHOLE_HEAD_DIM = 128
"""On a GPU, above it a block owns half the columns of dK, which rotary's kernel then rotates back in global memory."""

PATHS = {"auto": 0, "general": 1, "short": 2, "sm90": 3}  # csrc/ops/attention.cu

path = "auto"  # tests and benchmarks name the kernels of a GPU that they mean

View = tuple[int, int, int, int]
NO_VIEW: View = (0, 0, 0, 0)
NO_ANGLES = (0, 0, 0, 0, False)
NO_BIAS = (1, 1, 1, 1), (0, 0, 0, 0)


class Layout(NamedTuple):
    """The layout of a call, as passed to the kernels; strides are those of batches, heads and rows."""

    dtype: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    like_q: tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of out and dq, and of dk and dv
    like_k: tuple[tuple[int, ...], tuple[int, ...]]
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    bias_is_float32: bool
    bias_sizes: tuple[int, ...]
    bias_strides: tuple[int, ...]
    slope_strides: tuple[int, ...]
    sequences: int


class Kernels:
    """Forward and backward by the compiled kernels of one machine, with `layout` for calls of one layout."""

    def __init__(self, machine: Machine, layout: Layout | None = None) -> None:
        self._machine, self._layout, self.__name__ = machine, layout, machine.__name__

    def bound(self, call: AttentionCall) -> Kernels:
        """The kernels for calls of this layout."""
        return Kernels(self._machine, self._layout_of(call))

    def _layout_of(self, call: AttentionCall) -> Layout:
        q, k, v, scores = call.q, call.k, call.v, call.scores
        bias, slopes, starts = scores.bias, scores.alibi_slopes, scores.cu_seqlens
        batch, heads, queries, width = q.shape
        sizes, strides = NO_BIAS if bias is None else (tuple(bias.shape), broadcast_strides(bias))
        return Layout(
            self._machine.DTYPE_CODES[q.dtype],
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            _output_layout(q),
            _output_layout(k),
            batch,
            heads,
            k.shape[1],
            queries,
            k.shape[2],
            width,
            bias is not None and bias.dtype is torch.float32,
            sizes,
            strides,
            (0, 0) if slopes is None else broadcast_strides(slopes)[:2],
            0 if starts is None else len(starts) - 1,
        )

    def unsupported(self, call: AttentionCall) -> str | None:
        """Why these kernels do not support this call, or None."""
        return _unsupported_on_gpu(call) if self._machine is cuda else None

    def rotates(self, call: AttentionCall) -> bool:
        """Whether the kernels rotate queries and keys as they read them; a GPU's for the bias's gradient does not."""
        return self._machine is not cuda or call.scores.bias is None

    def forward(self, call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
        """out (B, Hq, Lq, D), in memory (B, Lq, Hq, D), lse (B, Hq, Lq) and statistics (B, Hq, 2, Lq)."""
        q, layout = call.q, self._layout or self._layout_of(call)
        batch, heads, queries = layout.batch, layout.heads, layout.queries
        lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
        statistics = q.new_empty((batch, heads, 2, queries), dtype=torch.float32)
        result = AttentionResult(q.new_empty_strided(*layout.like_q), lse, statistics)
        self._run(self._machine.load().attention_forward, layout, call, result, angles)
        return result

    def backward(
        self,
        call: AttentionCall,
        result: AttentionResult,
        grads: Grads,
        wanted: Wanted,
        into: Into | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, which are `into` where it is given, and dbias, bit for bit the same each time."""
        machine, bias, (dout, dlse) = self._machine, call.scores.bias, grads
        layout = self._layout or self._layout_of(call)
        dout = torch.zeros_like(result.out) if dout is None else dout
        q, every = call.q, machine is cuda
        dq, dk, dv = into or (
            q.new_empty_strided(*layout.like_q) if every or wanted[0] else None,
            q.new_empty_strided(*layout.like_k) if every or wanted[1] else None,
            q.new_empty_strided(*layout.like_k) if every or wanted[2] else None,
        )
        summed = bias if bias is not None and wanted[3] and bias.shape[3] > 1 else None
        dbias = None if summed is None else machine.sum_like(summed, True)
        delta = machine.workspace(result.lse)
        self._run(
            machine.load().attention_backward, layout, call, result, angles,
            _view(dout), _view(dq), _view(dk), _view(dv), address(dlse), address(dbias), address(delta),
        )  # fmt: skip
        if angles is not None and machine is cuda and call.q.shape[3] > MAX_WHOLE_HEAD_DIM:
            assert dk is not None  # a GPU's kernels compute all three
            heads = Heads(dk, None)
            RotaryKernels(machine).rotate(RotaryCall(dk, dk, *angles), heads, heads, inverse=True)
        if bias is None or not wanted[3]:
            return dq, dk, dv, None
        if summed is None:
            return dq, dk, dv, shift_gradient(dlse, result.statistics, bias)
        return dq, dk, dv, in_dtype_of(bias, dbias)

    def _run(
        self,
        kernel: Any,
        layout: Layout,
        call: AttentionCall,
        result: AttentionResult,
        angles: Angles | None,
        dout: View = NO_VIEW,
        dq: View = NO_VIEW,
        dk: View = NO_VIEW,
        dv: View = NO_VIEW,
        dlse: int = 0,
        dbias: int = 0,
        delta: int = 0,
    ) -> None:
        q, k, v, scores, seed, dropout_p = call
        code, q_strides, k_strides, v_strides, _, _, batch, heads, kv_heads, queries, keys, width, *biased = layout
        wide, bias_sizes, bias_strides, slope_strides, sequences = biased
        scale, left, right, softcap, bias, slopes, _, padding, starts, starts_k = scores
        device, stream = self._machine.stream_of(q)
        kernel(
            dtype=code,
            q=(q.data_ptr(), *q_strides),
            k=(k.data_ptr(), *k_strides),
            v=(v.data_ptr(), *v_strides),
            out=_view(result.out),
            lse=result.lse.data_ptr(),
            statistics=address(result.statistics),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            queries=queries,
            keys=keys,
            width=width,
            scale=scale,
            left=left,
            right=right,
            softcap=softcap,
            bias=address(bias),
            bias_is_float32=wide,
            bias_sizes=bias_sizes,
            bias_strides=bias_strides,
            alibi_slopes=address(slopes),
            slope_strides=slope_strides,
            key_padding_mask=address(padding),
            cu_seqlens=address(starts),
            cu_seqlens_k=address(starts if starts_k is None else starts_k),
            sequences=sequences,
            angles=NO_ANGLES if angles is None else angles.addresses(),
            seed=address(seed),
            dropout_p=dropout_p,
            dout=dout,
            dq=dq,
            dk=dk,
            dv=dv,
            dlse=dlse,
            dbias=dbias,
            delta=delta,
            path=PATHS[path],
            device=device,
            stream=stream,
        )


def _unsupported_on_gpu(call: AttentionCall) -> str | None:
    if (reason := beyond(call)) is not None:
        return reason
    width = call.q.shape[3]
    if width > MAX_HEAD_DIM:
        return f"the head dimension is {width}, above {MAX_HEAD_DIM}; backend='torch' takes it"
    if call.q.dtype is torch.float32 and width > MAX_FLOAT32_HEAD_DIM:
        given = cuda.load().shared_memory_per_block(call.q.device.index or 0)
        if given < FLOAT32_WIDE_BYTES:
            return (
                f"the head dimension is {width}; in float32 above {MAX_FLOAT32_HEAD_DIM} the backward pass needs "
                f"{FLOAT32_WIDE_BYTES} bytes of shared memory and this GPU gives a block {given}; use float16 or "
                "bfloat16, or backend='torch'"
            )
    return None


def _output_layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor of x's shape (B, H, L, D) that is laid out in memory as (B, L, H, D)."""
    batch, heads, length, width = x.shape
    row = heads * width
    return (batch, heads, length, width), (length * row, width, row, 1)


def _view(x: Tensor | None) -> View:
    """Address and strides of batches, heads and rows; zeros for an absent tensor."""
    return NO_VIEW if x is None else (x.data_ptr(), *x.stride()[:3])  # type: ignore[return-value]
