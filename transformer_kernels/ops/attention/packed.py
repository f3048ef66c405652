"""Attention of a sequence to itself, from one packed projection to the input of the next: attention's own kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import dispatch
from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._derivatives import Outputs, Parts
from transformer_kernels.ops._dropout import draw_seed
from transformer_kernels.ops._kernels import Adapter, Grads, Kernels, Wanted, record
from transformer_kernels.ops.attention import AttentionCall, AttentionResult, check_devices
from transformer_kernels.ops.attention._call import (
    Scores,
    Window,
    check_when_run,
    checked_scores,
    last_axis_contiguous,
)
from transformer_kernels.ops.attention._common import Angles
from transformer_kernels.ops.attention._sinks import WithSinks
from transformer_kernels.ops.attention._structure import recognised, understood
from transformer_kernels.ops.rotary import Heads, RotaryCall, angles, rotated

OP = "packed_attention"


@record
class PackedAttentionCall(NamedTuple):
    """qkv with a contiguous last axis; the seed is None without dropout, cos and sin without rotary positions."""

    qkv: Tensor
    scores: Scores
    seed: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    heads: int
    interleaved: bool
    dropout_p: float

    def fake(self) -> AttentionResult:
        qkv, heads = self.qkv, self.heads
        batch, length, _, width = qkv.shape
        lse = qkv.new_empty((batch, heads, length), dtype=torch.promote_types(qkv.dtype, torch.float32))
        statistics = qkv.new_empty((batch, heads, 2, length), dtype=torch.float32)
        return AttentionResult(qkv.new_empty(batch, length, heads * width), lse, statistics)

    def as_run(self, backend: str | None) -> PackedAttentionCall:
        """With the structure of a dense mask."""
        batch, length = self.qkv.shape[:2]
        return recognised(backend, self, self.qkv, None, (batch, self.heads, length, length))  # type: ignore[no-any-return]

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        inner = _on_views(self)
        if self.cos is not None:
            inner = inner._replace(q=rotated(self, inner.q), k=rotated(self, inner.k))
        return (_joined(inner.in_pytorch(1)[0]),)

    def folded(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        main, others = self.scores.folded(self.seed, "qkv")
        return main, (*others, "cos", "sin")

    def check_when_run(self) -> None:
        """The values of cu_seqlens."""
        check_when_run(self.scores, self.qkv.shape[1], self.qkv.shape[1])


def packed_attention(
    qkv: Tensor,
    *,
    heads: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scaled dot-product attention on a packed projection, without transposing or copying input or output.

    Equal to `attention` on views of qkv, after `rotary` on the queries and keys if cos and sin are given
    (scores may be summed over the columns in another order).
    Its conventions (bottom-right causality, True = keep, window counts) follow `attention`, not torch.
    The gradient is written into one packed tensor; gradients of three views would have to be concatenated. Rotated
    queries and keys are not kept for backward, which rotates them again.

    Args:
        qkv: (B, L, heads + 2 * kv_heads, D): query heads, key heads, value heads; float32, float16, bfloat16 (float64
            with backend="torch"), any strides with a contiguous last axis.
        heads: number of query heads; kv_heads, half of the remaining heads, divides it.
        causal: as in `attention`, as are all arguments that are not listed here.
        attn_bias: as in `attention`; added to the scores of the rotated queries and keys. It may require grad.
        cos: as in `rotary`, which rotates queries and keys before attention; None for no rotation.
        sin: as cos.
        interleaved: as in `rotary`.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (B, L, heads * D), contiguous, in the dtype of qkv; accumulated in float32.

    Raises:
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> qkv = torch.randn(2, 128, 3 * 4, 32)  # 4 heads of queries, keys and values
        >>> packed_attention(qkv, heads=4, causal=True).shape
        torch.Size([2, 128, 128])

    Vaswani et al., "Attention Is All You Need", 2017, equation 1; Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
    """
    key_ranges = None
    if attn_bias is not None and isinstance(qkv, Tensor) and qkv.dim() == 4:
        shape = qkv.shape[0], heads, qkv.shape[1], qkv.shape[1]
        attn_bias, causal, key_padding_mask, key_ranges = understood(
            backend, qkv, shape, attn_bias, causal, key_padding_mask, lambda hidden: False
        )
    return OPERATION.run(
        backend, qkv, heads, cos, sin, interleaved, dropout_p, causal, key_padding_mask, attn_bias, alibi_slopes,
        cu_seqlens, window, scale, softcap, sinks, key_ranges,
    )  # fmt: skip


@_operation.takes_options_of(checked_scores, "cu_seqlens_k", "mask")
def prepare(
    qkv: Tensor,
    *,
    heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    dropout_p: float = 0.0,
    **options: Any,
) -> PackedAttentionCall:
    """The validated call; `options` are passed to `checked_scores`."""
    qkv = _checked(qkv, heads)
    x = qkv.detach().transpose(1, 2)  # of the lengths and the width of q and k
    _checks.probability("attention", "dropout_p", dropout_p)
    scores = checked_scores(x, x, heads, cu_seqlens_k=None, **options)
    check_devices(x, scores)
    seed = draw_seed(qkv.device) if dropout_p > 0.0 else None
    _checks.flag(OP, "interleaved", interleaved)
    if cos is not None and sin is not None:
        cos, sin = angles(OP, x, cos, sin)
    elif cos is not sin:
        raise ValueError(f"{OP}: cos and sin go together; got {'sin' if cos is None else 'cos'} alone")
    return PackedAttentionCall(qkv, scores, seed, cos, sin, heads, interleaved, float(dropout_p))


def _checked(qkv: Tensor, heads: int) -> Tensor:
    """qkv in autocast's dtype and with a contiguous last axis."""
    _checks.tensor(OP, "qkv", qkv)
    if qkv.dim() != 4:
        raise ValueError(f"{OP}: qkv must have 4 dimensions (B, L, heads + 2 * kv_heads, D); got {tuple(qkv.shape)}")
    _checks.positive_integer(OP, "heads", heads)
    others = qkv.shape[2] - heads
    if others < 2 or others % 2 or heads % (others // 2):
        raise ValueError(
            f"{OP}: qkv must hold {heads} query heads and as many key as value heads, a divisor of {heads}; "
            f"got {qkv.shape[2]} heads in all"
        )
    dtype = _operation.autocast_dtype(qkv)
    if dtype is not None and qkv.dtype is not torch.float64:
        qkv = qkv.to(dtype)
    return last_axis_contiguous(qkv)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, H, L, D) of the queries, keys and values."""
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.transpose(1, 2).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _rotated_heads(qkv: Tensor, heads: int) -> Heads:
    """A view (B, heads + kv_heads, L, D) of all that rotary rotates."""
    return Heads(qkv[:, :, : (qkv.shape[2] + heads) // 2].transpose(1, 2), None)


def _joined(out: Tensor) -> Tensor:
    """(B, H, L, D), in memory (B, L, H, D) -> (B, L, H * D)."""
    return out.transpose(1, 2).flatten(2)


def _on_views(call: PackedAttentionCall, rotated: Tensor | None = None) -> AttentionCall:
    """Attention's call on views of qkv, or on rotated queries and keys (B, heads + kv_heads, L, D)."""
    q, k, v = _split(call.qkv, call.heads)
    if rotated is not None:
        q, k = rotated[:, : call.heads], rotated[:, call.heads :]
    return AttentionCall(q, k, v, call.scores, call.seed, call.dropout_p)


class _Packed(Adapter):
    """The operation on a backend's attention kernels, and on its rotary where those do not rotate rows themselves."""

    @classmethod
    def of(cls, call: PackedAttentionCall) -> Kernels:
        """The backend's own kernels for packed projections where it has them."""
        own: Kernels | None = cls.inner.packed(call, _on_views(call))
        return cls(call) if own is None else own

    def __init__(self, call: PackedAttentionCall) -> None:
        self._attention = WithSinks.on(self.inner, self.backend)
        self._rotary: Any = None
        self._rotates = call.cos is None or self.inner.rotates(_on_views(call))

    @classmethod
    def unsupported(cls, call: PackedAttentionCall) -> str | None:
        """Why the attention kernels do not support the heads."""
        return super().unsupported(_on_views(call))

    def forward(self, call: PackedAttentionCall) -> AttentionResult:
        inner, options = self._inner(call)
        out, lse, statistics = self.made(self._attention, inner).forward(inner, **options)
        return AttentionResult(_joined(out), lse, statistics)

    def forward_tangent(self, call: PackedAttentionCall, tangents: Parts) -> tuple[AttentionResult, Outputs] | None:
        """By attention's kernels, where they rotate rows themselves."""
        if not self._rotates:
            return None
        inner, options = self._inner(call)
        of_heads = (None,) * 3 if tangents[0] is None else _split(tangents[0], call.heads)
        found = self.made(self._attention, inner).forward_tangent(inner, (*of_heads, *tangents[1:]), **options)
        if found is None:
            return None
        result, (dout, dlse) = found
        return result._replace(out=_joined(result.out)), (_joined(dout), dlse)

    def backward(
        self, call: PackedAttentionCall, result: AttentionResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dqkv, dbias, dsinks; dq, dk and dv are written into dqkv, where dq and dk are rotated back."""
        dout, out = (x.unflatten(2, (call.heads, -1)).transpose(1, 2) for x in (grads[0], result.out))
        dqkv = torch.empty(call.qkv.shape, dtype=call.qkv.dtype, device=call.qkv.device)
        inner, options = self._inner(call)
        given = (
            AttentionResult(out, result.lse, result.statistics),
            (last_axis_contiguous(dout), None),
            (True, True, True, *wanted[1:]),
        )
        kernels = self.made(self._attention, inner)
        _, _, _, *others = kernels.backward(inner, *given, _split(dqkv, call.heads), **options)
        if call.cos is not None and not options:
            rotated = _rotated_heads(dqkv, call.heads)
            self._rotated(call, rotated, rotated, inverse=True)
        return dqkv, *others

    def _inner(self, call: PackedAttentionCall) -> tuple[AttentionCall, dict[str, Any]]:
        """Attention's call, with the angles for kernels that rotate rows as they read them, else on rotated copies."""
        if call.cos is None or call.sin is None:
            return _on_views(call), {}
        if self._rotates:
            return _on_views(call), {"angles": Angles(call.cos.float(), call.sin.float(), call.interleaved)}
        heads = _rotated_heads(call.qkv, call.heads)
        rotated = heads.empty()
        self._rotated(call, heads, rotated, inverse=False)
        return _on_views(call, rotated.q), {}

    def _rotated(self, call: PackedAttentionCall, heads: Heads, out: Heads, *, inverse: bool) -> None:
        assert call.cos is not None and call.sin is not None
        rotation = RotaryCall(heads.q, heads.q, call.cos, call.sin, call.interleaved)
        if self._rotary is None:
            self._rotary = dispatch.family("transformer_kernels.ops.rotary", self.backend).of(rotation)
        self._rotary.rotate(rotation, heads, out, inverse=inverse)


OPERATION = _operation.Operation(
    OP,
    PackedAttentionCall,
    prepare,
    result=AttentionResult,
    differentiable=("qkv", "scores.bias", "scores.sinks"),
    kept=("out", "lse", "statistics"),
    kernels=(_Packed, "attention"),
)
