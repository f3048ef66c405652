"""Functions of torch.nn and transformers at which Dynamo would end a graph, traced or skipped instead."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import transformer


def trace_further() -> None:
    """Let Dynamo, with any backend, trace masks of torch.nn's layers, warnings, and messages of transformers."""
    _trace_masks()
    _trace_messages()


@functools.cache
def _trace_masks() -> None:
    """Let Dynamo trace torch.nn's encoders and decoders with masks.

    They compare the values of a mask with a causal one, at which tracing ends. The result is a hint for faster kernels:
    the mask is passed on in any case. A warning, as about masks of two dtypes, ends tracing too: those whose text is
    known are issued when the program is compiled.
    """
    original: Any = transformer._detect_is_causal_mask

    @torch.compiler.substitute_in_graph(original)
    def is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    @torch.compiler.assume_constant_result
    def issue(message: Any, category: Any) -> None:
        warnings.warn(message, category, stacklevel=1)

    @torch.compiler.substitute_in_graph(warnings.warn, skip_signature_check=True)  # Python 3.12 has another one
    def warn(message: Any, category: Any = None, *_: Any, **options: Any) -> None:
        issue(message, category)


def _trace_messages() -> None:
    """Let Dynamo trace models of transformers that log a message once, at which tracing ends; it is not logged then.

    GPT-2 with labels does so: it would be two graphs, whose compilation takes three times as long.
    """
    ignored = getattr(torch._dynamo.config, "ignore_logging_functions", None)
    if ignored is not None and (method := getattr(logging.Logger, "warning_once", None)) is not None:
        ignored.add(method)
