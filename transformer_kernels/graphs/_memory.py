"""The memory of CPU recordings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress
from operator import ne
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Memory:
    """Storages of recorded steps, never released, so that addresses remain valid; later tensors reuse free storages.

    A storage is free if only recordings refer to it: each writes it before reading it.
    """

    def __init__(self) -> None:
        self.recordings: WeakSet[Any] = WeakSet()  # they have the number of `references` to each storage
        self._by_size: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._addresses: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return address(tensor) in self._addresses

    def placed(self, tensor: Tensor) -> Tensor:
        """The new tensor, moved to a free storage if there is one."""
        own = tensor.untyped_storage()
        if own.nbytes() == 0 or tensor in self:
            return tensor
        storages = self._by_size[own.nbytes()]
        free = next((storage for storage in reversed(storages) if self.is_free(storage)), own)
        if free is own:
            self._addresses.add(own.data_ptr())
        else:
            storages.remove(free)
            free.copy_(own)
            tensor.set_(free, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]
        storages.append(free)  # most recently used last: it is most likely in a cache
        return tensor

    def check(self) -> None:
        """Drop a storage that has been freed, resized or moved, and raise RuntimeError."""
        for size, storages in self._by_size.items():
            intact = [
                storage for storage in storages if storage.nbytes() == size and storage.data_ptr() in self._addresses
            ]
            if len(intact) < len(storages):
                storages[:] = intact
                raise RuntimeError(moved("a kernel"))

    def disown(self) -> set[int]:
        """Forget storages that are kept, but not by recordings; returns their addresses."""
        kept: set[int] = set()
        for storages in self._by_size.values():
            kept.update(
                storage.data_ptr()
                for storage in storages
                if not self.is_free(storage) and not self._references(storage)
            )
            storages[:] = [storage for storage in storages if storage.data_ptr() not in kept]
        self._addresses -= kept
        return kept

    def poison(self) -> None:
        """Fill free storages with one bits, which are NaN in every float format."""
        for storages in self._by_size.values():
            for storage in filter(self.is_free, storages):
                flat(storage, torch.uint8).fill_(255)

    def is_free(self, storage: torch.UntypedStorage) -> bool:
        return torch._C._storage_Use_Count(storage._cdata) == 1 + self._references(storage)

    def _references(self, storage: torch.UntypedStorage) -> int:
        return sum(recording.references[storage.data_ptr()] for recording in self.recordings)


class Held:
    """The memory that a recording reads and writes; it must not be freed, resized or moved while that exists."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, tuple[int, int], str]] = {}  # of each storage: with extent and operation
        self._outside: list[torch.UntypedStorage] = []
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._operations: list[str] = []

    def add(self, tensor: Tensor, operation: str) -> None:
        """Add the storage of a tensor.

        Raises:
            RuntimeError: it has other memory than before, or none.
        """
        storage = tensor.untyped_storage()
        now = extent(storage)
        _, before, first = self._tensors.setdefault(storage._cdata, (tensor, now, operation))
        if before != now or (tensor.numel() and not now[1]):
            raise RuntimeError(moved(first))

    def check(self) -> None:
        """Raise RuntimeError if a storage has been freed, resized or moved during the capture."""
        for tensor, before, operation in self._tensors.values():
            if extent(tensor.untyped_storage()) != before:
                raise RuntimeError(moved(operation))

    def keep(self, is_outside: Callable[[Tensor], bool]) -> None:
        """Forget storages, except those outside of the memory of recordings, which each replay checks."""
        outside = [entry for entry in self._tensors.values() if is_outside(entry[0])]
        self._tensors.clear()
        self._outside = [tensor.untyped_storage() for tensor, *_ in outside]
        self._addresses, self._sizes = [entry[1][0] for entry in outside], [entry[1][1] for entry in outside]
        self._operations = [operation for *_, operation in outside]

    def check_before_replay(self) -> None:
        """Raise RuntimeError if memory outside of the recordings has been freed, resized or moved since the capture."""
        addresses = [*map(torch.UntypedStorage.data_ptr, self._outside)]
        sizes = [*map(torch.UntypedStorage.nbytes, self._outside)]
        if addresses != self._addresses or sizes != self._sizes:
            changed = map(ne, zip(addresses, sizes, strict=True), zip(self._addresses, self._sizes, strict=True))
            raise RuntimeError(f"graphed: {moved(next(compress(self._operations, changed)))}")


def extent(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Address and size."""
    return storage.data_ptr(), storage.nbytes()


def moved(operation: str) -> str:
    return (
        f"the memory that {operation} uses was freed or resized afterwards (UntypedStorage.resize_); recordings need"
        " memory that stays"
    )


def tensors(values: Any) -> list[Tensor]:
    """The tensors in a nesting of lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def memory_of(values: Any) -> set[int]:
    """The storages of tensors, by identity: those without elements have the address 0."""
    return set(map(identity, tensors(values)))


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def flat(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """The whole storage as a tensor."""
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]


def is_mask(value: Tensor) -> bool:
    """Whether the elements are 0 and one negative number, as in masks that are added to scores."""
    lowest = value.min() if value.numel() else value.new_zeros(())
    return bool(lowest < 0) and bool(((value == 0) | (value == lowest)).all())


def change(values: Sequence[Tensor]) -> None:
    """Perturb floating-point values, in each process differently; signs, upper bounds and masks' structure stay."""
    process = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(process)
    for value in values:
        if value.dtype not in FLOATS:
            continue
        if is_mask(value):
            value.mul_(0.75)
        else:
            factor = torch.empty_like(value).uniform_(0.5, 1.0, generator=generator)
            value.copy_(torch.where(value == 0, factor / 128, value * factor))
