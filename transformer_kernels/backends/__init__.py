"""Registration of backends: how each is found, loaded or built, and why it is unavailable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Backend(NamedTuple):
    """A backend's entry for `dispatch`.

    Attributes:
        name: as in `backend=`.
        rank: by device type, the position in the order of "auto", which does not use it on other devices.
        unavailable: device -> why it cannot run there at all, with the remedy; None if it can.
        cause: the error that prevented loading, to be chained.
        machine: the `machine` of the families' `_compiled.py`, if the backend is a compiled module.
        refused_dtype: (device, dtype) -> why the device does not compute in this dtype; None if it does.
    """

    name: str
    rank: Mapping[str, int]
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    cause: Callable[[], BaseException | None] = lambda: None
    machine: Any = None
    refused_dtype: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


REGISTERED: dict[str, Backend] = {}
"""By name; each backend registers itself where it is defined."""


def register(backend: Backend) -> None:
    """Make a backend known to `dispatch`."""
    REGISTERED[backend.name] = backend


class Machine(Protocol):
    """The common interface of the two compiled modules, `backends.cpu` and `backends.cuda`."""

    __name__: str
    DTYPE_CODES: dict[torch.dtype, int]

    def load(self) -> Any:
        """The compiled module."""

    def parameter(self, parameter: Any) -> Any:
        """A parameter (N,) or None in a dtype that row kernels read; it must outlive the launch."""

    def index(self, ids: Any) -> Any:
        """Indices or None in a dtype that row kernels read; they must outlive the launch."""

    def bind(self, kernel: str, device: torch.device, **fields: Any) -> Any:
        """A kernel with these fields of its structure (csrc/calls), in order; the device and the stream are added.

        It is called with the tensors, or None, of the missing addresses, in their order.
        """

    def allocator(self, device: torch.device) -> Any:
        """A function (sizes, strides, dtype) -> uninitialised tensor, valid for one pass of a call."""

    def sum_like(self, parameter: Tensor, wanted: bool) -> Tensor | None:
        """Contiguous memory for a parameter's gradient, a sum over rows; None where it is not computed."""

    def workspace(self, like: Tensor) -> Tensor | None:
        """Memory for an intermediate result with the shape and dtype of a tensor; None where kernels have their own."""

    def partials(
        self, x: Tensor, rows: int, columns: int, sums: int, by_columns: bool = False
    ) -> tuple[Tensor | None, int]:
        """Memory for the partial sums of `sums` such gradients by a kernel over whole rows, or over tiles of columns,
        and how many rows it has."""


Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The sizes, strides and dtype of a tensor, for an allocator."""


def memory_of(x: Tensor) -> Memory:
    """The sizes, strides and dtype of x."""
    return tuple(x.shape), x.stride(), x.dtype


def contiguous_memory(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Memory:
    """The sizes, strides and dtype of a contiguous tensor."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return sizes, tuple(strides[: len(sizes)]), dtype


def address(tensor: Tensor | None) -> int:
    """The address of a tensor's first element, for compiled kernels; 0 for an absent one."""
    return 0 if tensor is None else tensor.data_ptr()


def in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of its parameter; None without one of them."""
    if gradient is None or parameter is None or gradient.dtype is parameter.dtype:
        return None if parameter is None else gradient
    return gradient.to(parameter.dtype)
