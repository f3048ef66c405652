"""The options of attention scores between q k^T and softmax: one validated record, the same for every backend."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation

OP = "attention"

Window = int | tuple[int | None, int | None] | None
"""The number of visible keys on either side of a query, or (left, right)."""

NO_LIMIT = 1 << 30
"""A reach that hides nothing: longer than any sequence, and sums of two of them stay within 32 bits."""


class Scores(NamedTuple):
    """Everything between scale * q k^T and softmax; the same record for every backend."""

    scale: float
    left: int  # visible keys before a query's own position; NO_LIMIT: all
    right: int  # keys after it; causal is right = 0
    softcap: float  # 0.0: none
    bias: Tensor | None  # four axes that broadcast to (B, Hq, Lq, Lk), the last one contiguous or broadcast
    mask: Tensor | None  # bool, True = visible; the same axes as the bias
    key_ranges: Tensor | None  # int32 (1 or B, 1 or Hq, 1 or Lq, 2), the first visible key and the one after the last
    alibi_slopes: Tensor | None  # (1 or B, Hq, 1, 1)
    sinks: Tensor | None  # (Hq,), logits that join the denominator of softmax
    key_padding_mask: Tensor | None  # (B, Lk)
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None

    @property
    def causal(self) -> bool:
        """Whether a query has no visible key after its own position."""
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Whether a window hides keys, besides causality."""
        return self.left < NO_LIMIT or 0 < self.right < NO_LIMIT

    def folded(self, seed: Tensor | None, *operands: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`Call.folded` of a call with such operands; dropout and packing depend on the index of a batch."""
        if seed is not None or self.cu_seqlens is not None:
            return (), ()
        others = "bias", "mask", "key_ranges", "alibi_slopes"
        return (*operands, "scores.key_padding_mask"), tuple(f"scores.{name}" for name in others)


def checked_scores(
    q: Tensor,
    k: Tensor,
    heads: int,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
) -> Scores:
    """The validated record of a call with queries (B, ..., Lq, D), of so many heads, and keys (B, ..., Lk, D).

    `key_ranges` and `mask` are internal: the structure found in a dense mask, and a mask in addition to a bias.
    """
    _checks.flag(OP, "causal", causal)
    _checks.window(OP, window)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3])
    else:
        _checks.finite(OP, "scale", scale)
    if softcap is not None:
        _checks.finite(OP, "softcap", softcap)
        _checks.positive(OP, "softcap", softcap)
    if key_padding_mask is not None:
        key_padding_mask = _checked_padding(key_padding_mask, k)
    if attn_bias is not None:
        attn_bias = _checked_bias(attn_bias, q, (q.shape[0], heads, q.shape[2], k.shape[2]))
        if attn_bias.dtype is torch.bool:
            mask, attn_bias = attn_bias, None
    if alibi_slopes is not None:
        alibi_slopes = _checked_slopes(alibi_slopes, q.shape[0], heads)
    if sinks is not None:
        _checks.tensor(OP, "sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(f"{OP}: sinks must have shape (Hq,) ({heads},); got {tuple(sinks.shape)}")
    if cu_seqlens is not None or cu_seqlens_k is not None:
        cu_seqlens, cu_seqlens_k = _checked_packing(cu_seqlens, cu_seqlens_k, q, k)
    left, right = reach(causal, window)
    return Scores(
        0.0 + float(scale), left, right, 0.0 if softcap is None else float(softcap),
        attn_bias, mask, key_ranges, alibi_slopes, sinks, key_padding_mask, cu_seqlens, cu_seqlens_k,
    )  # fmt: skip


def reach(causal: bool, window: Window) -> tuple[int, int]:
    """The number of visible keys before and after a query's own position."""
    if window is None:
        left = right = NO_LIMIT
    elif isinstance(window, tuple):
        left, right = (NO_LIMIT if limit is None else min(limit, NO_LIMIT) for limit in window)
    else:
        left = right = min(window - 1, NO_LIMIT)
    return left, 0 if causal else right


def _checked_padding(mask: Tensor, k: Tensor) -> Tensor:
    _checks.boolean_mask(OP, "key_padding_mask", mask)
    if mask.shape != (k.shape[0], k.shape[2]):
        expected = (k.shape[0], k.shape[2])
        raise ValueError(f"{OP}: key_padding_mask must have shape (B, Lk) {expected}; got {tuple(mask.shape)}")
    return mask.contiguous()


def _checked_bias(bias: Tensor, q: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The bias with four axes, its last one contiguous or broadcast."""
    is_mask = isinstance(bias, Tensor) and bias.dtype is torch.bool
    _checks.boolean_mask(OP, "attn_bias", bias) if is_mask else _checks.tensor(OP, "attn_bias", bias)
    _checks.broadcasts_to(OP, "attn_bias", bias, shape)
    if not is_mask and bias.dtype is not q.dtype and bias.dtype is not torch.float32:
        if _operation.autocast_dtype(q) is None:
            raise ValueError(f"{OP}: attn_bias must have the dtype of q ({q.dtype}) or torch.float32; got {bias.dtype}")
        bias = bias.to(q.dtype)
    return last_axis_contiguous(bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())])


def _checked_slopes(slopes: Tensor, batch: int, heads: int) -> Tensor:
    """The slopes as (1 or B, Hq, 1, 1)."""
    if not isinstance(slopes, Tensor) or slopes.dtype is not torch.float32:
        got = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"{OP}: alibi_slopes must be a float32 tensor; got {got}")
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{OP}: alibi_slopes must have shape (Hq,) ({heads},) or (B, Hq) {(batch, heads)}; "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.requires_grad:
        raise ValueError(f"{OP}: alibi_slopes have no gradient; detach them, or give the bias as attn_bias")
    return slopes.reshape(-1, heads, 1, 1)


def _checked_packing(
    cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor | None]:
    if cu_seqlens is None:
        raise ValueError(f"{OP}: cu_seqlens_k is given without cu_seqlens, the offsets of the queries' sequences")
    cu_seqlens = _checked_sequences("cu_seqlens", cu_seqlens, q.shape[2])
    if q.shape[0] != 1 or (cu_seqlens_k is None and q.shape[2] != k.shape[2]):
        wanted = "1 and q as long as k" if cu_seqlens_k is None else "1"
        raise ValueError(
            f"{OP}: with cu_seqlens the batch must be {wanted}; got q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    if cu_seqlens_k is None:
        return cu_seqlens, None
    cu_seqlens_k = _checked_sequences("cu_seqlens_k", cu_seqlens_k, k.shape[2])
    if len(cu_seqlens) != len(cu_seqlens_k):
        raise ValueError(
            f"{OP}: cu_seqlens and cu_seqlens_k must name as many sequences; "
            f"got {len(cu_seqlens) - 1} and {len(cu_seqlens_k) - 1}"
        )
    return cu_seqlens, cu_seqlens_k


def _checked_sequences(name: str, cu_seqlens: Tensor, tokens: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype is not torch.int32:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{OP}: {name} must be an int32 tensor; got {got}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{OP}: {name} must have shape (sequences + 1,); got {tuple(cu_seqlens.shape)}")
    if torch._C._functorch.is_batchedtensor(cu_seqlens):
        raise RuntimeError(f"{OP}: vmap over {name} is not supported; call it once for each packing")
    if not _operation.is_traced(cu_seqlens):
        if cu_seqlens.device.type == "cpu":  # numpy may write to it before backward without a new version
            cu_seqlens = cu_seqlens.clone()
        check_starts(name, cu_seqlens, tokens)
    return cu_seqlens.contiguous()


def check_starts(name: str, cu_seqlens: Tensor | None, tokens: int) -> None:
    """Raise unless the offsets rise within the tokens; on the CPU only, since on a GPU that would synchronise."""
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] > tokens or any(a > b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"{OP}: {name} must rise from 0 to at most {tokens}; got {starts}")


def check_when_run(scores: Scores, queries: int, keys: int) -> None:
    """The deferred check of a traced call, in which the sequences had no values."""
    check_starts("cu_seqlens", scores.cu_seqlens, queries)
    check_starts("cu_seqlens_k", scores.cu_seqlens_k, keys)


def last_axis_contiguous(x: Tensor) -> Tensor:
    """x, copied where its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
