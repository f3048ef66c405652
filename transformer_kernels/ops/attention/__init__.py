"""Scaled dot-product attention, fused."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dropout import draw_seed

OP = "attention"


Window = int | tuple[int | None, int | None] | None
"""How far a query sees to either side, or (left, right)."""

NO_LIMIT = 1 << 30
"""A reach that hides nothing."""


class AttentionCall(NamedTuple):
    """q, k and v with contiguous last axes, the bias and the slopes with four axes; the seed is None without dropout.

    `right` is there only where a window reaches further, or less far, after a query than before it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_padding_mask: Tensor | None
    attn_bias: Tensor | None
    seed: Tensor | None
    cu_seqlens: Tensor | None
    causal: bool
    window: int | None
    dropout_p: float
    scale: float
    right: int | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    softcap: float | None = None


class AttentionResult(NamedTuple):
    """out (B, Hq, Lq, D), laid out in memory as (B, Lq, Hq, D), and lse (B, Hq, Lq) in float32 or float64."""

    out: Tensor
    lse: Tensor


Into = tuple[Tensor, Tensor, Tensor]
"""Where a backward pass writes the gradients of q, k and v."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: dropout(softmax(scale * q k^T + bias)) v over the keys that a query may see.

    Args:
        q: (B, Hq, Lq, D), float32, float16, bfloat16 (float64 with backend="torch"). Any strides; with a contiguous
            last axis, such as a view of a packed (B, L, 3, H, D) projection, nothing is copied.
        k: (B, Hk, Lk, D), the dtype of q. Hk divides Hq; query head h uses key head h // (Hq / Hk).
        v: (B, Hk, Lk, Dv). Where Dv is not D, the narrower of keys and values is copied with zeros behind it, and the
            call costs what one of the wider heads does.
        causal: query i sees the keys j <= i + Lk - Lq (aligned bottom-right).
        key_padding_mask: bool (B, Lk), True = a real token.
        attn_bias: added to the scores; broadcasts to (B, Hq, Lq, Lk); the dtype of q or float32. It may require grad.
        alibi_slopes: float32 (Hq,) or (B, Hq), without a gradient: -slope * |i + Lk - Lq - j| is added to the scores
            where they are made, so that no bias of their size is held.
        cu_seqlens: int32 (S + 1,), for S sequences that are packed one after the other into the tokens of B = 1, with
            Lq = Lk: sequence s is the tokens cu_seqlens[s] up to, not including, cu_seqlens[s + 1], and a query sees
            the keys of its own sequence only. Tokens behind the last sequence see nothing. The values are checked on
            the CPU only.
        cu_seqlens_k: the same for the keys, where they are packed otherwise than the queries: Lq and Lk may differ, and
            i' - i (below) is Lk - Lq of each sequence. backend="cpu", or "torch", which reads both on the host.
        window: with i' = i + Lk - Lq, a query sees i' - j < window and, unless causal, j - i' < window; with a pair
            (left, right) it sees i' - left <= j <= i' + right, where None is no limit.
        dropout_p: probability in [0, 1] with which a weight is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed,
            position), the same in every backend; the seed is drawn from torch's generator.
        scale: multiplies q k^T; 1 / sqrt(D) unless given.
        softcap: softcap * tanh(scale * q k^T / softcap) takes the place of scale * q k^T; attn_bias and alibi_slopes
            are added to that.
        return_lse: also return the natural log of the sum of exponentials of the scores, before dropout.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (B, Hq, Lq, Dv) in the dtype of q, laid out in memory as (B, Lq, Hq, max(D, Dv)); accumulated in float32. With
        return_lse also float32 (B, Hq, Lq) (float64 for float64). A query that sees no key gives 0, an lse of -inf, and
        zero gradients.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Vaswani et al., "Attention Is All You Need", 2017, equation 1; Dao, "FlashAttention-2", 2023, algorithms 1 and 2;
    Press, Smith, Lewis, "Train short, test long: attention with linear biases", 2022, section 3 (alibi_slopes); Gemma
    Team, "Gemma 2", 2024, section 2 (softcap).
    """
    call = prepare(
        q,
        k,
        v,
        causal=causal,
        key_padding_mask=key_padding_mask,
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        window=window,
        dropout_p=dropout_p,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
    )
    out, lse = OPERATION(call, backend)
    out = out[..., : v.shape[3]] if v.shape[3] < out.shape[3] else out
    return (out, lse) if return_lse else out


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> AttentionCall:
    """The checked arguments."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        _checks.tensor(OP, name, value)
        if value.dim() != 4:
            raise ValueError(f"{OP}: {name} must have 4 dimensions (B, H, L, D); got {tuple(value.shape)}")
    if (dtype := _autograd.autocast_dtype(q)) is not None and q.dtype is not torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_qkv(q, k, v)
    _checks.flag(OP, "causal", causal)
    _checks.flag(OP, "return_lse", return_lse)
    _checks.window(OP, window)
    _checks.probability(OP, "dropout_p", dropout_p)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    else:
        _checks.finite(OP, "scale", scale)
    if softcap is not None:
        _checks.finite(OP, "softcap", softcap)
        _checks.positive(OP, "softcap", softcap)
        softcap = float(softcap)
    if key_padding_mask is not None:
        key_padding_mask = _checked_padding(key_padding_mask, k)
    if attn_bias is not None:
        attn_bias = _checked_bias(attn_bias, q, k)
    if alibi_slopes is not None:
        alibi_slopes = _checked_slopes(alibi_slopes, q)
    if cu_seqlens is not None or cu_seqlens_k is not None:
        cu_seqlens, cu_seqlens_k = _checked_packing(cu_seqlens, cu_seqlens_k, q, k)
    masks = {"key_padding_mask": key_padding_mask, "attn_bias": attn_bias, "alibi_slopes": alibi_slopes}
    _checks.same_device(OP, q, k=k, v=v, **masks, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    _autograd.refuse_transforms(OP, q, k, v, attn_bias)
    seed = draw_seed(q.device) if dropout_p > 0.0 else None
    wide = max(q.shape[3], v.shape[3])
    q, k, v = (last_axis_contiguous(_widened(x, wide)) for x in (q, k, v))
    causal, window, right = reach(causal, window)
    numbers = causal, window, float(dropout_p), float(scale), right
    others = alibi_slopes, cu_seqlens_k, softcap
    return AttentionCall._make((q, k, v, key_padding_mask, attn_bias, seed, cu_seqlens, *numbers, *others))


def reach(causal: bool, window: Window) -> tuple[bool, int | None, int | None]:
    """The same as (causal, window, right), in the terms that most backends know wherever those suffice."""
    if not isinstance(window, tuple):
        return causal, window, None
    left, right = window
    before = None if left is None else left + 1
    if causal or right == 0:
        return True, before, None
    if left == right:
        return False, before, None
    return False, NO_LIMIT if before is None else before, NO_LIMIT if right is None else right


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtypes and shapes that must agree."""
    if not q.dtype is k.dtype is v.dtype:
        raise TypeError(f"{OP}: q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    batch, heads, _, width = q.shape
    if width == 0:
        raise ValueError(f"{OP}: the head dimension must be positive; got q {tuple(q.shape)}")
    if k.shape[3] != width:
        raise ValueError(f"{OP}: k must have the head dimension of q ({width}); got k {tuple(k.shape)}")
    if k.shape[0] != batch:
        raise ValueError(f"{OP}: k must have the batch size of q ({batch}); got k {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{OP}: v must have the batch size, heads and length of k {tuple(k.shape[:3])}; got v {tuple(v.shape)}"
        )
    if heads != k.shape[1] and (k.shape[1] == 0 or heads % k.shape[1]):
        raise ValueError(f"{OP}: the heads of k ({k.shape[1]}) must divide the heads of q ({heads})")


def _checked_padding(mask: Tensor, k: Tensor) -> Tensor:
    _checks.boolean_mask(OP, "key_padding_mask", mask)
    if mask.shape != (k.shape[0], k.shape[2]):
        expected = (k.shape[0], k.shape[2])
        raise ValueError(f"{OP}: key_padding_mask must have shape (B, Lk) {expected}; got {tuple(mask.shape)}")
    return mask.contiguous()


def _checked_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias with four axes, its last one contiguous or broadcast."""
    if isinstance(bias, Tensor) and bias.dtype is torch.bool:
        raise TypeError(f"{OP}: attn_bias is added to the scores, so it must be floating; got a bool mask")
    _checks.tensor(OP, "attn_bias", bias)
    _checks.broadcasts_to(OP, "attn_bias", bias, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if bias.dtype is not q.dtype and bias.dtype is not torch.float32:
        if _autograd.autocast_dtype(q) is None:
            raise ValueError(f"{OP}: attn_bias must have the dtype of q ({q.dtype}) or torch.float32; got {bias.dtype}")
        bias = bias.to(q.dtype)
    return last_axis_contiguous(bias[(None,) * (4 - bias.dim())])


def _checked_slopes(slopes: Tensor, q: Tensor) -> Tensor:
    """The slopes as (1 or B, Hq, 1, 1)."""
    batch, heads = q.shape[:2]
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
        raise ValueError(
            f"{OP}: cu_seqlens_k is given without cu_seqlens, which says where the queries' sequences begin"
        )
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
    if not _autograd.is_traced(cu_seqlens):
        check_starts(name, cu_seqlens, tokens)
    return cu_seqlens.contiguous()


def check_starts(name: str, cu_seqlens: Tensor | None, tokens: int) -> None:
    """Refuse sequences that do not lie one behind the other; on the CPU only, since on a GPU that would synchronise."""
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] > tokens or any(a > b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"{OP}: {name} must rise from 0 to at most {tokens}; got {starts}")


def _check_when_run(call: AttentionCall) -> None:
    """A traced call is checked when it runs: its sequences have no places before."""
    check_starts("cu_seqlens", call.cu_seqlens, call.q.shape[2])
    check_starts("cu_seqlens_k", call.cu_seqlens_k, call.k.shape[2])


def last_axis_contiguous(x: Tensor) -> Tensor:
    """x, copied where its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros behind its columns, up to `width`: they add nothing to a score, and their outputs are cut off."""
    return x if x.shape[3] == width else torch.nn.functional.pad(x, (0, width - x.shape[3]))


def like_output(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape (B, H, L, D), laid out in memory as (B, L, H, D)."""
    batch, heads, length, width = x.shape
    return torch.empty((batch, length, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)


def _fake(call: AttentionCall) -> AttentionResult:
    q = call.q
    return AttentionResult(like_output(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)))


def _empty_gradients(call: AttentionCall) -> tuple[Tensor | None, ...]:
    bias = call.attn_bias
    dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    return like_output(call.q), like_output(call.k), like_output(call.v), dbias


OPERATION = _autograd.Operation(
    OP,
    AttentionCall,
    result=AttentionResult,
    public=2,
    fake=_fake,
    differentiable=("q", "k", "v", "attn_bias"),
    kept=("out", "lse"),
    sizes=("q", "k"),
    layout=last_axis_contiguous,
    empty_gradients=_empty_gradients,
    check_when_run=_check_when_run,
)
