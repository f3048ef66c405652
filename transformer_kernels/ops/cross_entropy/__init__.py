"""Cross-entropy of logits with class indices, in one pass each way."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select

OP = "cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """(1 - eps) * -log p_target + eps * mean_j(-log p_j) with p = softmax(logits), as torch's for class indices.

    Args:
        logits: (..., V), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        targets: int64 or int32 (...), the class of each row.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing: eps, in [0, 1].
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        float32 (float64 for float64), computed in it: a scalar, or (...) for "none". The mean is NaN when every row is
        ignored.
    Raises:
        IndexError: a target is neither a class nor ignore_index. On a GPU nobody looks: such a row's loss is NaN.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, section 7 (smoothing); Milakov,
    Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    arguments = prepare(
        logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return route(OP, backend, arguments)


def prepare(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: both tensors contiguous, targets int64."""
    _checks.tensor(OP, "logits", logits)
    _checks.at_least_1d(OP, logits)
    if logits.shape[-1] == 0:
        raise ValueError(f"{OP}: logits must have at least one class; got shape {tuple(logits.shape)}")
    _checks.class_indices(OP, "targets", targets, logits.shape[:-1])
    _checks.same_device(OP, logits, targets=targets)
    _checks.integer(OP, "ignore_index", ignore_index)
    _checks.probability(OP, "label_smoothing", label_smoothing)
    _checks.choice(OP, "reduction", reduction, REDUCTIONS)
    _autograd.refuse_transforms(OP, logits, targets)
    if not _autograd.is_traced(logits):
        _checks.classes_in_range(OP, "targets", targets, logits.shape[-1], ignore_index)
    return logits.contiguous(), targets.long().contiguous(), int(ignore_index), float(label_smoothing), reduction


def route(op: str, backend: str | None, arguments: tuple[Any, ...]) -> Tensor:
    """The loss by the route that the call needs; `op` is who asks, for errors that come later."""
    logits = arguments[0]
    if _autograd.is_traced(logits):
        return _registered(*arguments, backend)[0]
    module = select(OP, backend, arguments)
    if is_empty(logits):
        module = _torch
    if _autograd.needs_grad(logits):
        return _CrossEntropy.apply(op, module, *arguments)
    return module.forward(*arguments)[0]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: str,
        module: ModuleType,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
    ) -> Tensor:
        loss, statistics, count = module.forward(logits, targets, ignore_index, label_smoothing, reduction)
        ctx.op, ctx.module, ctx.options = op, module, (ignore_index, label_smoothing, reduction)
        ctx.save_for_backward(logits, targets, statistics, count)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        dlogits = ctx.module.backward(dloss.contiguous(), *ctx.saved_tensors, *ctx.options)
        return None, None, *_autograd.first_order_only(ctx.op, (dlogits,)), None, None, None, None


def _run(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str, backend: str | None
) -> tuple[Tensor, ...]:
    _checks.classes_in_range(OP, "targets", targets, logits.shape[-1], ignore_index)
    arguments = (logits, targets, ignore_index, label_smoothing, reduction)
    module = select(OP, backend, arguments)
    loss, statistics, count = (_torch if is_empty(logits) else module).forward(*arguments)
    pairs = zip((loss, statistics, count), _fake(*arguments, backend), strict=True)
    found = [torch.zeros_like(like) if result is None else result for result, like in pairs]
    return _autograd.unaliased(*found)


def _fake(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = logits.new_empty(targets.shape if reduction == "none" else (), dtype=dtype)
    return loss, logits.new_empty((2, targets.numel()), dtype=dtype), logits.new_empty((), dtype=dtype)


def _run_backward(
    dloss: Tensor,
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    backend: str | None,
) -> Tensor:
    options = (ignore_index, label_smoothing, reduction)
    module = _torch if is_empty(logits) else select(OP, backend, (logits, targets, *options))
    return module.backward(dloss.contiguous(), logits, targets, statistics, count, *options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, *ctx.options = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _registered_gradient(ctx: Any, dloss: Tensor, *_: Tensor | None) -> Any:
    return _registered_backward(dloss, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_registered = _autograd.register(
    "cross_entropy(Tensor logits, Tensor targets, int ignore_index, float label_smoothing, str reduction, str? backend)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_registered_backward = _autograd.register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor targets, Tensor statistics, Tensor count,"
    " int ignore_index, float label_smoothing, str reduction, str? backend) -> Tensor",
    _run_backward,
    lambda dloss, logits, *_: torch.empty_like(logits),
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.cross_entropy import _torch  # noqa: E402
