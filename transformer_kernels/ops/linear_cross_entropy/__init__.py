"""The output layer of a language model and its cross-entropy, without ever holding all the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import select
from transformer_kernels.ops.cross_entropy import OPERATION as CROSS_ENTROPY
from transformer_kernels.ops.cross_entropy import CrossEntropyCall, check_class_weight, check_options
from transformer_kernels.ops.linear import linear
from transformer_kernels.ops.linear_cross_entropy import _chunked
from transformer_kernels.ops.linear_cross_entropy._chunked import (
    ChunkedCrossEntropy,
    LinearCrossEntropyCall,
    LinearCrossEntropyResult,
)

OP = "linear_cross_entropy"


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
    made during the forward pass, chunk by chunk, and the backward pass multiplies them by the incoming scalar; with
    reduction="none", where each row has its own, the backward pass makes each chunk of logits again.

    Args:
        x: (..., E), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        weight: (V, E) and bias: (V,) or None, in the dtype of x; under autocast in any, and the products are in
            autocast's.
        targets: int64 or int32 (...), the class of each row.
        class_weight: floating (V,), without a gradient: what `cross_entropy` calls weight, which here is the layer's.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing, z_loss, softcap: as in `cross_entropy`, of the logits x W^T + b.
        reduction: "none", "sum", or "mean": the sum over the weights of the classes that are not ignored.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`). The products
            are PyTorch's in each of them.
    Returns:
        float32 (float64 for float64), a scalar, or (...) for "none". Gradients of weight and
            bias are summed over chunks in float32.
    Raises:
        IndexError: a target is neither a class nor ignore_index. Not validated on a GPU: there the loss is NaN.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, section 2 (why not to hold the logits).
    """
    call = prepare(
        x,
        weight,
        targets,
        bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
    )
    if call.targets.numel() > _chunked.rows_at_once(weight.shape[0], call.dtype, x.device):
        return OPERATION(call, backend)
    if not _autograd.is_traced(x):
        select(OPERATION, backend, call)  # an error names this operation
    # also while a step is recorded, so that its bits are the same
    own = not torch.compiler.is_compiling()
    logits = linear(x, weight, bias, backend=backend) if own else F.linear(x, weight, bias)
    inner = CrossEntropyCall(logits, call.targets, *call[4:7], *call[9:])
    return CROSS_ENTROPY(inner, backend)


def prepare(
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
) -> LinearCrossEntropyCall:
    """The checked arguments."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    autocast = _autograd.autocast_dtype(x)
    _checks.linear_parameter(OP, "weight", weight, (None, x.shape[-1]), x, autocast is not None)
    if bias is not None:
        _checks.linear_parameter(OP, "bias", bias, (weight.shape[0],), x, autocast is not None)
    _checks.class_indices(OP, "targets", targets, x.shape[:-1])
    check_class_weight(OP, "class_weight", class_weight, weight.shape[0])
    _checks.same_device(OP, x, weight=weight, targets=targets, bias=bias, class_weight=class_weight)
    check_options(OP, ignore_index, label_smoothing, z_loss, softcap, reduction)
    _autograd.refuse_transforms(OP, x, weight, bias)
    if not _autograd.is_traced(x):
        _checks.classes_in_range(OP, "targets", targets, weight.shape[0], ignore_index)
    dtype = x.dtype if autocast is None or x.dtype is torch.float64 else autocast
    options = int(ignore_index), float(label_smoothing), reduction, dtype
    wanted = [_autograd.needs_grad(each) for each in (x, weight, bias)]
    class_weight = None if class_weight is None else class_weight.contiguous()
    added = class_weight, float(z_loss), None if softcap is None else float(softcap)
    return LinearCrossEntropyCall(x, weight, targets.long().contiguous(), bias, *options, wanted, *added)


def _fake(call: LinearCrossEntropyCall) -> LinearCrossEntropyResult:
    scalar = call.x.new_empty((), dtype=torch.promote_types(call.dtype, torch.float32))
    if call.reduction == "none":
        return LinearCrossEntropyResult(scalar.new_empty(call.targets.shape), scalar, None, None, None)
    likes = (call.x.contiguous(), call.weight, call.bias)
    grads = (
        torch.empty_like(like) if want and like is not None else None
        for like, want in zip(likes, call.wanted, strict=True)
    )
    return LinearCrossEntropyResult(scalar, torch.empty_like(scalar), *grads)


def _check_when_run(call: LinearCrossEntropyCall) -> None:
    _checks.classes_in_range(OP, "targets", call.targets, call.weight.shape[0], call.ignore_index)


OPERATION = _autograd.Operation(
    OP,
    LinearCrossEntropyCall,
    result=LinearCrossEntropyResult,
    fake=_fake,
    differentiable=("x", "weight", "bias"),
    dropped=("x", "weight", "targets", "bias", "class_weight"),
    dropped_when=lambda call: call.reduction != "none",
    kept=("loss", "counted", "dx", "dweight", "dbias"),
    like={"x": "dx", "weight": "dweight", "bias": "dbias"},
    sizes=(),
    kernels="cross_entropy",
    adapt=ChunkedCrossEntropy,
    check_when_run=_check_when_run,
)
