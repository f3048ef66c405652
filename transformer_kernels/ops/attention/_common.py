"""Host code shared by attention's backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops._kernels import Kernels
from transformer_kernels.ops.attention import AttentionCall
from transformer_kernels.ops.attention._call import NO_LIMIT

if TYPE_CHECKING:
    from transformer_kernels.ops.attention.packed import PackedAttentionCall

MAXIMUM_LENGTH = NO_LIMIT // 2
"""Sums of lengths, tiles and windows stay within 32 bits."""


class Angles(NamedTuple):
    """Angles of rotary positions, as in `RotaryCall`, in float32. Kernels rotate queries and keys as they load them."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def layout(self) -> tuple[int, int, bool]:
        """The batch stride and width R / 2 of cos and sin (1 or B, L, R / 2), and whether pairs are interleaved."""
        _, length, half = self.cos.shape
        return 0 if len(self.cos) == 1 else length * half, half, self.interleaved


def beyond(call: AttentionCall) -> str | None:
    """Why the GPU kernels do not support the call, or None."""
    if call.scores.cu_seqlens_k is not None:
        return "it does not support keys packed differently from the queries (cu_seqlens_k); use backend='torch'"
    if call.scores.mask is not None:
        return "it does not support a bool attn_bias; use backend='torch'"
    if call.scores.key_ranges is not None:
        return "it does not support ranges of keys; use backend='torch'"
    if call.scores.alibi_slopes is not None and call.scores.bias is not None:
        return "it supports alibi_slopes or attn_bias, not both; use backend='torch'"
    if max(call.q.shape[2], call.k.shape[2]) > MAXIMUM_LENGTH:
        return f"it supports sequences of up to {MAXIMUM_LENGTH} tokens; use backend='torch'"
    return None


def broadcast_strides(bias: Tensor) -> tuple[int, ...]:
    """The strides of a bias (B, Hq, Lq, Lk), 0 along broadcast axes."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True))


def shift_gradient(dlse: Tensor | None, statistics: Tensor | None, bias: Tensor) -> Tensor:
    """The gradient of a bias with one value per query: the gradient of lse, since softmax is shift-invariant."""
    if dlse is None:
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    assert statistics is not None
    return dlse.masked_fill(statistics[:, :, 0] == -torch.inf, 0.0).unsqueeze(-1).sum_to_size(bias.shape).to(bias.dtype)


class AttentionKernels(Kernels):
    """The interface of a backend's attention kernels for the other operations."""

    stores_statistics = True
    """Whether `AttentionResult.statistics` has values; a traced call has zeros in place of None."""

    @staticmethod
    def score_unit(dtype: torch.dtype) -> float:
        """The factor of the natural logarithms in `AttentionResult.statistics`."""
        return 1.0

    @classmethod
    def rotates(cls, call: AttentionCall) -> bool:
        """Whether the kernels rotate queries and keys as they read them, given `angles`."""
        return False

    @classmethod
    def packed(cls, call: PackedAttentionCall, inner: AttentionCall) -> Kernels | None:
        """The kernels for packed calls of this layout, `inner` on views of its heads; None where it has none."""
        return None
