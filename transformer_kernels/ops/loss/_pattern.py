"""The output layer and its cross-entropy, if nothing else uses the logits: they are never stored as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.ops import loss
from transformer_kernels.ops._pattern import (
    As,
    Call,
    Input,
    Match,
    Number,
    Option,
    Pattern,
    Replacement,
    Term,
    is_faster,
    maybe,
)  # fmt: skip

MIN_LOGITS = 1 << 24
"""From this size on, memory counts more than time: chunks take 1.4 times the time of the product and the loss."""

LOGITS = As("logits", Call("linear", Input("x"), Input("weight"), Option("bias")))


def _capped(logits: Term) -> Term:
    """cap * tanh(logits / cap)."""
    inside = Call("mul", logits, Number("inverse", least=1e-30))
    return Call("mul", Call("tanh", inside), Number("cap", least=1e-30))


def _rows(logits: Term) -> Term:
    return Call("rows", logits)


CLASSES = maybe(lambda y: Call("first_columns", y, Number("classes")), LOGITS)
"""Without the columns that pad the vocabulary."""

ROWS = maybe(_rows, maybe(_capped, maybe(_rows, CLASSES)))
OPTIONS = ("class_weight", "ignored", "reduction", "smoothing")
LINEAR_CROSS_ENTROPY = Call("cross_entropy", ROWS, Input("target", dims=1), *map(Option, OPTIONS))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, ignored: int,
    reduction: str, smoothing: float, softcap: float | None, classes: int | None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    if classes is not None:
        weight, bias = weight[:classes], None if bias is None else bias[:classes]
    return loss.linear_cross_entropy(
        x.flatten(0, -2), weight, target, bias, class_weight=class_weight, ignore_index=ignored, reduction=reduction,
        label_smoothing=smoothing, softcap=softcap, backend=backend,
    ).to(x.dtype)  # fmt: skip


def _replace(match: Match) -> Replacement | str:
    bound, x, logits, target = match.bound, match.fake("x"), match.fake("logits"), match.fake("target")
    if not match.trains:
        return "without gradients the logits are not kept"
    tensors = [x, *(match.shape(bound[name]) for name in ("weight", "bias", "class_weight"))]
    if not match.has_kernel(match.dtype):
        return "its dtype has no kernel"
    if any(tensor is not None and tensor.dtype is not match.dtype for tensor in tensors):
        return "the dtypes differ"
    if target.dtype is not torch.int64 or bound["reduction"] not in ("mean", "sum", "none"):
        return "the targets are probabilities"
    if tensors[-1] is not None and tensors[-1].requires_grad:
        return "the weights of the classes have a gradient"
    if "cap" in bound and abs(bound["inverse"] * bound["cap"] - 1.0) > 1e-6:
        return "its softcap multiplies by another number than it divides by"
    if match.is_auto and match.size(*logits.shape) < MIN_LOGITS:
        return "the logits are small: the product and the loss alone are faster"
    if not is_faster(match, "cross_entropy", logits):
        return "PyTorch's functions are the faster ones at this size"
    values: tuple[Any, ...] = tuple(bound[name] for name in ("x", "weight", "target", "bias", *OPTIONS))
    return Replacement(linear_cross_entropy, (*values, bound.get("cap"), bound.get("classes")))


PATTERNS = (Pattern("linear_cross_entropy", LINEAR_CROSS_ENTROPY, _replace),)
