"""Attention in PyTorch: its fused kernels where they support the call, else chunks of plain products.

PyTorch's fused kernels lack philox dropout by position and the gradients of a bias and of the log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, Into, like_output
from transformer_kernels.ops.attention._common import AttentionKernels
from transformer_kernels.ops.attention._composed import repeat_heads, spans
from transformer_kernels.ops.attention._torch_chunks import (
    as_dtype_of,
    backward_in_chunks,
    forward_in_chunks,
    sum_heads,
)
from transformer_kernels.ops.attention._torch_scores import rows_and_keys, visible_mask

aten = torch.ops.aten

CONTIGUOUS = torch.contiguous_format

LARGE_LSE, LARGE_LSE_OF_16_BITS = 64.0, 4096.0
"""Largest |lse| for fused backward: its rounding error (4e-6 and 2.4e-4 in float32) is smaller than the operands'."""


class Kernels(AttentionKernels):
    """Attention through PyTorch's kernels."""

    stores_statistics = False

    def forward(self, call: AttentionCall) -> AttentionResult:
        """out (B, Hq, Lq, D) and lse (B, Hq, Lq)."""
        q = call.q
        if not _one_by_one(call):
            return _forward(call, (0, 0))
        out, lse = like_output(q), q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for span, keys in _sequences(call, (out,), ()):
            out[:, :, span], lse[:, :, span], _ = _forward(_within(span, keys, call), (span.start, keys.start))
        return AttentionResult(out, lse, None)

    def backward(
        self, call: AttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted, into: Into | None = None
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv (written to `into` if given), dbias."""
        into = into or (like_output(call.q), like_output(call.k), like_output(call.v))
        needs_dbias = wanted[3]
        if not _one_by_one(call):
            return *into, _backward(call, result, grads, needs_dbias, into, (0, 0))
        bias = call.scores.bias if needs_dbias else None
        dbias = None if bias is None else torch.zeros_like(bias, dtype=result.lse.dtype, memory_format=CONTIGUOUS)
        for span, keys in _sequences(call, into[:1], into[1:]):
            own_result = AttentionResult(result.out[:, :, span], result.lse[:, :, span], None)
            own_grads = tuple(x if x is None else x[:, :, span] for x in grads)
            own_into = into[0][:, :, span], into[1][:, :, keys], into[2][:, :, keys]
            own = _within(span, keys, call), own_result, own_grads
            part = _backward(*own, needs_dbias, own_into, (span.start, keys.start))
            if dbias is not None and part is not None:
                rows_and_keys(span, keys, dbias).add_(part)
        return *into, as_dtype_of(bias, dbias)


def _one_by_one(call: AttentionCall) -> bool:
    """Whether packed sequences are computed one by one instead of with a mask."""
    scores = call.scores
    return scores.cu_seqlens is not None and (call.q.device.type == "cpu" or scores.cu_seqlens_k is not None)


def _sequences(
    call: AttentionCall, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> list[tuple[slice, slice]]:
    """(queries, keys) of each nonempty sequence; sets results (1, H, L, D) of tokens after the last sequence to 0."""
    scores = call.scores
    assert scores.cu_seqlens is not None
    for results, starts in ((of_queries, scores.cu_seqlens), (of_keys, scores.cu_seqlens_k)):
        end = int((scores.cu_seqlens if starts is None else starts)[-1])
        for result in results:
            result[:, :, end:] = 0.0
    return spans(scores, call.q.shape[2], call.k.shape[2])


def _within(span: slice, keys: slice, call: AttentionCall) -> AttentionCall:
    """The call restricted to one sequence."""
    q, k, v = call.q[:, :, span], call.k[:, :, keys], call.v[:, :, keys]
    padding, bias = call.scores.key_padding_mask, call.scores.bias
    mask, ranges = call.scores.mask, call.scores.key_ranges
    if ranges is not None:
        ranges = (ranges if ranges.shape[2] == 1 else ranges[:, :, span]) - keys.start
    scores = call.scores._replace(
        key_padding_mask=None if padding is None else padding[:, keys],
        bias=None if bias is None else rows_and_keys(span, keys, bias),
        mask=None if mask is None else rows_and_keys(span, keys, mask),
        key_ranges=ranges,
        cu_seqlens=None,
        cu_seqlens_k=None,
    )
    return call._replace(q=q, k=k, v=v, scores=scores)


def _forward(call: AttentionCall, first: tuple[int, int]) -> AttentionResult:
    """out and lse; `first` is the position of the first query and key in dropout's counters."""
    call = _without_padding(call)
    if _fused(call):
        return _fused_forward(call)
    return forward_in_chunks(call, _visible(call), first)


def _backward(
    call: AttentionCall, result: AttentionResult, grads: Grads, needs_dbias: bool, into: Into, first: tuple[int, int]
) -> Tensor | None:
    """Fill dq, dk and dv; return dbias."""
    call = _without_padding(call)
    if grads[1] is None and not needs_dbias and _fused(call) and not _is_large(result.lse, call.q):
        for grad, computed in zip(into, _fused_backward(call, result, grads[0]), strict=True):
            grad.copy_(sum_heads(computed, grad.shape[1]))
        return None
    return backward_in_chunks(call, _visible(call), grads, needs_dbias, into, first)


def _without_padding(call: AttentionCall) -> AttentionCall:
    """The call with keys and values of 0 where they are padding: their weights are 0, and 0 * NaN is NaN."""
    if call.scores.key_padding_mask is None:
        return call
    padding = ~call.scores.key_padding_mask[:, None, :, None]
    return call._replace(k=call.k.masked_fill(padding, 0.0), v=call.v.masked_fill(padding, 0.0))


def _visible(call: AttentionCall) -> Tensor | None:
    return visible_mask(call.scores, call.q.shape[2], call.k.shape[2], call.q.device)


def _fused(call: AttentionCall) -> bool:
    """Whether PyTorch has a fused kernel for this call on this device; on a GPU rows must be aligned to 16 bytes."""
    q, k, v, scores = call.q, call.k, call.v, call.scores
    if scores.softcap > 0.0 or not (call.seed is scores.cu_seqlens is scores.alibi_slopes is None):
        return False
    if q.numel() == 0 or k.numel() == 0:
        return False
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and q.dtype is not torch.float64 and all(_rows_aligned(x) for x in (q, k, v))


def _fused_forward(call: AttentionCall) -> AttentionResult:
    q, scale = call.q, call.scores.scale
    mask, is_causal = _fused_mask(call)
    k, v = (repeat_heads(x, q.shape[1]) for x in (call.k, call.v))
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, _aligned(mask, q, k), True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32
    out, lse = out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()
    if mask is not None:  # the fused kernel returns an lse of 0 for fully masked rows
        lse = lse.masked_fill(mask.amax(dim=-1) == -math.inf, -math.inf)
    return AttentionResult(out, lse, None)


def _is_large(lse: Tensor, q: Tensor) -> bool:
    """Whether scores are so large that lse has lost bits of the log of the sum, which the fused backward subtracts.

    Checked on the CPU only: on a CUDA device the check would synchronise.
    """
    if lse.device.type != "cpu":
        return False
    largest = float(_finite(lse).abs().amax())
    return largest > (LARGE_LSE if q.element_size() > 2 else LARGE_LSE_OF_16_BITS)


def _fused_backward(call: AttentionCall, result: AttentionResult, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv per query head."""
    q, out, lse = call.q, result.out, result.lse
    mask, is_causal = _fused_mask(call)
    k, v = (repeat_heads(x, q.shape[1]) for x in (call.k, call.v))
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, out, _finite(lse), 0.0, is_causal, attn_mask=mask, scale=call.scores.scale
        )
    padded = torch.nn.functional.pad(_finite(lse), (0, -lse.shape[-1] % 32))
    no_philox = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_efficient_attention_backward.default(
        dout, q, k, v, _aligned(mask, q, k), out, padded, no_philox, no_philox, 0.0, [True, True, True, False],
        is_causal, scale=call.scores.scale,
    )[:3]  # fmt: skip


def _rows_aligned(x: Tensor) -> bool:
    sizes = (x.shape[3], x.storage_offset(), *x.stride()[:3])
    return all(size * x.element_size() % 16 == 0 for size in sizes)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as (B, Hq, Lq, Lk) in the dtype of q with rows that start at 16-byte boundaries."""
    if mask is None:
        return None
    keys = k.shape[2]
    padded = torch.nn.functional.pad(mask.to(q.dtype).expand(*mask.shape[:3], keys), (0, -keys % 16))
    return padded[..., :keys].expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _fused_mask(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """The additive mask for the fused kernel, and whether to use its `is_causal` instead.

    `is_causal` aligns top-left, and on the CPU multiplies -inf by the scale: NaN unless the scale is positive.
    """
    q, scores, attn_bias = call.q, call.scores, call.scores.bias
    others = scores.key_padding_mask, attn_bias, scores.mask, scores.key_ranges
    only_causal = scores.causal and not scores.windowed and all(other is None for other in others)
    if only_causal and q.shape[2] == call.k.shape[2] and scores.scale > 0.0:
        return None, True
    if attn_bias is not None and q.dtype is torch.float64:
        attn_bias = attn_bias.double()  # PyTorch's kernel reads the mask as float64
    visible = _visible(call)
    if visible is None:
        return attn_bias, False
    bias = torch.zeros((), dtype=q.dtype, device=q.device) if attn_bias is None else attn_bias
    mask = torch.where(visible, bias, -math.inf)
    return mask[(None,) * (4 - mask.dim())], False


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 for -inf: exp(score - lse) of a fully masked row is then 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)
