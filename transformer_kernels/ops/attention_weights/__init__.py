"""The weights of attention, written out: the map (B, H, Lq, Lk) for those who want to look at it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd
from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.ops._softcap import cap, cap_slope
from transformer_kernels.ops._visible import visible_mask
from transformer_kernels.ops.attention import Window
from transformer_kernels.ops.attention import prepare as checked_attention
from transformer_kernels.ops.softmax import SoftmaxCall

OP = "attention_weights"


class AttentionWeightsCall(NamedTuple):
    """As `AttentionCall`, without values and dropout."""

    q: Tensor
    k: Tensor
    key_padding_mask: Tensor | None
    attn_bias: Tensor | None
    cu_seqlens: Tensor | None
    causal: bool
    window: int | None
    right: int | None
    scale: float
    softcap: float | None


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale * q k^T + bias) over the keys that a query may see: what `attention` multiplies the values by.

    Memory grows with Lq * Lk: it is for looking, not for training.

    Args:
        q, k, causal, key_padding_mask, attn_bias, cu_seqlens, window, scale, softcap: as in `attention`.
        backend: "torch", "cpu", "triton", "cuda" or "auto", whose `softmax` answers; the products are PyTorch's.
    Returns:
        (B, Hq, Lq, Lk) in the dtype of q, scores and sums in float32 (float64 for float64). A row sums to 1, or is 0
        where the query sees no key.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    call = prepare(
        q,
        k,
        causal=causal,
        key_padding_mask=key_padding_mask,
        attn_bias=attn_bias,
        cu_seqlens=cu_seqlens,
        window=window,
        scale=scale,
        softcap=softcap,
    )
    return OPERATION(call, backend)


def prepare(q: Tensor, k: Tensor, **options: Any) -> AttentionWeightsCall:
    """The checked arguments; what is wrong with them is told as of `attention`."""
    _autograd.refuse_transforms(OP, *(each for each in (q, k, options.get("attn_bias")) if isinstance(each, Tensor)))
    call = checked_attention(q, k, k, **options)
    masks = call.key_padding_mask, call.attn_bias, call.cu_seqlens
    reach = call.causal, call.window, call.right
    return AttentionWeightsCall(call.q, call.k, *masks, *reach, call.scale, call.softcap)


class _OnSoftmax:
    """The operation on the softmax of a backend; scores are float32 whatever the dtype of q."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def unsupported(self, call: AttentionWeightsCall) -> str | None:
        refusal = getattr(self.kernels, "unsupported", None)
        return None if refusal is None else refusal(SoftmaxCall(call.q, None, False, 1.0))

    def forward(self, call: AttentionWeightsCall) -> Tensor:
        q, k = _operands(call)
        with torch.autocast(q.device.type, enabled=False):
            scores = _scores(call, q, k)
        masks = call.causal, call.window, call.key_padding_mask, call.cu_seqlens, call.right
        mask = visible_mask(scores.shape[2], scores.shape[3], q.device, *masks)
        if call.attn_bias is not None:
            scores = scores + call.attn_bias
            seen = call.attn_bias != -math.inf  # a row of -inf would be NaN
            mask = seen if mask is None else mask & seen
        mask = None if mask is None else mask.expand(scores.shape)
        return self.kernels.forward(SoftmaxCall(scores, mask, False, 1.0)).to(call.q.dtype)

    def backward(
        self, call: AttentionWeightsCall, weights: Tensor, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k = _operands(call)
        hidden = SoftmaxCall(None, None, False, 1.0)  # type: ignore[arg-type]
        dy = grads[0].to(q.dtype)
        (dscores,) = self.kernels.backward(hidden, weights.to(q.dtype), (dy,), (True,))
        bias = call.attn_bias
        dbias = None if bias is None else dscores.sum_to_size(bias.shape).to(bias.dtype)
        with torch.autocast(q.device.type, enabled=False):
            if call.softcap is not None:
                dscores = dscores * cap_slope(_scores(call, q, k), call.softcap)
            dscores = dscores.unflatten(1, q.shape[1:3]).mul(call.scale)  # (B, Hk, group, Lq, Lk)
            dq = (dscores @ k).flatten(1, 2)
            dk = (dscores.transpose(-2, -1) @ q).sum(dim=2)
        return dq.to(call.q.dtype), dk.to(call.k.dtype), dbias


def _operands(call: AttentionWeightsCall) -> tuple[Tensor, Tensor]:
    """q (B, Hk, group, Lq, D) and k (B, Hk, 1, Lk, D), at least float32; what a mask hides of k is 0, were it NaN."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    k = call.k.to(wide)
    if call.key_padding_mask is not None:
        k = k.masked_fill(~call.key_padding_mask[:, None, :, None], 0.0)
    return call.q.to(wide).unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)


def _scores(call: AttentionWeightsCall, q: Tensor, k: Tensor) -> Tensor:
    """The scores (B, Hq, Lq, Lk) of `_operands`, to which nothing is added yet."""
    return cap((q @ k.transpose(-2, -1)).mul_(call.scale), call.softcap).flatten(1, 2)


OPERATION = _autograd.Operation(
    OP,
    AttentionWeightsCall,
    fake=lambda call: call.q.new_empty(*call.q.shape[:3], call.k.shape[2]),
    differentiable=("q", "k", "attn_bias"),
    kept=("",),
    sizes=("q", "k"),
    kernels="softmax",
    adapt=_OnSoftmax,
)
