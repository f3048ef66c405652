"""Any PyTorch program on these kernels: `torch.compile(model, backend="transformer_kernels")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from transformer_kernels.patching.graph._rewrite import rewrite


def transformer_kernels(graph_module: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend of `torch.compile`: rewrites the graph of torch calls, which then runs eagerly, with autograd."""
    outcome = rewrite(graph_module, torch.is_grad_enabled(), (options or {}).get("backend"))
    graph_module.graph.lint()
    graph_module.recompile()
    REPORTS.append(outcome)
    return graph_module.forward  # type: ignore[no-any-return]


REPORTS: list[Any] = []
