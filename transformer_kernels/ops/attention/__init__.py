"""Scaled dot-product attention, fused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._crossovers import Native
from transformer_kernels.ops._derivatives import Parts
from transformer_kernels.ops._dropout import draw_seed
from transformer_kernels.ops._kernels import Kernels, record
from transformer_kernels.ops.attention._call import (
    OP,
    Scores,
    Window,
    check_when_run,
    checked_scores,
    last_axis_contiguous,
)
from transformer_kernels.ops.attention._composed import composed, output_tangents
from transformer_kernels.ops.attention._sinks import WithSinks
from transformer_kernels.ops.attention._structure import hides, recognised, understood

if TYPE_CHECKING:
    from typing_extensions import Unpack


@record
class AttentionCall(NamedTuple):
    """q, k and v with contiguous last axes; the seed is None without dropout."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores
    seed: Tensor | None
    dropout_p: float

    @staticmethod
    def gradient_layout(gradient: Tensor) -> Tensor:
        return last_axis_contiguous(gradient)

    def fake(self) -> AttentionResult:
        q = self.q
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        return AttentionResult(like_output(q), lse, q.new_empty((*q.shape[:2], 2, q.shape[2]), dtype=torch.float32))

    def as_run(self, backend: str | None) -> AttentionCall:
        """With the structure of a dense mask."""
        return recognised(backend, self, self.q, self.k, (*self.q.shape[:3], self.k.shape[2]))  # type: ignore[no-any-return]

    def in_pytorch(self, outputs: int) -> tuple[Tensor, ...]:
        return composed(self, outputs > 1)

    def folded(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.scores.folded(self.seed, "q", "k", "v")

    def has_tangents(self, given: Parts) -> bool:
        return self.seed is None and self.scores.softcap == 0.0 and given[3] is None and given[4] is None

    def tangents(self, kernels: Kernels, result: AttentionResult, given: Parts) -> tuple[Tensor, ...]:
        """In blocks of queries, from the output of the kernels."""
        return output_tangents(self, result.out, given)

    def empty_gradients(self) -> tuple[Tensor | None, ...]:
        layout = torch.contiguous_format
        others = (self.scores.bias, self.scores.sinks)
        added = (None if option is None else torch.empty_like(option, memory_format=layout) for option in others)
        return like_output(self.q), like_output(self.k), like_output(self.v), *added

    def is_empty(self) -> bool:
        return not (self.q.numel() and self.k.numel())

    def check_when_run(self) -> None:
        """The values of cu_seqlens and sinks."""
        check_when_run(self.scores, self.q.shape[2], self.k.shape[2])

    def native(self) -> Native | None:
        """SDPA, if the scores are not modified, or only masked by causality without an offset.

        On the CPU it multiplies the -inf of hidden scores by the scale: NaN unless that is positive.
        """
        q, k, scores = self.q, self.k, self.scores
        queries, keys = q.shape[2], k.shape[2]
        changed = scores.windowed or scores.softcap or any(isinstance(option, Tensor) for option in scores)
        sees_all = queries == 1 or not scores.causal
        if changed or self.seed is not None or not (sees_all or (queries == keys and scores.scale > 0.0)):
            return None
        options: dict[str, Any] = {"is_causal": not sees_all, "scale": scores.scale}
        options["enable_gqa"] = q.shape[1] != k.shape[1]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return Native("attention", math.prod(q.shape[:3]) * keys, lambda q, k, v, *_: sdpa(q, k, v, **options))


class AttentionResult(NamedTuple):
    """out (B, Hq, Lq, D), laid out in memory as (B, Lq, Hq, D), and lse (B, Hq, Lq) in float32 or float64.

    Backward recomputes weights from `statistics`, float32 (B, Hq, 2, Lq): the largest score of each row (-inf where the
    query has no visible key) and the log of the sum of exp(score - largest), in the units of the backend. Their sum,
    lse, loses the log where scores are large. None in "torch", which computes softmax anew.
    """

    out: Tensor
    lse: Tensor
    statistics: Tensor | None


Into = tuple[Tensor, Tensor, Tensor]
"""Where a backward pass writes the gradients of q, k and v."""


if TYPE_CHECKING:

    class ScoreOptions(TypedDict, total=False):
        """The options of `attention_weights`."""

        causal: bool
        key_padding_mask: Tensor | None
        attn_bias: Tensor | None
        alibi_slopes: Tensor | None
        cu_seqlens: Tensor | None
        cu_seqlens_k: Tensor | None
        window: Window
        scale: float | None
        softcap: float | None
        sinks: Tensor | None
        backend: str | None

    class Options(ScoreOptions, total=False):
        """The options of `attention` but `return_lse`."""

        dropout_p: float


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@_checks.spelled_unlike_torch(
    "F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, is_causal=True)",
    "attention(q, k, v, attn_bias=bias, dropout_p=p, causal=True)",
)
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
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: dropout(softmax(scale * q k^T + bias)) v over the keys visible to each query.

    Unlike in `torch.nn.functional.scaled_dot_product_attention`, causality is aligned bottom-right where Lq < Lk (there
    top-left), `key_padding_mask` is True for the keys that are kept (in torch.nn for those that are ignored), and
    `window=4` counts the query's own key while `window=(4, 0)` does not.

    Args:
        q: (B, Hq, Lq, D), float32, float16, bfloat16 (float64 with backend="torch"). Any strides; with a contiguous
            last axis, such as a view of a packed (B, L, 3, H, D) projection, nothing is copied.
        k: (B, Hk, Lk, D), the dtype of q. Hk divides Hq; query head h uses key head h // (Hq / Hk).
        v: (B, Hk, Lk, Dv). Where Dv is not D, the narrower of keys and values is copied and padded with zeros, and the
            call costs as much as one with the wider heads.
        causal: query i attends to the keys j <= i + Lk - Lq (aligned bottom-right).
        key_padding_mask: bool (B, Lk), True = a real token.
        attn_bias: added to the scores; broadcasts to (B, Hq, Lq, Lk); the dtype of q or float32. It may require grad.
            Or bool, True = the query attends to the key. On the CPU a mask of these, or of 0 and one large negative
            number, in which the keys visible to a query are consecutive among those that padding leaves (causality,
            windows, documents, prefixes), costs what `causal`, `window` or `cu_seqlens` cost.
        alibi_slopes: float32 (Hq,) or (B, Hq), without a gradient: -slope * |i + Lk - Lq - j| is added to the scores
            as they are computed, so no bias of that size is stored.
        cu_seqlens: int32 (S + 1,), for S sequences that are packed one after the other into the tokens of B = 1, with
            Lq = Lk: sequence s is the tokens cu_seqlens[s] up to, not including, cu_seqlens[s + 1], and a query
            attends to the keys of its own sequence only. Tokens after the last sequence attend to no key. The values
            are checked on the CPU only.
        cu_seqlens_k: the same for keys that are packed differently from the queries: Lq and Lk may differ, and
            i' - i (below) is Lk - Lq of each sequence. backend="cpu", or "torch", which reads both on the host.
        window: with i' = i + Lk - Lq, query i attends to the keys i' - j < window and, unless causal, j - i' < window;
            with a pair (left, right) to i' - left <= j <= i' + right, where None is no limit.
        dropout_p: probability in [0, 1] with which a weight is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed,
            position), the same in every backend; the seed is drawn from torch's generator.
        scale: multiplies q k^T; 1 / sqrt(D) unless given.
        softcap: softcap * tanh(scale * q k^T / softcap) replaces scale * q k^T; attn_bias and alibi_slopes are added to
            it.
        sinks: floating (Hq,), of any dtype; may require grad. A logit of each head that joins the denominator of the
            softmax but has no value: out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)). Dropout does not drop it;
            -inf disables the sink. A query without visible keys still gives 0.
        return_lse: also return the natural log of the sum of exponentials of the scores and of the sink, before
            dropout.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (B, Hq, Lq, Dv) in the dtype of q, laid out in memory as (B, Lq, Hq, max(D, Dv)); accumulated in float32. With
        return_lse also float32 (B, Hq, Lq) (float64 for float64). A query without visible keys gives 0, an lse of -inf,
        and zero gradients.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 128, 32).unbind()
        >>> attention(q, k, v, causal=True, window=64).shape
        torch.Size([2, 4, 128, 32])
        >>> real = torch.arange(128) < torch.tensor([[128], [100]])  # (B, Lk), True = a real token
        >>> out, lse = attention(q, k, v, key_padding_mask=real, return_lse=True)
        >>> lse.shape
        torch.Size([2, 4, 128])
        >>> attention(q[:, :, -1:], k, v, causal=True).shape  # the last query attends to all keys
        torch.Size([2, 4, 1, 32])

    Vaswani et al., "Attention Is All You Need", 2017, equation 1; Dao, "FlashAttention-2", 2023, algorithms 1 and 2;
    Press, Smith, Lewis, "Train short, test long: attention with linear biases", 2022, section 3 (alibi_slopes); Gemma
    Team, "Gemma 2", 2024, section 2 (softcap); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (sinks).
    """
    key_ranges = None
    if attn_bias is not None and cu_seqlens_k is None and all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)):
        alone = not causal and key_padding_mask is alibi_slopes is cu_seqlens is window is None
        attn_bias, causal, key_padding_mask, key_ranges = understood(
            backend, q, (*q.shape[:3], k.shape[2]), attn_bias, causal, key_padding_mask,
            lambda hidden: alone and hides(hidden, q, k, scale, softcap),
        )  # fmt: skip
    outputs = OPERATION.run(
        backend, q, k, v, dropout_p, return_lse, causal, key_padding_mask, attn_bias, alibi_slopes, cu_seqlens,
        cu_seqlens_k, window, scale, softcap, sinks, key_ranges, None, outputs=2 if return_lse else 1,
    )  # fmt: skip
    out: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    out = out[..., : v.shape[3]] if v.shape[3] < out.shape[3] else out
    return (out, outputs[1]) if return_lse else out


@_operation.takes_options_of(checked_scores)
def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, return_lse: bool = False, **options: Any
) -> AttentionCall:
    """The validated call; `options` are passed to `checked_scores`."""
    q, k, v = checked_operands(q, k, v)
    _checks.flag(OP, "return_lse", return_lse)
    _checks.probability(OP, "dropout_p", dropout_p)
    scores = checked_scores(q, k, q.shape[1], **options)
    check_devices(q, scores, k=k, v=v)
    seed = draw_seed(q.device) if dropout_p > 0.0 else None
    wide = max(q.shape[3], v.shape[3])
    q, k, v = (last_axis_contiguous(_widened(x, wide)) for x in (q, k, v))
    return AttentionCall(q, k, v, scores, seed, float(dropout_p))


def check_devices(q: Tensor, scores: Scores, **others: Tensor) -> None:
    """All tensors of a call are on the device of q."""
    names = {"bias": "attn_bias", "mask": "attn_bias"}
    options = {
        names.get(name, name): x for name, x in zip(scores._fields, scores, strict=True) if isinstance(x, Tensor)
    }
    if any(tensor.device != q.device for tensor in (*others.values(), *options.values())):
        _checks.same_device(OP, q, **others, **options)


def checked_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        _checks.tensor(OP, name, value)
        if value.dim() != 4:
            raise ValueError(f"{OP}: {name} must have 4 dimensions (B, H, L, D); got {tuple(value.shape)}")
    if (dtype := _operation.autocast_dtype(q)) is not None and q.dtype is not torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_qkv(q, k, v)
    return q, k, v


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


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros behind its columns, up to `width`: they add nothing to a score, and their outputs are cut off."""
    return x if x.shape[3] == width else torch.nn.functional.pad(x, (0, width - x.shape[3]))


def like_output(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape (B, H, L, D), laid out in memory as (B, L, H, D)."""
    batch, heads, length, width = x.shape
    row = heads * width
    return x.new_empty_strided((batch, heads, length, width), (length * row, width, row, 1))


OPERATION = _operation.Operation(
    OP,
    AttentionCall,
    prepare,
    result=AttentionResult,
    public=2,
    differentiable=("q", "k", "v", "scores.bias", "scores.sinks"),
    kept=("out", "lse", "statistics"),
    kernels=(WithSinks, "attention"),
)
