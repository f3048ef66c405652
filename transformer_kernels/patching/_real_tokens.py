"""The real tokens of a batch that is padded on the right, packed into one row and back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from transformer_kernels.ops._foreign import foreign
from transformer_kernels.ops._operation import is_traced

MIN_SHARE, MIN_ELEMENTS = 0.1, 1 << 14
"""Padding, as a share of all tokens and in elements of hidden states, below which a batch stays padded.

Measured in training and inference of BERT, width 64 to 256, batches of 4 x 32 to 16 x 128, one thread of a Zen 5.
"""


class RealTokens(NamedTuple):
    """The rows of the tokens among B * L, and the bounds of their sequences."""

    rows: Tensor
    bounds: Tensor
    longest: int
    length: int

    @classmethod
    def of(cls, real: Tensor, width: int) -> RealTokens | None:
        """Those of a bool mask (B, L); None where a batch stays padded, as it does where values are not to be read."""
        if is_traced(real) or foreign(real) is not None or not real.numel() or not bool(pads_right(real)):
            return None
        lengths = real.sum(1)
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        padding = real.numel() - int(bounds[-1])
        if padding < MIN_SHARE * real.numel() or padding * width < MIN_ELEMENTS:
            return None
        return cls(real.flatten().nonzero().flatten(), bounds, int(lengths.max()), real.shape[1])

    def packed(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (1, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.rows).unsqueeze(0)

    def padded(self, x: Tensor) -> Tensor:
        """(1, T, E) -> (B, L, E), 0 at padding."""
        batch = self.bounds.numel() - 1
        rows = x.new_zeros(batch * self.length, x.shape[2]).index_copy(0, self.rows, x[0])
        return rows.unflatten(0, (batch, self.length))


def pads_right(real: Tensor) -> Tensor:
    """Whether padding follows the tokens in each row of a bool mask (B, L), and each has one: poolers read the first.

    A tensor, so that recorded and compiled code does not read it.
    """
    return (real[:, 1:] <= real[:, :-1]).all() & real[:, 0].all()


def zeroed(x: Tensor, real: Tensor) -> Tensor:
    """x (B, L, E) as `RealTokens.padded` returns it: 0 at padding on the right."""
    return x.masked_fill((pads_right(real) & ~real).unsqueeze(-1), 0.0)
