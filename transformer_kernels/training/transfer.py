"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.training.evaluation import Batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; on the way to a GPU through pinned memory, so that nobody waits for what runs there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Prefetcher:
    """Makes the next batch while a GPU computes the step that was just launched.

    The process that launched the step has nothing else to do until then, so there is no thread; copies run on a stream
    of their own. A batch must be a function of its item numbers alone. On a CPU, where the step is complete before the
    next batch could be begun, nothing is made ahead.
    """

    def __init__(self, load: Callable[[Tensor], Batch], device: torch.device, ahead: bool | None = None) -> None:
        self._load = load
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._ready: tuple[Tensor, Batch] | None = None

    def prepare(self, indices: Tensor) -> None:
        """Make the batch of these items, which will be taken next."""
        if self._ahead:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._ready = indices, self._load(indices)

    def take(self, indices: Tensor) -> Batch:
        """The batch of these items, ready to be read on the current stream."""
        if self._ready is None or not torch.equal(self._ready[0], indices):
            return self._load(indices)
        (_, batch), self._ready = self._ready, None
        if self._stream is not None:
            current: Any = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for leaf in pytree.tree_leaves((batch.inputs, batch.targets)):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
        return batch
