"""PyTorch's own kernels under the names and signatures of our operations, for peers and peer models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mask, window = options.get("key_padding_mask"), options.get("window")
    if mask is not None:
        mask = mask[:, None, None, :]
    if window is not None:
        positions = torch.arange(q.shape[2], device=q.device)
        near = (positions[:, None] - positions).abs() < window
        mask = near if mask is None else mask & near
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=options.get("dropout_p", 0.0),
        is_causal=options.get("causal", False),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def packed_attention(qkv: Tensor, *, heads: int, **options: Any) -> Tensor:
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = (part.transpose(1, 2) for part in qkv.split([heads, kv_heads, kv_heads], dim=2))
    return attention(q, k, v, **options).transpose(1, 2).flatten(2)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, dropout_p) + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def add_dropped(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) + residual


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-5, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, dropout_p) + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    y = F.linear(x, weight, bias)
    if activation is None:
        return y
    return F.relu(y) if activation == "relu" else F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> Tensor:
    x = F.embedding(tokens, weight)
    if scale != 1.0:
        x = x * scale
    if positions is not None:
        x = x + (positions[: tokens.shape[1]] if position_ids is None else F.embedding(position_ids, positions))
    if norm_weight is not None:
        x = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, eps)
    return F.dropout(x, dropout_p)


def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), **options)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return cross_entropy(F.linear(x, weight, bias), targets, **options)
