"""Positions: sinusoidal codes, learned tables, and rotations of queries and keys."""

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
    """Llama 3's scaling of rotary frequencies for contexts longer than in pretraining.

    Args:
        factor: divisor of low frequencies.
        low, high: frequencies with fewer than `low` rotations in `context` tokens are divided by `factor`; those with
            more than `high` rotations are unchanged; in between the divisor is interpolated.
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
        positions: integers (...), the position of each token.
        width: R, the number of rotated columns per head; even.
        base: theta; the slowest frequency is about 1 / theta.
        scaling: Llama 3's scaling of the frequencies.

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 15; Grattafiori et al.,
    "The Llama 3 herd of models", 2024, section 3.4.
    """
    if width < 2 or width % 2:
        raise ValueError(f"rotary_table: width must be even and positive; got {width}")
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
    if scaling is not None:
        rotations = scaling.context * frequency / (2.0 * math.pi)
        fast = ((rotations - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        frequency = fast * frequency + (1.0 - fast) * frequency / scaling.factor
    angle = positions.unsqueeze(-1) * frequency  # (..., width / 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate pairs (a, b) of columns by the angle of their token: (a cos - b sin, b cos + a sin).

    q . k then depends on the distance of two tokens, not on their positions.

    Args:
        q: floating (B, Hq, L, D). k: (B, Hk, L, D).
        cos, sin: (L, R / 2), or (B, L, R / 2) if each sequence has its own positions; R <= D, and the columns from R on
            are unchanged.
        interleaved: pair i is the columns 2i and 2i + 1 (RoFormer); else i and i + R / 2 (GPT-NeoX, Llama).
    Returns:
        q and k rotated, in their shapes and dtypes.

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34.
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # shared by all heads
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    rotated, kept = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated.to(x.dtype), kept), dim=-1)
