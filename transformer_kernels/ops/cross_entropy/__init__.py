"""Cross-entropy of logits with class indices, in one pass each way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks

OP = "cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyCall(NamedTuple):
    """Both tensors are contiguous, the targets int64."""

    logits: Tensor
    targets: Tensor
    ignore_index: int
    label_smoothing: float
    reduction: str


class CrossEntropyResult(NamedTuple):
    """The loss, two numbers (2, M) for each row that a backend may leave for its backward, and the rows in a mean."""

    loss: Tensor
    statistics: Tensor | None
    counted: Tensor | None


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
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        float32 (float64 for float64), computed in it: a scalar, or (...) for "none". The mean is NaN when every row is
        ignored.
    Raises:
        IndexError: a target is neither a class nor ignore_index. Not validated on a GPU: the row's loss is NaN there.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, section 7 (smoothing); Milakov,
    Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    call = prepare(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    return OPERATION(call, backend)


def prepare(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> CrossEntropyCall:
    """The checked arguments."""
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
    return CrossEntropyCall(
        logits.contiguous(), targets.long().contiguous(), int(ignore_index), float(label_smoothing), reduction
    )


def _fake(call: CrossEntropyCall) -> CrossEntropyResult:
    logits, targets = call.logits, call.targets
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = logits.new_empty(targets.shape if call.reduction == "none" else (), dtype=dtype)
    statistics = logits.new_empty((2, targets.numel()), dtype=dtype)
    return CrossEntropyResult(loss, statistics, logits.new_empty((), dtype=dtype))


def _second_order(
    call: CrossEntropyCall, result: CrossEntropyResult, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    logits, targets, ignore_index, label_smoothing, reduction = call
    with torch.enable_grad():
        rows = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(
            rows, targets.view(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
    return _autograd.differentiated(loss, [logits], grads[0].reshape(loss.shape), wanted)


def _check_when_run(call: CrossEntropyCall) -> None:
    """A traced call is checked when it runs: its targets have no values before."""
    _checks.classes_in_range(OP, "targets", call.targets, call.logits.shape[-1], call.ignore_index)


OPERATION = _autograd.Operation(
    OP,
    CrossEntropyCall,
    result=CrossEntropyResult,
    fake=_fake,
    differentiable=("logits",),
    kept=("statistics", "counted"),
    second_order=_second_order,
    check_when_run=_check_when_run,
)
