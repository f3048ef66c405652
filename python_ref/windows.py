"""Local attention: sliding windows of a text with global tokens."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def global_window_bias(length: int, window: int, global_tokens: int, device: torch.device | None = None) -> Tensor:
    """The additive mask of `global_window_attention` for a dense computation: 0 or -inf, (length, length)."""
    index = torch.arange(length, device=device)
    seen = (index[:, None] - index).abs() < window
    seen |= (index < global_tokens) | (index[:, None] < global_tokens)
    return torch.zeros(length, length, device=device).masked_fill(~seen, -math.inf)


def global_window_attention(
    ops: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    global_tokens: int,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention in which the first tokens attend to all and are attended to by all; the others attend within a window.

    Queries are split into blocks of `window`. Each block attends to the global keys, to itself and to its two
    neighbours, masked by distance. Time and memory grow with length * (3 * window + global_tokens), in every backend.

    Args:
        ops: provides `attention`.
        q: floating (B, H, L, D). k: (B, Hk, L, D), v: (B, Hk, L, Dv).
        window: a token attends to tokens less than `window` away on both sides.
        global_tokens: number of global tokens at the beginning.
        key_padding_mask: bool (B, L), True = a real token.
        dropout_p: as in `attention`.
    Returns:
        (B, H, L, Dv).

    Beltagy, Peters, Cohan, "Longformer: the long-document transformer", 2020, section 3.1.
    """
    batch, length = q.shape[0], q.shape[2]
    first = min(global_tokens, length)
    real = (
        torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_padding_mask is None else key_padding_mask
    )
    out = ops.attention(q[:, :, :first], k, v, key_padding_mask=key_padding_mask, dropout_p=dropout_p)
    if first == length:
        return out
    blocks = -(-(length - first) // window)
    spare = blocks * window - (length - first)
    queries = F.pad(q[:, :, first:], (0, 0, 0, spare)).unflatten(2, (blocks, window))  # (B, H, blocks, window, D)
    keys, values = (_beside(x[:, :, first:], x[:, :, :first], window, spare) for x in (k, v))
    mask = _beside(real[:, None, first:, None], real[:, None, :first, None], window, spare)  # (B * blocks, 1, K, 1)
    index = torch.arange(3 * window, device=q.device)
    far = (index[:window, None] + window - index).abs() >= window  # (window, 3 window)
    bias = F.pad(torch.zeros(far.shape, dtype=q.dtype, device=q.device).masked_fill(far, -math.inf), (first, 0))
    near = ops.attention(
        queries.transpose(1, 2).flatten(0, 1),  # (B * blocks, H, window, D)
        keys,
        values,
        key_padding_mask=mask.flatten(1),
        attn_bias=bias[None, None],
        dropout_p=dropout_p,
    )
    near = near.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, : length - first]
    return torch.cat((out, near), dim=2)


def _beside(x: Tensor, first: Tensor, window: int, spare: int) -> Tensor:
    """The global rows, then the rows of each block and its two neighbours: (B * blocks, H, G + 3 * window, D)."""
    padded = F.pad(x, (0, 0, window, window + spare))  # (B, H, (blocks + 2) * window, D)
    near = padded.unfold(2, 3 * window, window).transpose(-1, -2)  # (B, H, blocks, 3 * window, D)
    all_see = first.unsqueeze(2).expand(-1, -1, near.shape[2], -1, -1)
    return torch.cat((all_see, near), dim=3).transpose(1, 2).flatten(0, 1)
