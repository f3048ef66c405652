"""The order in which "auto" asks the backends of a GPU, as far as a measurement changes it: MEASURED."""

from __future__ import annotations

import functools

import torch

Capability = tuple[int, int]


def measured(operation: str, usual: tuple[str, ...], device: torch.device) -> tuple[str, ...]:
    """The usual order of the backends for an operation, with the fastest one on a measured GPU first."""
    if device.type != "cuda" or not MEASURED:
        return usual
    fastest = MEASURED.get(_capability(device), {}).get(operation)
    return usual if fastest is None else (fastest, *(name for name in usual if name != fastest))


@functools.cache
def _capability(device: torch.device) -> Capability:
    return torch.cuda.get_device_capability(device)


# Written by `python -m benchmarks.order`: by compute capability, the operations for which another backend than the
# usual first one was faster.
MEASURED: dict[Capability, dict[str, str]] = {}
