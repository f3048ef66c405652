"""FSDP2 in CPU recordings: gathered weights keep their memory.

`fully_shard` frees gathered weights after each use and allocates them again, at other addresses. From the first capture
on, memory used by a recording is not freed: the step then needs the memory of all gathered weights, as with
`reshard_after_forward=False`. Gathering and scattering are repeated as calls.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch import Tensor

MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"

_kept: set[int] = set()
_thread = threading.local()


class keep_gathered_weights:
    """A context of captures."""

    def __enter__(self) -> None:
        module: Any = sys.modules.get(MODULE)
        free = getattr(module, "free_storage", None)
        if free is not None and not hasattr(free, "original"):
            module.free_storage = _freeing(free)
        _thread.captures = True

    def __exit__(self, *error: object) -> None:
        _thread.captures = False


def _freeing(original: Any) -> Any:
    """FSDP2's function, except for storages that recordings use."""

    def free_storage(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if getattr(_thread, "captures", False):
            _kept.add(storage._cdata)
        if storage._cdata not in _kept:
            original(tensor)

    free_storage.original = original  # type: ignore[attr-defined]
    return free_storage
