"""Embedding with PyTorch's kernels: a gather, an addition, LayerNorm, and dropout in place."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _kernels
from transformer_kernels.ops._dropout import drop, keep_scale
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult
from transformer_kernels.ops.embedding._scatter import table_gradients
from transformer_kernels.ops.norm import _torch as norm


def _dropped(x: Tensor, seed: Tensor, dropout_p: float, in_place: bool) -> Tensor:
    """dropout(x) for x (B, L, E), as B * L rows."""
    rows = x.view(x.shape[0] * x.shape[1], x.shape[2])
    return drop(rows, seed, dropout_p, scale=keep_scale(dropout_p), in_place=in_place).view(x.shape)


def _gathered(
    weight: Tensor, tokens: Tensor, positions: Tensor | None, position_ids: Tensor | None, scale: float
) -> Tensor:
    """scale * weight[tokens] + positions[position], (B, L, E)."""
    rows = torch.embedding(weight, tokens)
    if positions is None:
        return rows if scale == 1.0 else rows.mul_(scale)
    embedded = positions[: tokens.shape[1]] if position_ids is None else torch.embedding(positions, position_ids)
    return torch.add(embedded, rows, alpha=scale, out=rows)


class Kernels(_kernels.Kernels):
    """Embedding through PyTorch's kernels."""

    def forward(self, call: EmbeddingCall) -> EmbeddingResult:
        """y, and with LayerNorm the mean and 1 / sqrt(var + eps) per row."""
        weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p = call
        y, mean, rstd = _gathered(weight, tokens, positions, position_ids, scale), None, None
        if norm_weight is not None:
            y, mean, rstd = norm.normalised(y, norm_weight, norm_bias, eps, centred=True)
        if seed is not None:
            y = _dropped(y, seed, dropout_p, in_place=True)
        return EmbeddingResult(y, mean, rstd)

    def backward(
        self, call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dweight, dpositions, dnorm_weight, dnorm_bias."""
        _, mean, rstd = result
        (dy,), (weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, _, dropout_p) = (
            grads,
            call,
        )
        if seed is not None:
            dy = _dropped(dy, seed, dropout_p, in_place=False)
        if norm_weight is None:
            return *table_gradients(call, dy, wanted), None, None
        assert mean is not None and rstd is not None
        rows = _gathered(weight, tokens, positions, position_ids, scale)
        ds, dnorm_weight, dnorm_bias = norm.gradients(dy, rows, norm_weight, norm_bias is not None, mean, rstd)
        return *table_gradients(call, ds, wanted), dnorm_weight, dnorm_bias
