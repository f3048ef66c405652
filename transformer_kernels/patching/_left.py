"""Adapters, and attention, norms, activations, MLPs and losses that `patch` does not support, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from transformer_kernels.patching._report import Row
from transformer_kernels.patching._swap import Patched, class_path, original_class

KINDS = {
    "attention": re.compile(r"Attention|Attn"),
    "norm": re.compile(r"Norm(?!al)|^LN$"),
    "activation": re.compile(r"GELU|GeLU|SiLU|Swish|Mish|Activation|^(ReLU|Tanh|Softmax|Sigmoid|ELU|GLU)|(ReLU|GLU)$"),
    "MLP": re.compile(r"MLP|Mlp|FFN|FeedForward|Intermediate|DenseAct|DenseGated"),
    "loss": re.compile(r"Loss|CrossEntropy"),
}
"""What the class of a module is called."""

REASONS = {
    "attention": "it does not call transformers' AttentionInterface",
    "norm": "its code is not that of a known norm",
    "activation": "there is no operation for this activation",
    "MLP": "its code is not that of a known MLP",
    "loss": "it is called with arguments that are known to its caller only",
}
ADAPTER = "an adapter: it is called unchanged and not fused with its neighbours"
REMEDY = "; `accelerate` reroutes its calls of torch"


def kind_of(module: nn.Module) -> str | None:
    """ "attention", "norm", "activation", "MLP" or "loss", by the name of a module's class."""
    name = original_class(module).__name__
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def left_modules(model: nn.Module, known: set[str]) -> Iterator[Row]:
    """The adapters, and the innermost modules of each kind that are neither patched nor in `known`.

    A norm or an activation directly inside a patched module is computed by that module.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            yield Row(name, original_class(module).__name__, None, ADAPTER)
    kinds = {name: kind_of(module) for name, module in modules.items()}
    around: set[tuple[str, str]] = set()
    """The modules that have one of a kind inside them."""
    for name, kind in kinds.items():
        while kind is not None and name:
            name = name.rpartition(".")[0]
            around.add((name, kind))
    for name, module in modules.items():
        kind = kinds[name]
        if kind is None or not name or name in known or isinstance(module, Patched) or (name, kind) in around:
            continue
        if class_path(module).startswith("transformer_kernels.") or _computed_by(
            modules[name.rpartition(".")[0]], kind
        ):
            continue
        yield Row(name, original_class(module).__name__, None, REASONS[kind] + REMEDY)


def _computed_by(parent: nn.Module, kind: str) -> bool:
    return isinstance(parent, Patched) and kind in ("norm", "activation")
