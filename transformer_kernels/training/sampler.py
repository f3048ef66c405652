"""The order in which a run sees its data."""

from __future__ import annotations

import torch
from torch import Tensor


class ShuffledSampler:
    """Batches of item numbers, every item at most once an epoch, shared out over processes without overlap.

    The order is a function of (seed, epoch) alone, so that two numbers are its whole state. What does not fill a
    batch at the end of an epoch is left out, unless there is no full batch at all.
    """

    def __init__(self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if length < world_size:
            raise ValueError(f"{length} training items are too few for {world_size} processes")
        self.length, self.seed, self.rank, self.world_size = length, seed, rank, world_size
        self.batch_size = min(batch_size, length // world_size)
        self.batches_per_epoch = length // (self.batch_size * world_size)
        self.epoch = self.batch = 0
        self._order = self._permutation()

    def peek(self) -> Tensor:
        """The numbers of the batch whose turn it is, for this process."""
        start = self.batch * self.batch_size * self.world_size
        return self._order[start + self.rank : start + self.batch_size * self.world_size : self.world_size]

    def advance(self) -> None:
        """Go to the next batch; a step that failed before this is made again with the same batch."""
        self.batch += 1
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
            self._order = self._permutation()

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._order = self._permutation()

    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**32)
        return torch.randperm(self.length, generator=generator)
