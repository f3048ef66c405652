"""Attention in csrc: cpu/products/attention*.cpp and cuda/launchers/attention*.cu, which take calls/attention.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels.backends import Memory, contiguous_memory, cuda, in_dtype_of
from transformer_kernels.ops._derivatives import Outputs, Parts
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into
from transformer_kernels.ops.attention._call import Scores, last_axis_contiguous
from transformer_kernels.ops.attention._common import (
    Angles,
    AttentionKernels,
    beyond,
    broadcast_strides,
    shift_gradient,
)
from transformer_kernels.ops.rotary import Heads, RotaryCall
from transformer_kernels.ops.rotary._compiled import Kernels as RotaryKernels

if TYPE_CHECKING:
    from transformer_kernels.ops.attention.packed import PackedAttentionCall

HEAD_DIMS = (32, 64, 128, 256)
"""The compiled ones; others run on the next."""
MAX_HEAD_DIM = HEAD_DIMS[-1]
SHARED_BYTES = {1024: 131456, 512: 98848}
"""By bytes of a row of keys: shared memory of a block of the largest kernel, the backward pass in fp32 above head
dimension 128, which GPUs with 99 KiB lack, and the forward pass at half that width, which sm_75 with 64 KiB lacks.
Shorter rows fit everywhere."""

MAX_WHOLE_HEAD_DIM = 128
"""On a GPU, above it a block owns half the columns of dK, which rotary's kernel then rotates back in global memory."""

PATHS = {"auto": 0, "general": 1, "short": 2, "sm90": 3, "sm90_persistent": 4}  # csrc/cuda/launchers/attention.cu

path = "auto"  # tests and benchmarks name the kernels of a GPU that they mean

Strides = tuple[int, ...]
"""The strides of batches, heads and rows (B, H, L); the last axis is contiguous."""

NO_STRIDES, NO_VIEW, NO_ANGLES = (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, False)
NO_BIAS = (1, 1, 1, 1), (0, 0, 0, 0)
NO_OPTIONS = (None,) * 7
NO_SUMS = {"dlse": 0, "dbias": 0, "delta": 0}


class Kernels(AttentionKernels, Compiled):
    """Forward and backward by the compiled kernels of one machine, for calls of one layout."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        q, k, v, scores, _, self._dropout_p = call
        self._kernels = dict[Any, Any]()
        self._numbers: dict[str, Any] = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
        self._numbers |= {"queries": q.shape[2], "keys": k.shape[2], "width": q.shape[3]}
        self._numbers |= {"scale": scores.scale, "left": scores.left, "right": scores.right, "softcap": scores.softcap}
        self._like_q, self._like_k = _output_memory(q), _output_memory(k)
        rows = tuple(q.shape[:3])
        self._lse = contiguous_memory(rows)
        self._statistics = contiguous_memory((*rows[:2], 2, rows[2]))
        self._gradients: tuple[Strides, ...] = self._like_q[1][:3], *[self._like_k[1][:3]] * 2
        self._strides = [x.stride()[:3] for x in (q, k, v)]
        bias, slopes, starts = scores.bias, scores.alibi_slopes, scores.cu_seqlens
        sizes, strides = NO_BIAS if bias is None else (tuple(bias.shape), broadcast_strides(bias))
        self._biased: dict[str, Any] = {"bias_is_float32": bias is not None and bias.dtype is torch.float32}
        self._biased |= {"bias_sizes": sizes, "bias_strides": strides}
        mask, ranges = scores.mask, scores.key_ranges
        self._biased["mask_strides"] = (0, 0, 0, 0) if mask is None else broadcast_strides(mask)
        self._biased["range_strides"] = (0, 0, 0) if ranges is None else _range_strides(ranges)
        self._slopes = (0, 0) if slopes is None else broadcast_strides(slopes)[:2]
        self._plain = not any(isinstance(option, Tensor) for option in scores)
        self._sequences = 0 if starts is None else len(starts) - 1

    @classmethod
    def packed(cls, call: PackedAttentionCall, inner: AttentionCall) -> PackedKernels | None:
        """The kernels for packed calls of this layout; None where they lack a part of one."""
        whole = cls.machine is not cuda or call.qkv.shape[3] <= MAX_WHOLE_HEAD_DIM
        can = call.scores.sinks is None and (call.cos is None or (whole and cls.rotates(inner)))
        kernels: Any = PackedKernels
        return kernels.on(cls.machine)(call, inner) if can else None

    @classmethod
    def unsupported(cls, call: AttentionCall) -> str | None:
        """Why these kernels do not support this call, or None."""
        return _unsupported_on_gpu(call) if cls.machine is cuda else None

    @classmethod
    def rotates(cls, call: AttentionCall) -> bool:
        """A GPU's kernels for the bias's gradient do not rotate."""
        return cls.machine is not cuda or call.scores.bias is None

    def _kernel(
        self,
        name: str,
        angles: Angles | None,
        dout_strides: Strides | None = None,
        strides: tuple[Strides, ...] | None = None,
    ) -> Any:
        """The kernel for these angles, and in backward for these strides of dout and of dq, dk and dv, bound once.

        By default dq, dk and dv have the strides of this layout.
        """
        table = None if angles is None else angles.layout()
        key = path, table, dout_strides, strides
        kernel = self._kernels.get(key)
        if kernel is None:
            q, k, v, out = ((None, *steps) for steps in (*self._strides, self._like_q[1][:3]))
            gradients = () if dout_strides is None else (dout_strides, *(strides or self._gradients))
            dout, dq, dk, dv = [(None, *steps) for steps in gradients] or [NO_VIEW] * 4
            kernel = self._kernels[key] = self._bind(
                name,
                q=q,
                k=k,
                v=v,
                out=out,
                **self._numbers,
                **self._biased,
                slope_strides=self._slopes,
                sequences=self._sequences,
                angles=NO_ANGLES if table is None else (None, None, *table),
                dropout_p=self._dropout_p,
                dout=dout,
                dq=dq,
                dk=dk,
                dv=dv,
                **({} if gradients else NO_SUMS),
                path=PATHS[path],
            )
        return kernel

    def forward(self, call: AttentionCall, angles: Angles | None = None) -> AttentionResult:
        """out (B, Hq, Lq, D), in memory (B, Lq, Hq, D), lse (B, Hq, Lq) and statistics (B, Hq, 2, Lq)."""
        return self._run(call.q, call.k, call.v, self._like_q, call, angles)

    def forward_recorded(self, call: AttentionCall) -> AttentionResult:
        """`forward` where lse is not returned."""
        return self._run(call.q, call.k, call.v, self._like_q, call, None, returns_lse=False)

    def forward_alone(self, call: AttentionCall) -> AttentionResult:
        """`forward` where lse is not returned and there is no backward."""
        return self._run(call.q, call.k, call.v, self._like_q, call, None, returns_lse=False, recorded=False)

    def _run(
        self,
        q: Any,
        k: Any,
        v: Any,
        like: Memory,
        call: AttentionCall | PackedAttentionCall,
        angles: Angles | None,
        *,
        returns_lse: bool = True,
        recorded: bool = True,
    ) -> AttentionResult:
        """Kernels of a GPU write lse and statistics in each call."""
        empty, writes_all = self._machine.allocator(self._device), self._machine is cuda
        out = empty(*like)
        lse = empty(*self._lse) if returns_lse or writes_all else None
        statistics = empty(*self._statistics) if recorded or writes_all else None
        kernel = self._kernel("attention_forward", angles)
        kernel(q, k, v, out, lse, statistics, *self._options(call.scores, angles), call.seed)
        return AttentionResult(out, lse, statistics)  # type: ignore[arg-type]

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
        dout, dlse = grads
        dout = torch.zeros_like(result.out) if dout is None else dout
        empty, writes_all = self._machine.allocator(self._device), self._machine is cuda
        if into is None:
            dq = empty(*self._like_q) if writes_all or wanted[0] else None
            dk = empty(*self._like_k) if writes_all or wanted[1] else None
            dv = empty(*self._like_k) if writes_all or wanted[2] else None
            strides = None
        else:
            (dq, dk, dv), strides = into, tuple(x.stride()[:3] for x in into)
        kernel = self._kernel("attention_backward", angles, dout.stride()[:3], strides)
        given = call.q, call.k, call.v, *result, *self._options(call.scores, angles), call.seed, dout, dq, dk, dv
        dbias = self._run_backward(kernel, given, result, call.scores.bias if wanted[3] else None, dlse)
        if angles is not None and self._machine is cuda and call.q.shape[3] > MAX_WHOLE_HEAD_DIM:
            assert dk is not None  # a GPU's kernels compute all three
            heads, rotation = Heads(dk, None), RotaryCall(dk, dk, *angles)
            rotary: Any = RotaryKernels.on(self._machine)
            rotary(rotation).rotate(rotation, heads, heads, inverse=True)
        return dq, dk, dv, dbias

    def forward_tangent(
        self, call: AttentionCall, tangents: Parts, angles: Angles | None = None
    ) -> tuple[AttentionResult, Outputs] | None:
        """The results, and the tangents of out and lse; CPU only, and without a tangent of the bias."""
        if self._machine is cuda or tangents[3] is not None:
            return None
        of_heads = [x if x is None else last_axis_contiguous(x.resolve_neg()) for x in tangents[:3]]
        strides = tuple(NO_STRIDES if x is None else x.stride()[:3] for x in of_heads)
        return self._run_tangent((call.q, call.k, call.v), of_heads, strides, self._like_q, call, angles)

    def _run_tangent(
        self,
        heads: tuple[Any, Any, Any],
        tangents: Sequence[Any],
        strides: tuple[Strides, ...],
        like: Memory,
        call: AttentionCall | PackedAttentionCall,
        angles: Angles | None,
    ) -> tuple[AttentionResult, Outputs]:
        """`forward_tangent` for q, k and v and the tangents of these, as tensors or addresses."""
        empty = self._machine.allocator(self._device)
        result = AttentionResult(empty(*like), empty(*self._lse), empty(*self._statistics))
        dout, dlse = empty(*like), empty(*self._lse)
        kernel = self._kernel("attention_tangent", angles, self._like_q[1][:3], strides)
        options = *self._options(call.scores, angles), call.seed
        kernel(*heads, *result, *options, dout, *tangents, dlse, None, None)
        return result, (dout, dlse)

    def _options(self, scores: Scores, angles: Angles | None) -> tuple[Tensor | None, ...]:
        """The tensors beside q, k and v, in the order of csrc/calls/attention.h."""
        if self._plain and angles is None:
            return NO_OPTIONS
        _, _, _, _, bias, mask, ranges, slopes, _, padding, starts, starts_k = scores
        options = bias, mask, ranges, slopes, padding, starts, starts if starts_k is None else starts_k
        return options if angles is None else (*options, angles.cos, angles.sin)

    def _run_backward(
        self, kernel: Any, given: tuple[Any, ...], result: AttentionResult, bias: Tensor | None, dlse: Tensor | None
    ) -> Tensor | None:
        """Run the kernel; returns dbias, if the bias is given."""
        dbias = None if bias is None or bias.shape[3] == 1 else self._machine.sum_like(bias, True)
        kernel(*given, dlse, dbias, self._machine.workspace(result.lse))
        if bias is None:
            return None
        return shift_gradient(dlse, result.statistics, bias) if dbias is None else in_dtype_of(bias, dbias)


class PackedKernels(Kernels):
    """Attention on packed projections: queries, keys and values are offsets into one tensor."""

    def __init__(self, call: PackedAttentionCall, inner: AttentionCall) -> None:
        super().__init__(inner)
        qkv, heads, kv_heads = call.qkv, inner.q.shape[1], inner.k.shape[1]
        batch, length, every, width = qkv.shape
        self._out = contiguous_memory((batch, length, heads * width), qkv.dtype)
        self._like_qkv = contiguous_memory(tuple(qkv.shape), qkv.dtype)
        self._heads_before = heads, heads + kv_heads
        self._of_k, self._of_v = (qkv.stride(2) * skipped * qkv.itemsize for skipped in self._heads_before)
        self._of_dk, self._of_dv = (width * skipped * qkv.itemsize for skipped in self._heads_before)
        self._gradients = ((length * every * width, width, every * width),) * 3

    def forward(self, call: PackedAttentionCall, recorded: bool = True) -> AttentionResult:  # type: ignore[override]
        """out (B, L, H * D) and statistics."""
        q = call.qkv.data_ptr()
        views = q, q + self._of_k, q + self._of_v
        return self._run(*views, self._out, call, _angles(call), returns_lse=False, recorded=recorded)

    def forward_alone(self, call: PackedAttentionCall) -> AttentionResult:  # type: ignore[override]
        """out (B, L, H * D)."""
        return self.forward(call, recorded=False)

    forward_recorded = forward  # type: ignore[assignment]

    def backward(  # type: ignore[override]
        self, call: PackedAttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dqkv and dbias."""
        dqkv, angles = self._machine.allocator(self._device)(*self._like_qkv), _angles(call)
        q, dq = call.qkv.data_ptr(), dqkv.data_ptr()
        kernel = self._kernel("attention_backward", angles, self._like_q[1][:3])
        views = q, q + self._of_k, q + self._of_v, *result
        gradients = grads[0], dq, dq + self._of_dk, dq + self._of_dv
        given = *views, *self._options(call.scores, angles), call.seed, *gradients
        return dqkv, self._run_backward(kernel, given, result, call.scores.bias if wanted[1] else None, None)

    def forward_tangent(  # type: ignore[override]
        self, call: PackedAttentionCall, tangents: Parts
    ) -> tuple[AttentionResult, Outputs] | None:
        """As for separate q, k and v."""
        if self._machine is cuda or tangents[0] is None or tangents[1] is not None:
            return None
        dqkv = last_axis_contiguous(tangents[0].resolve_neg())
        batch, row, head = dqkv.stride()[:3]
        q, dq = call.qkv.data_ptr(), dqkv.data_ptr()
        of_k, of_v = (head * skipped * dqkv.itemsize for skipped in self._heads_before)
        heads, of_heads = (q, q + self._of_k, q + self._of_v), (dq, dq + of_k, dq + of_v)
        return self._run_tangent(heads, of_heads, ((batch, head, row),) * 3, self._out, call, _angles(call))


def _angles(call: PackedAttentionCall) -> Angles | None:
    if call.cos is None or call.sin is None:
        return None
    return Angles(call.cos.float(), call.sin.float(), call.interleaved)


def _unsupported_on_gpu(call: AttentionCall) -> str | None:
    if (reason := beyond(call)) is not None:
        return reason
    width = call.q.shape[3]
    if width > MAX_HEAD_DIM:
        return f"the head dimension is {width}, above {MAX_HEAD_DIM}; backend='torch' takes it"
    itemsize = call.q.element_size()
    compiled = next(bound for bound in HEAD_DIMS if width <= bound)
    needed = SHARED_BYTES.get(compiled * itemsize, 0)
    if needed and (given := cuda.load().shared_memory_per_block(call.q.device.index or 0)) < needed:
        largest = HEAD_DIMS[HEAD_DIMS.index(compiled) - 1]
        smaller = "float16 or " * (itemsize == 4)
        return (
            f"the head dimension is {width}; in {str(call.q.dtype)[6:]} above {largest} the kernels need {needed} "
            f"bytes of shared memory and this GPU gives a block {given}; use {smaller}backend='torch'"
        )
    return None


def _range_strides(ranges: Tensor) -> tuple[int, ...]:
    """The strides of contiguous ranges (B, Hq, Lq, 2) in pairs, 0 along broadcast axes."""
    return tuple(stride // 2 for stride in broadcast_strides(ranges)[:3])


def _output_memory(x: Tensor) -> Memory:
    """The sizes (B, H, L, D) and dtype of x, with strides of the memory layout (B, L, H, D)."""
    batch, heads, length, width = x.shape
    row = heads * width
    return (batch, heads, length, width), (length * row, width, row, 1), x.dtype
