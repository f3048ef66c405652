"""Cross-entropy of logits with class indices or probabilities, in one pass each way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels.backends import address

OP = "cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


class RowLoss(NamedTuple):
    """How the loss of a row with a class is made; `cross_entropy` says what each option means."""

    ignore_index: int
    label_smoothing: float
    weights: Tensor | None = None
    """(V + 1,), the weight of each class and behind them their mean, float32 at least; None stands for ones."""
    z_loss: float = 0.0
    softcap: float | None = None

    def is_plain(self) -> bool:
        """Whether there is nothing but smoothing: what the kernels' fastest paths know."""
        return self.weights is None and self.z_loss == 0.0 and self.softcap is None

    def as_arguments(self) -> tuple[int, float, int, float, float]:
        """The options as compiled kernels take them, 0 for what is absent; the weights must outlive the launch."""
        return self.ignore_index, self.label_smoothing, address(self.weights), self.z_loss, self.softcap or 0.0


def row_loss(
    ignore_index: int,
    label_smoothing: float,
    weight: Tensor | None,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> RowLoss:
    """The options as kernels take them, from a call's; the weights in `dtype`."""
    weights = None
    if weight is not None:
        weight = weight.to(dtype)
        weights = torch.cat([weight, weight.mean(dim=0, keepdim=True)])
    return RowLoss(ignore_index, label_smoothing, weights, z_loss, softcap)


def weighted_mean(losses: Tensor, targets: Tensor, ignore_index: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses over that of the weights of their classes, and the latter sum."""
    ignored = targets == ignore_index
    counted = weights[targets.clamp(0, weights.shape[0] - 2)].masked_fill_(ignored, 0.0).sum()
    return losses.sum() / counted, counted


class CrossEntropyCall(NamedTuple):
    """The tensors are contiguous, the targets int64 classes or, of the shape of the logits, probabilities."""

    logits: Tensor
    targets: Tensor
    ignore_index: int
    label_smoothing: float
    reduction: str
    weight: Tensor | None = None
    z_loss: float = 0.0
    softcap: float | None = None

    def row_loss(self) -> RowLoss:
        """The options of each row."""
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        return row_loss(self.ignore_index, self.label_smoothing, self.weight, self.z_loss, self.softcap, dtype)

    def beyond_classes(self) -> str | None:
        """Why kernels of rows with a class do not take the call; None if they do."""
        if not self.targets.is_floating_point():
            return None
        return "it does not know probabilities as targets, a second tensor of the logits' size; use backend='torch'"


class CrossEntropyResult(NamedTuple):
    """The loss, two numbers (2, M) for each row that a backend may leave for its backward, and what a mean is over."""

    loss: Tensor
    statistics: Tensor | None
    counted: Tensor | None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """-sum_j w_j t_j log p_j with p = softmax(logits) and t a class or, smoothed, (1 - eps) t + eps / V; as torch's.

    Args:
        logits: (..., V), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        targets: int64 or int32 (...), the class of each row; or floating (..., V), the probability t of each class,
            without a gradient. A class of probability 0 may have the logit -inf.
        weight: floating (V,), w, without a gradient; 1 unless given.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing: eps, in [0, 1].
        z_loss: adds z_loss * log(sum_j exp(logit_j))^2 to a row's loss; not negative.
        softcap: softcap * tanh(logits / softcap) takes the place of the logits; positive.
        reduction: "none", "sum", or "mean": the sum over the weights of the classes that are not ignored, or over the
            number of rows where targets are probabilities.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        float32 (float64 for float64), computed in it: a scalar, or (...) for "none". The mean is NaN when every row is
        ignored.
    Raises:
        IndexError: a target is neither a class nor ignore_index. Not validated on a GPU: the row's loss is NaN there.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, section 7 (smoothing); Milakov,
    Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; Chowdhery et al., "PaLM", 2022, section
    5 (z_loss); Gemma Team, "Gemma 2", 2024, section 2 (softcap).
    """
    call = prepare(
        logits,
        targets,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
    )
    return OPERATION(call, backend)


def prepare(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> CrossEntropyCall:
    """The checked arguments."""
    _checks.tensor(OP, "logits", logits)
    _checks.at_least_1d(OP, logits)
    if logits.shape[-1] == 0:
        raise ValueError(f"{OP}: logits must have at least one class; got shape {tuple(logits.shape)}")
    probabilities = isinstance(targets, Tensor) and targets.is_floating_point()
    if probabilities:
        _check_probabilities(logits, targets, ignore_index)
    else:
        _checks.class_indices(OP, "targets", targets, logits.shape[:-1])
    check_class_weight(OP, "weight", weight, logits.shape[-1])
    _checks.same_device(OP, logits, targets=targets, weight=weight)
    check_options(OP, ignore_index, label_smoothing, z_loss, softcap, reduction)
    _autograd.refuse_transforms(OP, logits, targets)
    if not _autograd.is_traced(logits) and not probabilities:
        _checks.classes_in_range(OP, "targets", targets, logits.shape[-1], ignore_index)
    targets = (targets if probabilities else targets.long()).contiguous()
    numbers = int(ignore_index), float(label_smoothing), reduction
    added = float(z_loss), None if softcap is None else float(softcap)
    return CrossEntropyCall(
        logits.contiguous(), targets, *numbers, None if weight is None else weight.contiguous(), *added
    )


def _check_probabilities(logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    _checks.tensor(OP, "targets", targets)
    if targets.shape != logits.shape:
        raise ValueError(
            f"{OP}: targets that are probabilities must have the shape of logits {tuple(logits.shape)}; "
            f"got {tuple(targets.shape)}"
        )
    if targets.requires_grad:
        raise ValueError(f"{OP}: targets have no gradient; detach them, or use python_ref.ops.{OP}")
    if ignore_index >= 0:
        raise ValueError(f"{OP}: ignore_index is of targets that are classes; got {ignore_index} beside probabilities")


def check_class_weight(op: str, name: str, weight: Tensor | None, classes: int) -> None:
    """A floating tensor (V,) without a gradient, or None."""
    if weight is None:
        return
    _checks.tensor(op, name, weight)
    if weight.shape != (classes,):
        raise ValueError(f"{op}: {name} must have shape ({classes},); got {tuple(weight.shape)}")
    if weight.requires_grad:
        raise ValueError(f"{op}: {name} has no gradient; detach it, or use python_ref.ops.{op}")


def check_options(
    op: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> None:
    """The options that are no tensors."""
    _checks.integer(op, "ignore_index", ignore_index)
    _checks.probability(op, "label_smoothing", label_smoothing)
    _checks.finite(op, "z_loss", z_loss)
    if z_loss < 0.0:
        raise ValueError(f"{op}: z_loss must not be negative; got {z_loss}")
    if softcap is not None:
        _checks.positive(op, "softcap", softcap)
        _checks.finite(op, "softcap", softcap)
    _checks.choice(op, "reduction", reduction, REDUCTIONS)


def _fake(call: CrossEntropyCall) -> CrossEntropyResult:
    logits = call.logits
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = logits.new_empty(logits.shape[:-1] if call.reduction == "none" else (), dtype=dtype)
    statistics = logits.new_empty((2, logits.shape[:-1].numel()), dtype=dtype)
    return CrossEntropyResult(loss, statistics, logits.new_empty((), dtype=dtype))


def _second_order(
    call: CrossEntropyCall, result: CrossEntropyResult, grads: tuple[Tensor, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    logits, targets, ignore_index, label_smoothing, reduction, weight, z_loss, softcap = call
    with torch.enable_grad():
        rows = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        rows = rows if softcap is None else softcap * torch.tanh(rows / softcap)
        kinds = targets.to(rows.dtype).view(rows.shape) if targets.is_floating_point() else targets.view(-1)
        losses = torch.nn.functional.cross_entropy(
            rows,
            kinds,
            weight if weight is None else weight.to(rows.dtype),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="none",
        )
        if z_loss > 0.0:
            seen = torch.ones_like(losses) if targets.is_floating_point() else (kinds != ignore_index).to(losses.dtype)
            losses = losses + z_loss * seen * torch.logsumexp(rows, dim=-1).square()
        loss = losses if reduction == "none" else losses.sum()
        if result.counted is not None and reduction == "mean":
            loss = loss / result.counted
    return _autograd.differentiated(loss, [logits], grads[0].reshape(loss.shape), wanted)


def _check_when_run(call: CrossEntropyCall) -> None:
    """A traced call is checked when it runs: its targets have no values before."""
    if call.targets.is_floating_point():
        return
    _checks.classes_in_range(OP, "targets", call.targets, call.logits.shape[-1], call.ignore_index)


OPERATION = _autograd.Operation(
    OP,
    CrossEntropyCall,
    result=CrossEntropyResult,
    fake=_fake,
    differentiable=("logits",),
    kept=("statistics", "counted"),
    ahead=True,
    second_order=_second_order,
    check_when_run=_check_when_run,
)
