"""Activation checkpointing in a graph: Dynamo keeps the checkpointed part as a graph of its own.

PyTorch leaves recomputation to the partitioner of its own compiler. Here the part runs under torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

OPTIONS = frozenset(("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"))


def checkpointed(part: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """The part, whose intermediate values are computed again in the backward pass."""
    return checkpoint(part, *arguments, **{**options, "use_reentrant": False})


def checkpointed_parts(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The checkpointed parts of a graph, each of which now runs under `checkpointed`."""
    operator = getattr(torch.ops.higher_order, "tag_activation_checkpoint", None)
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not operator or not node.kwargs.keys() <= OPTIONS:
            continue
        body = node.args[0]
        part = getattr(module, str(body.target), None) if isinstance(body, fx.Node) and body.op == "get_attr" else None
        if not isinstance(part, fx.GraphModule):
            continue
        inputs = [placeholder for placeholder in part.graph.nodes if placeholder.op == "placeholder"]
        for inner, outer in zip(inputs, node.args[1:], strict=False):
            if isinstance(outer, fx.Node) and "grapharg" in outer.meta:
                inner.meta["grapharg"] = outer.meta["grapharg"]
        node.target = checkpointed
        yield part
