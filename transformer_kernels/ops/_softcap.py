"""Soft capping of scores with PyTorch's operators (Gemma Team, "Gemma 2", 2024, section 2)."""

from __future__ import annotations

from torch import Tensor


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap), in place; unchanged if softcap is None or 0."""
    return scores if not softcap else scores.div_(softcap).tanh_().mul_(softcap)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """`cap` in a new tensor, differentiable."""
    return softcap * (scores / softcap).tanh() if softcap else scores


def cap_slope(scores: Tensor, softcap: float) -> Tensor:
    """The derivative of `cap` computed from its result: 1 - tanh^2."""
    return 1.0 - (scores / softcap).square_()
