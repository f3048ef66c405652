"""The order of the training data."""

from __future__ import annotations

import torch
from torch import Tensor

POOL = 50  # batches that are sorted by length together


class ShuffledSampler:
    """Batches of item numbers, every item at most once per epoch, sharded over processes without overlap.

    The order is a function of (seed, epoch) alone, so that epoch and batch number are its whole state. An incomplete
    batch at the end of an epoch is dropped, unless there is no complete batch at all.
    """

    def __init__(self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if length < world_size:
            raise ValueError(f"{length} training items are too few for {world_size} processes")
        self.length, self.seed, self.rank, self.world_size = length, seed, rank, world_size
        self.batch_size = min(batch_size, length // world_size)
        self.batches_per_epoch = length // (self.batch_size * world_size)
        self.epoch = self.batch = 0
        self._batches = self._epoch_batches()

    def peek(self) -> Tensor:
        """The item numbers of the next batch of this process."""
        return self._batches[self.batch, self.rank :: self.world_size]

    def advance(self) -> None:
        """Go to the next batch; a step that failed before this call is repeated with the same batch."""
        self.batch += 1
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
            self._batches = self._epoch_batches()

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._batches = self._epoch_batches()

    def _epoch_batches(self) -> Tensor:
        """The batches of all processes, (batches_per_epoch, batch_size * world_size); columns alternate by process."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**32)
        order = torch.randperm(self.length, generator=generator)
        kept = order[: self.batches_per_epoch * self.batch_size * self.world_size]
        return self._arrange(kept, generator).view(self.batches_per_epoch, -1)

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The shuffled items of an epoch in the order of their batches."""
        return order


class BucketedSampler(ShuffledSampler):
    """Batches of items of similar length, so that little is padded.

    The epoch's shuffled items are cut into pools of `POOL` batches, each pool is sorted by length and cut into batches,
    and the batches are shuffled. An epoch drops the same items as `ShuffledSampler` does.
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.lengths = lengths
        super().__init__(len(lengths), batch_size, seed, rank, world_size)

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        batch = self.batch_size * self.world_size
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * batch)]
        batches = torch.cat(pools).view(-1, batch)
        return batches[torch.randperm(len(batches), generator=generator)]


class PackedSampler(ShuffledSampler):
    """Batches of equally many items that all have nearly the same total length, to be concatenated.

    The epoch's items, sorted by length, are cut into `batch_size` groups, and a batch takes one item of each group at
    random. So no batch of any epoch is longer than `budget`, the sum of the longest items that each group can hold.
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.lengths = lengths
        super().__init__(len(lengths), batch_size, seed, rank, world_size)
        self.budget = self._budget()

    def _budget(self) -> int:
        """The kept item that is i-th by length is at most as long as number i + left_out of all items."""
        group = self.batches_per_epoch * self.world_size
        left_out = len(self.lengths) - group * self.batch_size
        longest = self.lengths.sort().values[left_out + group - 1 :: group]
        return int(longest.sum())

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        by_length = order[self.lengths[order].argsort(stable=True)]
        groups = by_length.view(self.batch_size, -1)  # (batch_size, batches * world_size)
        mixed = [group[torch.randperm(len(group), generator=generator)] for group in groups]
        packed = torch.stack(mixed).view(self.batch_size, self.batches_per_epoch, self.world_size)
        return packed.transpose(0, 1).reshape(self.batches_per_epoch, -1)
