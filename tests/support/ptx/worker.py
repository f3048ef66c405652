"""A process without TRITON_INTERPRET, in which Triton compiles: the tests' own interprets."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock


@functools.cache
def _pool() -> ProcessPoolExecutor:
    """One process, started at the first use, for as long as this one lives."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_initialise)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with mock.patch.dict(os.environ, environment, clear=True):
        pool.submit(int).result()
    return pool


def _initialise() -> None:
    import torch

    torch.set_num_threads(1)


def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of a module, called in that process; its exceptions are raised here."""
    return _pool().submit(function, *arguments).result()
