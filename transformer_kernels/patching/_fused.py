"""Fused operations for unmodified submodules of patched modules; modified submodules are called unchanged."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from transformer_kernels import ops
from transformer_kernels.ops._crossovers import is_small
from transformer_kernels.patching._swap import MovedDropout, class_path, is_plain, original_class

GELU_CLASSES = {
    "transformers.activations.GELUActivation": "none",
    "transformers.activations.NewGELUActivation": "tanh",
    "transformers.activations.GELUTanh": "tanh",
    "transformers.activations.FastGELUActivation": "tanh",
}


def dropped(branch: Tensor, dropout: Any) -> Tensor:
    """The branch after dropout, including dropout that was moved here."""
    if isinstance(dropout, MovedDropout):
        return F.dropout(branch, dropout.p, dropout.training)
    return branch if dropout is None else dropout(branch)


def add_norm(
    branch: Tensor, stream: Tensor, dropout: Any, norm: Any, backend: str | None, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """(norm(s), s) with s = dropout(branch) + stream."""
    random = dropout is not None and dropout.training
    fused = fused and not is_small("residual norm module", stream, backend, random or is_grad_enabled())
    fused = fused and is_plain(norm, nn.LayerNorm) and norm.weight is not None and norm.weight.dim() == 1
    if not fused or not (dropout is None or is_plain(dropout, nn.Dropout)):
        summed = dropped(branch, dropout) + stream
        return norm(summed), summed
    rate = dropout.p if random else 0.0
    return ops.add_layer_norm(branch, stream, norm.weight, norm.bias, eps=norm.eps, dropout_p=rate, backend=backend)


def gelu_kind(activation: Any) -> str | None:
    """ "none" or "tanh" for a plain GELU, None for every other activation."""
    if activation is F.gelu:
        return "none"
    if not isinstance(activation, nn.Module):
        return None
    if is_plain(activation, nn.GELU):
        return str(activation.approximate)
    return GELU_CLASSES.get(class_path(activation)) if is_plain(activation, original_class(activation)) else None


def activated(x: Tensor, linear: Any, activation: Any, backend: str | None) -> Tensor:
    """activation(linear(x)) in one operation if possible, else with the bias added by the activation."""
    if is_small("linear", x, backend, is_grad_enabled()):
        return activation(linear(x))
    approximate = gelu_kind(activation)
    relu = approximate is None and (activation is F.relu or is_plain(activation, nn.ReLU))
    bias = linear.bias
    if not is_plain(linear, nn.Linear) or not isinstance(bias, Tensor) or not (relu or approximate):
        return activation(linear(x))
    if not is_compiling():
        kind = "relu" if relu else "gelu_tanh" if approximate == "tanh" else "gelu"
        return ops.linear(x, linear.weight, bias, activation=kind, backend=backend)
    product = F.linear(x, linear.weight)
    if relu:
        return ops.bias_relu(product, bias, backend=backend)
    return ops.bias_gelu(product, bias, approximate=approximate or "none", backend=backend)
