"""Adapters, and the modules whose forward computes attention, a norm, an activation, an MLP or a loss in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from transformer_kernels.patching._code import Call, calls_of
from transformer_kernels.patching._forms import syntax_tree
from transformer_kernels.patching._report import Row
from transformer_kernels.patching._swap import Patched, class_path, original_class

ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
SOFTMAX = ("softmax", "log_softmax", "gumbel_softmax", "softmin")
NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "local_response_norm")
ACTIVATIONS = (
    "gelu", "silu", "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "prelu", "rrelu", "mish", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "glu", "logsigmoid", "threshold", "tanhshrink", "hardshrink",
)  # fmt: skip
CURVES = ("tanh", "sigmoid", "erf")
"""Functions that are an activation alone, or a part of one that is written out, and have other uses too."""
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "mm")
LOSSES = re.compile(r"cross_entropy|_loss$")
NAMES = {
    "activation": re.compile(r"G[Ee]LU|SiLU|Swish|Mish|Activation|^(Tanh|Sigmoid)"),
    "MLP": re.compile(r"MLP|Mlp|FFN|FeedForward|Intermediate|DenseAct|DenseGated"),
}
"""Class names of modules that are not recognisable by their calls."""

ADAPTER = "an adapter: it is called unchanged and not fused with its neighbours"
NOT_PYTHON = "its forward is not Python code"
NO_SOURCE = "; source unavailable: it was not compared with known code"


def left_modules(model: nn.Module, known: set[str]) -> Iterator[Row]:
    """The adapters, and the modules that are neither patched nor in `known` and compute something in PyTorch.

    A norm or an activation directly inside a patched module is computed by that module.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        kind = original_class(module)
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            yield Row(name, kind.__name__, None, ADAPTER)
        elif name not in known and not isinstance(module, Patched) and not _is_ours(module):
            reason = why_left(module)
            parent = modules[name.rpartition(".")[0]] if name else None
            if reason is not None and not _includes(parent, kind):
                yield Row(name, kind.__name__, None, reason)


def why_left(module: nn.Module) -> str | None:
    """Why PyTorch computes a module's operation; None if the module has no operation of this package."""
    kind = original_class(module)
    calls = calls_of(kind)
    if calls is None:
        return NOT_PYTHON
    reason = _reason(kind, {call.name for call in calls})
    if reason is None:
        return None
    if not kind.__module__.startswith("torch.") and syntax_tree(kind.forward) is None:
        reason += NO_SOURCE
    return reason + remedy(calls)


def remedy(calls: tuple[Call, ...]) -> str:
    """Which of these calls `accelerate` reroutes, for the report; empty if none."""
    seen = sorted({call.name for call in calls if call.seen})
    return f"; `accelerate` reroutes its calls of {' and '.join(seen)}" if seen else ""


def _is_ours(module: nn.Module) -> bool:
    return class_path(module).startswith("transformer_kernels.")


def _includes(parent: nn.Module | None, kind: type) -> bool:
    """Whether the row of a parent says it already, or the patched parent computes a norm or an activation inside it."""
    if parent is None or not isinstance(parent, Patched):
        return parent is not None and calls_of(original_class(parent)) is None
    names = {call.name for call in calls_of(kind) or ()}
    return bool(names & {*NORMS, *ACTIVATIONS, *CURVES, "rsqrt"}) and not names & {*ATTENTION, *SOFTMAX}


def _reason(kind: type, names: set[str]) -> str | None:
    """Why what these calls compute stays PyTorch's."""
    named = next((what for what, pattern in NAMES.items() if pattern.search(kind.__name__)), None)
    own = not kind.__module__.startswith("torch.")
    if found := names & {*ATTENTION}:
        if kind.__module__.startswith("transformers."):
            return "it does not call transformers' AttentionInterface"
        return f"its call of {min(found)} cannot be replaced in its forward"
    if found := names & {*SOFTMAX}:
        if own and (names & {*PRODUCTS} or "Attention" in kind.__name__ or "Attn" in kind.__name__):
            if kind.__module__.startswith("transformers."):
                return "it does not call transformers' AttentionInterface: its scores and softmax are separate calls"
            return "its scores, softmax and product are separate calls, not scaled_dot_product_attention"
        return f"its softmax is PyTorch's {min(found)}" if own else f"{min(found)} is called on its own"
    if losses := [name for name in names if LOSSES.search(name)]:
        return f"{min(losses)} is called with arguments that are known to its caller only"
    if found := names & {*NORMS}:
        known = found & {"layer_norm", "rms_norm"}
        return f"its code is not that of a known {min(known)}" if known else f"there is no operation for {min(found)}"
    if own and ("rsqrt" in names or ("sqrt" in names and names & {"var", "std", "mean"})):
        return "a norm that is written out: its code is not that of a known norm"
    gated = named == "MLP" and "mul" in names  # one without a gate is its linear layers and its activation
    return _activation(kind, own, names, named) or ("its code is not that of a known gated MLP" if gated else None)


def _activation(kind: type, own: bool, names: set[str], named: str | None) -> str | None:
    """The same of an activation."""
    if "gelu" in names:
        return "its gelu is called inside its own code"
    constants = _constants(kind)
    if own and (("tanh" in names and 0.044715 in constants) or ("erf" in names and constants & {0.5, 1.41421})):
        return "a GELU that is written out: its code is not that of a known GELU"
    if found := names & {*ACTIVATIONS}:
        return f"there is no operation for {min(found)} alone"
    if (found := names & {*CURVES}) and (not own or named == "activation"):
        return f"there is no operation for {min(found)}" if not own else "there is no operation for this activation"
    return None


def _constants(kind: Any) -> set[Any]:
    code = getattr(kind.forward, "__code__", None)
    return set() if code is None else {value for value in code.co_consts if isinstance(value, float)}
