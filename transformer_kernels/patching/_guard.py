"""Patched methods that run the original code where no kernel computes a call (`ops/_foreign.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops._foreign import are_plain, refused

BLOCKS = frozenset({"_sa_block", "_mha_block", "_ff_block"})
"""Methods of torch.nn's encoder and decoder layers that a program may replace after it patched them."""


def left(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the original code of a patched module computes this call; None if the operations do.

    Raises:
        UnsupportedByBackend: a named backend, which never falls back. A module with parameters of a subclass is a
            modified one, which is called unchanged with any backend.
    """
    if not are_plain(module._parameters.values()):
        return "a parameter is not a dense tensor"
    if not BLOCKS.isdisjoint(module.__dict__):
        return "a block of it was replaced"
    return refused(type(module).__name__, module.backend, (*args, *kwargs.values()) if kwargs else args)


def guarded(ours: Callable[..., Any], original: Callable[..., Any], repeatable: bool) -> Callable[..., Any]:
    """A method that runs our code, or the original one where `left` has a reason.

    Args:
        ours, original: methods of one module.
        repeatable: whether a call that raised has changed nothing. Unless a backend is named, the original code runs
            it again: it accepts it, or raises the exception that callers of the original handle.
    """
    errors = (TypeError, ValueError, IndexError) if repeatable else ()

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left(self, args, kwargs) is not None:
            return original(self, *args, **kwargs)
        try:
            return ours(self, *args, **kwargs)
        except errors:
            if requested(self.backend) != "auto":
                raise
        return original(self, *args, **kwargs)

    return method
