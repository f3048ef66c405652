"""Where a token stands: sinusoidal codes and learned tables that are added to it, and rotations of queries and keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def sinusoidal_positions(
    length: int,
    width: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Fixed position codes (length, width): column 2i is sin(t / base^(2i / width)), column 2i + 1 its cosine.

    Vaswani et al., "Attention Is All You Need", 2017, section 3.5. An odd width ends with a sine.
    """
    position = torch.arange(length, dtype=torch.float64, device=device).view(-1, 1)
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = position * frequency  # (length, ceil(width / 2))
    return torch.stack((angle.sin(), angle.cos()), dim=-1).reshape(length, -1)[:, :width].to(dtype)


def learned_positions(table: Tensor, length: int, *, offset: int = 0) -> Tensor:
    """Rows `offset` to `offset + length` of a trained table (positions, width)."""
    if offset + length > table.shape[0]:
        raise ValueError(f"learned_positions: the table has {table.shape[0]} positions; got {offset + length}")
    return table[offset : offset + length]


class RotaryScaling(NamedTuple):
    """How Llama 3 stretches rotary frequencies for contexts longer than those of its pretraining.

    Args:
        factor: what slow frequencies are divided by.
        low, high: a frequency that turns fewer than `low` times in `context` tokens is slow, one that turns more than
            `high` times is left as it is, and between the two the divisor is interpolated.
        context: the length of the pretraining sequences, in tokens.
    """

    factor: float
    low: float
    high: float
    context: float


def rotary_table(
    positions: Tensor,
    width: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles position * base^(-2i / width) for the pairs i of `rotary`, each (..., width / 2).

    Args:
        positions: integers (...), where each token stands.
        width: R, how many columns of a head are rotated; even.
        base: theta, the slowest frequency is about 1 / theta.
        scaling: Llama 3's change of the frequencies.

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 15; Grattafiori et al.,
    "The Llama 3 herd of models", 2024, section 3.4.
    """
    if width < 2 or width % 2:
        raise ValueError(f"rotary_table: width must be even and positive; got {width}")
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
    if scaling is not None:
        turns = scaling.context * frequency / (2.0 * math.pi)
        fast = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        frequency = fast * frequency + (1.0 - fast) * frequency / scaling.factor
    angle = positions.unsqueeze(-1) * frequency  # (..., width / 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate pairs (a, b) of columns by the angle of their token: (a cos - b sin, b cos + a sin).

    So q . k depends on how far apart two tokens are, not on where they stand.

    Args:
        q: floating (B, Hq, L, D). k: (B, Hk, L, D).
        cos, sin: (L, R / 2), or (B, L, R / 2) where each sequence has its own positions; R <= D, and the columns from R
            on stay as they are.
        interleaved: pair i is the columns 2i and 2i + 1 (RoFormer); else i and i + R / 2 (GPT-NeoX, Llama).
    Returns:
        q and k rotated, in their shapes and dtypes.

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34.
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # one for all heads
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned, kept = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)
