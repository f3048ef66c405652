"""Attention of a sequence to itself, from one packed projection to the input of the next: attention's own kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select
from transformer_kernels.ops.attention import _last_axis_contiguous, _registered, _torch
from transformer_kernels.ops.attention import prepare as _prepare_attention

OP = "packed_attention"


def packed_attention(
    qkv: Tensor,
    *,
    heads: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scaled dot-product attention on a packed projection: nothing is transposed or copied on the way in or out.

    Equal to `attention` on views of qkv. The gradient is written straight into one packed tensor, where gradients of
    three views would have to be put together again.

    Args:
        qkv: (B, L, heads + 2 * kv_heads, D): query heads, key heads, value heads; float32, float16, bfloat16 (float64
            with backend="torch"), any strides with a contiguous last axis.
        heads: how many of its heads are queries; kv_heads, half of the others, divides it.
        causal, key_padding_mask, cu_seqlens, window, dropout_p, scale: as in `attention`.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (B, L, heads * D), contiguous, in the dtype of qkv; accumulated in float32.
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Vaswani et al., "Attention Is All You Need", 2017, equation 1; Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
    """
    qkv = _checked(qkv, heads)
    arguments = _arguments(qkv, heads, causal, key_padding_mask, cu_seqlens, window, dropout_p, scale)
    if _autograd.is_traced(qkv):
        out = _registered(*arguments, backend)[0]
        return out.transpose(1, 2).flatten(2)
    module = select(OP, backend, arguments)
    if is_empty(qkv):
        module = _torch
    if _autograd.needs_grad(qkv):
        return _PackedAttention.apply(module, qkv, heads, *arguments[3:])
    return _joined(module.forward(*arguments)[0])


def prepare(
    qkv: Tensor,
    *,
    heads: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`, those of `attention`."""
    return _arguments(_checked(qkv, heads), heads, causal, key_padding_mask, cu_seqlens, window, dropout_p, scale)


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
    _autograd.refuse_transforms(OP, qkv)
    dtype = _autograd.autocast_dtype(qkv)
    if dtype is not None and qkv.dtype is not torch.float64:
        qkv = qkv.to(dtype)
    return _last_axis_contiguous(qkv)


def _arguments(
    qkv: Tensor,
    heads: int,
    causal: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    window: int | None,
    dropout_p: float,
    scale: float | None,
) -> tuple[Any, ...]:
    return _prepare_attention(
        *_split(qkv, heads),
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        window=window,
        dropout_p=dropout_p,
        scale=scale,
    )


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, H, L, D) of the queries, keys and values."""
    kv_heads = (qkv.shape[2] - heads) // 2
    x = qkv.transpose(1, 2)  # (B, heads + 2 * kv_heads, L, D)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


def _joined(out: Tensor) -> Tensor:
    """(B, H, L, D), in memory (B, L, H, D) -> (B, L, H * D)."""
    return out.transpose(1, 2).flatten(2)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, qkv: Tensor, heads: int, *options: Any) -> Tensor:
        out, lse = module.forward(*_split(qkv, heads), *options)
        ctx.module, ctx.heads = module, heads
        tensors, ctx.options = options[:4], options[4:]
        joined = _joined(out)
        ctx.save_for_backward(qkv, joined, lse, *tensors)
        return joined

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        qkv, out, lse, *tensors = ctx.saved_tensors
        dout, out = (x.unflatten(2, (ctx.heads, -1)).transpose(1, 2) for x in (dout, out))
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        with torch.no_grad():
            ctx.module.backward(
                _last_axis_contiguous(dout), None, *_split(qkv, ctx.heads), out, lse, *tensors, *ctx.options,
                False, _split(dqkv, ctx.heads),
            )  # fmt: skip
        return None, *_autograd.first_order_only(OP, (dqkv,)), *[None] * (1 + len(tensors) + len(ctx.options))
