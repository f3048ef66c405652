"""Attention through PyTorch's fused kernels, and in chunks of plain products where those cannot say what we promise.

PyTorch's kernels have no philox dropout by position, no gradient of a bias and none of the log-sum-exp; such calls are
computed in chunks of the batch that bound the memory for scores.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from transformer_kernels.ops._visible import visible_mask
from transformer_kernels.ops.attention._torch_chunks import (
    Gradients,
    as_dtype_of,
    backward_in_chunks,
    forward_in_chunks,
    like_output,
    repeat_heads,
    sum_heads,
)

aten = torch.ops.aten


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float,
) -> str | None:
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Lq, D) and lse (B, Hq, Lq)."""
    if cu_seqlens is None or q.device.type != "cpu":
        return _forward(
            q, k, v, key_padding_mask, attn_bias, seed, cu_seqlens, causal, window, dropout_p, scale, 0
        )  # fmt: skip
    out, lse = like_output(q), q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for span in _sequences(cu_seqlens, (out,)):
        masks = _masks_of(span, key_padding_mask, attn_bias)
        query, key, value = (x[:, :, span] for x in (q, k, v))
        out[:, :, span], lse[:, :, span] = _forward(
            query, key, value, *masks, seed, None, causal, window, dropout_p, scale, span.start
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float,
    bias_needs_grad: bool,
    grads: Gradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (written into `grads` where those are given), dbias."""
    grads = (like_output(q), like_output(k), like_output(v)) if grads is None else grads
    if cu_seqlens is None or q.device.type != "cpu":
        dbias = _backward(
            grads, dout, dlse, q, k, v, out, lse, key_padding_mask, attn_bias, seed, cu_seqlens, causal, window,
            dropout_p, scale, bias_needs_grad, 0,
        )  # fmt: skip
        return *grads, dbias
    wanted = attn_bias if bias_needs_grad else None
    dbias = None if wanted is None else torch.zeros_like(wanted, dtype=lse.dtype, memory_format=torch.contiguous_format)
    for span in _sequences(cu_seqlens, grads):
        own_masks = _masks_of(span, key_padding_mask, attn_bias)
        dq, dk, dv, gradient, query, key, value, result = (x[:, :, span] for x in (*grads, dout, q, k, v, out))
        own_dlse = None if dlse is None else dlse[:, :, span]
        part = _backward(
            (dq, dk, dv), gradient, own_dlse, query, key, value, result, lse[:, :, span], *own_masks, seed, None,
            causal, window, dropout_p, scale, bias_needs_grad, span.start,
        )  # fmt: skip
        if dbias is not None and part is not None:
            _bias_of(span, dbias).add_(part)
    return *grads, as_dtype_of(wanted, dbias)


# Packed sequences, one after the other


def _sequences(cu_seqlens: Tensor, results: tuple[Tensor, ...]) -> list[slice]:
    """The tokens of each sequence that has any; the results (1, H, L, D) of those behind the last one become 0."""
    starts = cu_seqlens.tolist()
    for result in results:
        result[:, :, starts[-1] :] = 0.0
    return [slice(start, end) for start, end in itertools.pairwise(starts) if start < end]


def _bias_of(span: slice, attn_bias: Tensor) -> Tensor:
    """The bias between the tokens of one sequence, where it is not broadcast."""
    rows = attn_bias if attn_bias.shape[2] == 1 else attn_bias[:, :, span]
    return rows if attn_bias.shape[3] == 1 else rows[..., span]


def _masks_of(
    span: slice, key_padding_mask: Tensor | None, attn_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    padding = None if key_padding_mask is None else key_padding_mask[:, span]
    return padding, None if attn_bias is None else _bias_of(span, attn_bias)


# One batch


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float,
    first: int,
) -> tuple[Tensor, Tensor]:
    """out and lse; `first` is the token that dropout counts rows and columns from."""
    if _fused(q, k, v, seed) and cu_seqlens is None:
        out, lse = _fused_forward(q, k, v, key_padding_mask, attn_bias, causal, window, scale)
        restricted = causal or window is not None or key_padding_mask is not None
        if not restricted or q.device.type != "cpu" or math.isfinite(float(out.detach().sum())):
            return out, lse
    visible = visible_mask(q.shape[2], k.shape[2], q.device, causal, window, key_padding_mask, cu_seqlens)
    return forward_in_chunks(q, k, v, visible, attn_bias, seed, dropout_p, scale, first)


def _backward(
    grads: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    dropout_p: float,
    scale: float,
    bias_needs_grad: bool,
    first: int,
) -> Tensor | None:
    """Fill dq, dk and dv; return dbias."""
    restricted = causal or window is not None or key_padding_mask is not None
    fused = dlse is None and not bias_needs_grad and cu_seqlens is None and _fused(q, k, v, seed)
    if fused and restricted and q.device.type == "cpu":
        fused = math.isfinite(float(k.detach().sum() + v.detach().sum()))
    if not fused:
        visible = visible_mask(q.shape[2], k.shape[2], q.device, causal, window, key_padding_mask, cu_seqlens)
        return backward_in_chunks(
            grads, dout, dlse, q, k, v, visible, attn_bias, seed, dropout_p, scale, bias_needs_grad, first
        )
    mask, is_causal = _fused_mask(q, k, key_padding_mask, attn_bias, causal, window)
    k, v = _operands(k, v, q.shape[1], key_padding_mask)
    if q.device.type == "cpu":
        fused_grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dout, q, k, v, out, _finite(lse), 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        padded = torch.nn.functional.pad(_finite(lse), (0, -lse.shape[-1] % 32))
        no_philox = torch.zeros((), dtype=torch.int64, device=q.device)
        fused_grads = aten._scaled_dot_product_efficient_attention_backward.default(
            dout, q, k, v, _aligned(mask, q, k), out, padded, no_philox, no_philox, 0.0, [True, True, True, False],
            is_causal, scale=scale,
        )[:3]  # fmt: skip
    for grad, computed in zip(grads, fused_grads, strict=True):
        grad.copy_(sum_heads(computed, grad.shape[1]))
    return None


# PyTorch's fused kernels


def _fused(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None) -> bool:
    """Whether PyTorch has a fused kernel for this call on this device.

    It multiplies hidden keys by a weight of 0, so an inf or NaN among keys or values reaches rows that must not see it.
    On the CPU one sum finds that out, and the call is computed in chunks. On a CUDA device reading a sum would stop the
    device, so there keys behind the padding mask are zeroed instead (see `_operands`); it wants 16-byte aligned rows.
    """
    if seed is not None or q.numel() == 0 or k.numel() == 0:
        return False
    if q.device.type == "cpu":
        return True
    return q.device.type == "cuda" and q.dtype is not torch.float64 and all(_rows_aligned(x) for x in (q, k, v))


def _fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    mask, is_causal = _fused_mask(q, k, key_padding_mask, attn_bias, causal, window)
    k, v = _operands(k, v, q.shape[1], key_padding_mask)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, _aligned(mask, q, k), True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32
    out, lse = _laid_out(out), lse.contiguous()
    return out, lse if mask is None else _mark_blind_rows(lse, mask)


def _rows_aligned(x: Tensor) -> bool:
    sizes = (x.shape[3], x.storage_offset(), *x.stride()[:3])
    return all(size * x.element_size() % 16 == 0 for size in sizes)


def _operands(k: Tensor, v: Tensor, heads: int, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values for each query head."""
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    if key_padding_mask is None or k.device.type == "cpu":
        return k, v
    padding = ~key_padding_mask[:, None, :, None]
    return k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as (B, Hq, Lq, Lk) in the dtype of q with rows that start at 16-byte boundaries."""
    if mask is None:
        return None
    keys = k.shape[2]
    padded = torch.nn.functional.pad(mask.to(q.dtype).expand(*mask.shape[:3], keys), (0, -keys % 16))
    return padded[..., :keys].expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _fused_mask(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    attn_bias: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor | None, bool]:
    """The additive mask for the fused kernel, or the word "causal" where that says it all (it aligns top-left)."""
    if causal and window is None and key_padding_mask is None and attn_bias is None and q.shape[2] == k.shape[2]:
        return None, True
    visible = visible_mask(q.shape[2], k.shape[2], q.device, causal, window, key_padding_mask)
    if visible is None:
        return attn_bias, False
    bias = torch.zeros((), dtype=q.dtype, device=q.device) if attn_bias is None else attn_bias
    mask = torch.where(visible, bias, -math.inf)
    return mask[(None,) * (4 - mask.dim())], False


def _mark_blind_rows(lse: Tensor, mask: Tensor) -> Tensor:
    """lse with -inf in the rows that see no key, where the fused kernel leaves 0."""
    blind = mask.amax(dim=-1) == -math.inf  # (B or 1, Hq or 1, Lq or 1)
    return lse.masked_fill(blind, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    """lse where exp(score - lse) is 0, not NaN, for a row of hidden scores."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _laid_out(x: Tensor) -> Tensor:
    """x with the memory of a contiguous (B, L, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
