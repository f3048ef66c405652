"""The order of the training items."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

POOL = 50  # batches that are sorted by length together


def checked_number(state: Mapping[str, Any], name: str, kind: type = int) -> Any:
    """A number in the state of a run, an integer of 64 bits that is not negative unless `kind` is float.

    Raises:
        ValueError: the value is something else.
    """
    value = state[name]
    if type(value) not in (int, kind) or (kind is int and not 0 <= value < 2**63):
        raise ValueError(f"{name} must be {'a number' if kind is float else 'a count'}; got {reprlib.repr(value)}")
    return value


class ShuffledSampler:
    """Batches of item indices, each item at most once per epoch, sharded over processes without overlap.

    The order is a function of (seed, epoch), so epoch and batch index are the complete state. An incomplete batch at
    the end of an epoch is dropped, unless it is the only one.
    """

    def __init__(self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if length < world_size:
            raise ValueError(f"{length} training items are not enough for {world_size} processes")
        self.length, self.seed, self.rank, self.world_size = length, seed, rank, world_size
        self.batch_size = min(batch_size, length // world_size)
        self.items = self.batch_size * world_size
        self.batches_per_epoch = length // self.items
        self.epoch = self.batch = 0
        self._batches = self._epoch_batches()

    @property
    def is_even(self) -> bool:
        """Whether all processes have equally many items."""
        return self.items % self.world_size == 0

    def peek(self) -> Tensor:
        """The item indices of this process's next batch."""
        return self._batches[self.batch, self.rank :: self.world_size]

    def advance(self) -> None:
        """Move to the next batch. A step that failed before this call repeats the same batch."""
        self.batch += 1
        if self.batch == self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
            self._batches = self._epoch_batches()

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch, "items": self.items}

    def restore(self, state: dict[str, int]) -> None:
        """Continue in the order of the run that wrote the state, with its items per step.

        Raises:
            ValueError: there are fewer items per step than processes.
        """
        self.items = checked_number({"items": self.items, **state}, "items")
        if self.items < self.world_size:
            raise ValueError(f"a step has {self.items} items, which are not enough for {self.world_size} processes")
        self.batches_per_epoch = self.length // self.items
        self.epoch, self.batch = checked_number(state, "epoch"), checked_number(state, "batch")
        if self.batch >= self.batches_per_epoch:
            raise ValueError(f"batch must be below {self.batches_per_epoch} of {self.length} items; got {self.batch}")
        self._batches = self._epoch_batches()

    def _epoch_batches(self) -> Tensor:
        """The batches of all processes, (batches_per_epoch, items); columns alternate by process."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**32)
        order = torch.randperm(self.length, generator=generator)
        kept = order[: self.batches_per_epoch * self.items]
        return self._arrange(kept, generator).view(self.batches_per_epoch, -1)

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The shuffled items of an epoch, ordered by batch."""
        return order


class BucketedSampler(ShuffledSampler):
    """Batches of items of similar length, which reduces padding.

    The epoch's shuffled items are split into pools of `POOL` batches. Each pool is sorted by length and split into
    batches, and the batches are shuffled. An epoch drops the same items as `ShuffledSampler`.
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.lengths = lengths
        super().__init__(len(lengths), batch_size, seed, rank, world_size)

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * self.items)]
        batches = torch.cat(pools).view(-1, self.items)
        return batches[torch.randperm(len(batches), generator=generator)]


class NumberedSampler(BucketedSampler):
    """Batches of numbers i + e * length for item i of epoch e, from which per-epoch randomness can be seeded."""

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        return super()._arrange(order, generator) + self.epoch * self.length


class PackedSampler(ShuffledSampler):
    """Batches of equally many items with nearly equal total length, to be concatenated.

    The epoch's items, sorted by length, are split into `batch_size` groups, and a batch takes one random item of each
    group. No batch of any epoch exceeds `budget`, the sum of the longest items that each group can contain.
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.lengths = lengths
        super().__init__(len(lengths), batch_size, seed, rank, world_size)
        group = self.batches_per_epoch * world_size
        left_out = len(lengths) - group * self.batch_size  # kept item i by length is not longer than item i + left_out
        self.budget = int(lengths.sort().values[left_out + group - 1 :: group].sum())

    def restore(self, state: dict[str, int]) -> None:
        """As for `ShuffledSampler`; ValueError if the number of processes differs, for which `budget` is not made."""
        if state.get("items", self.items) != self.items:
            raise ValueError("packed batches continue with the number of processes that wrote the checkpoint only")
        super().restore(state)

    def _arrange(self, order: Tensor, generator: torch.Generator) -> Tensor:
        by_length = order[self.lengths[order].argsort(stable=True)]
        groups = by_length.view(self.batch_size, -1)  # (batch_size, batches * world_size)
        mixed = [group[torch.randperm(len(group), generator=generator)] for group in groups]
        packed = torch.stack(mixed).view(self.batch_size, self.batches_per_epoch, self.world_size)
        return packed.transpose(0, 1).reshape(self.batches_per_epoch, -1)
