"""Cross-entropy of logits, or of a linear layer without storing all of its logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops.loss import _chunked
from transformer_kernels.ops.loss._calls import (
    LINEAR_OP,
    OP,
    REDUCTIONS,
    CrossEntropyCall,
    CrossEntropyResult,
    LinearCrossEntropyCall,
    LinearCrossEntropyResult,
)


@_checks.spelled_unlike_torch("F.cross_entropy(input, target, weight)", "cross_entropy(logits, targets, weight=weight)")
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

    Logits of three dimensions and more have their classes in the last axis, (B, L, V) beside targets (B, L), or in axis
    1 as torch has them, (B, V, L): the shape of the targets decides, and where it fits both, V = L, the call raises.

    Args:
        logits: (..., V) or (B, V, ...), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        targets: int64 or int32 (...) or (B, ...), the class of each row; or floating (M, V), the probability t of each
            class, without a gradient. A class of probability 0 may have the logit -inf.
        weight: floating (V,), w, without a gradient; 1 unless given.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing: eps, in [0, 1].
        z_loss: adds z_loss * log(sum_j exp(logit_j))^2 to a row's loss; not negative.
        softcap: softcap * tanh(logits / softcap) replaces the logits; positive.
        reduction: "none", "sum", or "mean": the sum over the weights of the classes that are not ignored, or over the
            number of rows where targets are probabilities.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        float32 (float64 for float64), computed in it: a scalar, or for "none" one loss for each row, in the shape of
        class targets. The mean is NaN when every row is ignored.

    Raises:
        IndexError: a target is neither a class nor ignore_index. Not validated on a GPU: the row's loss is NaN there.
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> logits, targets = torch.zeros(2, 128, 65, requires_grad=True), torch.randint(65, (2, 128))
        >>> loss = cross_entropy(logits, targets, label_smoothing=0.1)
        >>> round(loss.item(), 4)  # log(65)
        4.1744
        >>> loss.backward()

    Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, section 7 (smoothing); Milakov,
    Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; Chowdhery et al., "PaLM", 2022, section
    5 (z_loss); Gemma Team, "Gemma 2", 2024, section 2 (softcap).
    """
    return CROSS_ENTROPY.run(
        backend, logits, targets, weight, ignore_index, label_smoothing, z_loss, softcap, reduction,
    )  # fmt: skip


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """cross_entropy(x W^T + b, targets), in chunks of rows whose logits become their own gradient.

    Where all rows fit into one chunk this is a linear layer followed by `cross_entropy`. Otherwise the gradients are
    computed during the forward pass, chunk by chunk, and the backward pass multiplies them by the incoming scalar; with
    reduction="none", where each row has a scalar of its own, the backward pass recomputes each chunk of logits.

    Args:
        x: (..., E), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        weight: (V, E), W, in the dtype of x; any dtype under autocast, whose dtype the products have.
        targets: int64 or int32 (...), the class of each row.
        bias: (V,), b, as weight, or None.
        class_weight: floating (V,), without a gradient: the weight of `cross_entropy`.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing: as in `cross_entropy`, of the logits x W^T + b.
        z_loss: as in `cross_entropy`.
        softcap: as in `cross_entropy`.
        reduction: "none", "sum", or "mean": the sum over the weights of the classes that are not ignored.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`). The products
            are PyTorch's in each of them.

    Returns:
        float32 (float64 for float64), a scalar, or (...) for "none". Gradients of weight and
            bias are summed over chunks in float32.

    Raises:
        IndexError: a target is neither a class nor ignore_index. Not validated on a GPU: there the loss is NaN.
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> x, weight = torch.randn(2, 128, 64, requires_grad=True), torch.randn(65, 64, requires_grad=True)
        >>> linear_cross_entropy(x, weight, torch.randint(65, (2, 128))).backward()
        >>> weight.grad.shape
        torch.Size([65, 64])

    Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, section 2 (logits are not stored).
    """
    options = class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction
    if not torch.compiler.is_compiling():
        return LINEAR_CROSS_ENTROPY.run(backend, x, weight, targets, bias, *options)
    call = LINEAR_CROSS_ENTROPY.prepared((x, weight, targets, bias, *options))
    if not call.is_one_chunk():
        return LINEAR_CROSS_ENTROPY(call, backend)
    return CROSS_ENTROPY(call.loss_of(F.linear(call.x, call.weight, call.bias)), backend)


def checked_options(
    op: str,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> dict[str, Any]:
    """The options that are no tensors, validated, as fields of a call."""
    _checks.integer(op, "ignore_index", ignore_index)
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"{op}: ignore_index must fit into 64 bits; got {ignore_index}")
    _checks.probability(op, "label_smoothing", label_smoothing)
    _checks.finite(op, "z_loss", z_loss)
    if z_loss < 0.0:
        raise ValueError(f"{op}: z_loss must not be negative; got {z_loss}")
    if softcap is not None:
        _checks.positive(op, "softcap", softcap)
        _checks.finite(op, "softcap", softcap)
    _checks.choice(op, "reduction", reduction, REDUCTIONS)
    return {
        "ignore_index": int(ignore_index),
        "label_smoothing": float(label_smoothing),
        "z_loss": float(z_loss),
        "softcap": None if softcap is None else float(softcap),
        "reduction": reduction,
    }


@_operation.takes_options_of(checked_options)
def _prepare(logits: Tensor, targets: Tensor, *, weight: Tensor | None = None, **options: Any) -> CrossEntropyCall:
    """The validated arguments; `options` are those of `checked_options`."""
    _checks.tensor(OP, "logits", logits)
    _checks.at_least_1d(OP, logits)
    checked = checked_options(OP, **options)
    if logits.dim() > 2 and isinstance(targets, Tensor):
        logits = _classes_last(logits, targets)
    if logits.shape[-1] == 0:
        raise ValueError(f"{OP}: logits must have at least one class; got shape {tuple(logits.shape)}")
    probabilities = isinstance(targets, Tensor) and targets.is_floating_point()
    if probabilities:
        _check_probabilities(logits, targets, checked["ignore_index"])
    else:
        _checks.class_indices(OP, "targets", targets, logits.shape[:-1])
    _check_class_weight(OP, "weight", weight, logits.shape[-1])
    _checks.same_device(OP, logits, targets=targets, weight=weight)
    if _operation.reads_values(logits) and not probabilities:
        _checks.classes_in_range(OP, "targets", targets, logits.shape[-1], checked["ignore_index"])
    targets = (targets if probabilities else targets.long()).contiguous()
    return CrossEntropyCall(
        logits.contiguous(), targets, weight=None if weight is None else weight.contiguous(), **checked
    )


def _classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits with their classes in the last axis, from either layout; the shape of the targets decides which.

    Raises:
        ValueError: both layouts fit, as they do where targets are probabilities.
    """
    in_axis_1 = (logits.shape[0], *logits.shape[2:])
    probabilities = targets.is_floating_point()
    if not probabilities and targets.shape != in_axis_1:
        return logits
    if probabilities or targets.shape == logits.shape[:-1]:
        shape = tuple(logits.shape)
        raise ValueError(
            f"{OP}: logits {shape} beside targets {tuple(targets.shape)} can have their {shape[-1]} classes in the "
            f"last axis or their {shape[1]} classes in axis 1, as torch reads them; give rows: "
            "logits.flatten(0, -2) or logits.movedim(1, -1).flatten(0, -2), and the targets flattened alike"
        )
    return logits.movedim(1, -1)


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


def _check_class_weight(op: str, name: str, weight: Tensor | None, classes: int) -> None:
    """A floating tensor (V,) without a gradient, or None."""
    if weight is None:
        return
    _checks.tensor(op, name, weight)
    if weight.shape != (classes,):
        raise ValueError(f"{op}: {name} must have shape ({classes},); got {tuple(weight.shape)}")
    if weight.requires_grad:
        raise ValueError(f"{op}: {name} has no gradient; detach it, or use python_ref.ops.{op}")


@_operation.takes_options_of(checked_options)
def _prepare_linear(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    **options: Any,
) -> LinearCrossEntropyCall:
    """The validated arguments; `options` are those of `checked_options`."""
    _checks.tensor(LINEAR_OP, "x", x)
    _checks.at_least_1d(LINEAR_OP, x)
    autocast = _operation.autocast_dtype(x)
    _checks.linear_parameter(LINEAR_OP, "weight", weight, (None, x.shape[-1]), x, autocast is not None)
    if bias is not None:
        _checks.linear_parameter(LINEAR_OP, "bias", bias, (weight.shape[0],), x, autocast is not None)
    _checks.class_indices(LINEAR_OP, "targets", targets, x.shape[:-1])
    _check_class_weight(LINEAR_OP, "class_weight", class_weight, weight.shape[0])
    _checks.same_device(LINEAR_OP, x, weight=weight, targets=targets, bias=bias, class_weight=class_weight)
    checked = checked_options(LINEAR_OP, **options)
    if _operation.reads_values(x):
        _checks.classes_in_range(LINEAR_OP, "targets", targets, weight.shape[0], checked["ignore_index"])
    dtype = x.dtype if autocast is None or x.dtype is torch.float64 else autocast
    checked |= {"class_weight": None if class_weight is None else class_weight.contiguous(), "dtype": dtype}
    wanted = [_operation.needs_grad(tensor) for tensor in (x, weight, bias)]
    return LinearCrossEntropyCall(x, weight, targets.long().contiguous(), bias, wanted=wanted, **checked)


CROSS_ENTROPY = _operation.Operation(
    OP,
    CrossEntropyCall,
    _prepare,
    result=CrossEntropyResult,
    differentiable=("logits",),
    kept=("statistics", "counted"),
    kernels="loss",
)

LINEAR_CROSS_ENTROPY = _operation.Operation(
    LINEAR_OP,
    LinearCrossEntropyCall,
    _prepare_linear,
    result=LinearCrossEntropyResult,
    differentiable=("x", "weight", "bias"),
    kept=("loss", "counted", "dx", "dweight", "dbias"),
    kernels=(_chunked.ChunkedCrossEntropy, "loss"),
)
