"""The output layer of a language model and its cross-entropy, without ever holding all the logits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import select
from transformer_kernels.ops.cross_entropy import route
from transformer_kernels.ops.linear_cross_entropy import _chunked

OP = "linear_cross_entropy"
REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """cross_entropy(x W^T + b, targets), in chunks of rows whose logits become their own gradient.

    Where all rows fit into one chunk this is a linear layer followed by `cross_entropy`. Otherwise the gradients are
    made during the forward pass, chunk by chunk, and the backward pass multiplies them by the incoming scalar.

    Args:
        x: (..., E), any strides, float32, float16, bfloat16 (float64 with backend="torch").
        weight: (V, E) and bias: (V,) or None, in the dtype of x; under autocast in any, and the products are in
            autocast's.
        targets: int64 or int32 (...), the class of each row.
        ignore_index: rows with this target have no loss, no gradient and no part in the mean.
        label_smoothing: eps, in [0, 1], as in `cross_entropy`.
        reduction: "mean" over the rows that are not ignored, or "sum".
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`). The products are
            PyTorch's in each of them.
    Returns:
        a float32 scalar (float64 for float64). Gradients of weight and bias are summed over chunks in float32.
    Raises:
        IndexError: a target is neither a class nor ignore_index. On a GPU nobody looks: then the loss is NaN.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, section 2 (why not to hold the logits).
    """
    arguments = prepare(
        x, weight, targets, bias, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    traced = _autograd.is_traced(x)
    module = None if traced else select(OP, backend, arguments)
    _, _, classes, _, *options, dtype = arguments
    if classes.numel() <= _chunked.rows_at_once(weight.shape[0], dtype, x.device):
        return route(OP, backend, (F.linear(x, weight, bias), classes, *options))
    wanted = (_autograd.needs_grad(x), _autograd.needs_grad(weight), _autograd.needs_grad(bias))
    if module is None:
        return _registered(*arguments, list(wanted), backend)[0]
    if any(wanted):
        return _LinearCrossEntropy.apply(module, *arguments)
    return _forward(module, arguments, wanted).loss


def prepare(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Any, ...]:
    """The checked arguments: (x, weight, targets int64, bias, ignore_index, label_smoothing, reduction, dtype)."""
    _checks.tensor(OP, "x", x)
    _checks.at_least_1d(OP, x)
    autocast = _autograd.autocast_dtype(x)
    _checks.linear_parameter(OP, "weight", weight, (None, x.shape[-1]), x, autocast is not None)
    if bias is not None:
        _checks.linear_parameter(OP, "bias", bias, (weight.shape[0],), x, autocast is not None)
    _checks.class_indices(OP, "targets", targets, x.shape[:-1])
    _checks.same_device(OP, x, weight=weight, targets=targets, bias=bias)
    _checks.integer(OP, "ignore_index", ignore_index)
    _checks.probability(OP, "label_smoothing", label_smoothing)
    _checks.choice(OP, "reduction", reduction, REDUCTIONS)
    _autograd.refuse_transforms(OP, x, weight, bias)
    if not _autograd.is_traced(x):
        _checks.classes_in_range(OP, "targets", targets, weight.shape[0], ignore_index)
    dtype = x.dtype if autocast is None or x.dtype is torch.float64 else autocast
    targets = targets.long().contiguous()
    return x, weight, targets, bias, int(ignore_index), float(label_smoothing), reduction, dtype


def _forward(module: ModuleType, arguments: tuple[Any, ...], wanted: tuple[bool, bool, bool]) -> _chunked.Result:
    """The chunks, whose dtypes are chosen here and not by autocast once more."""
    with torch.autocast(arguments[0].device.type, enabled=False):
        return _chunked.forward(module, wanted, *arguments)


def _times(dloss: Tensor, count: Tensor | None, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of the sum of losses, times the incoming scalar and over the number of rows in a mean."""
    dloss = dloss.detach()  # under create_graph nothing here is to be recorded
    scale = (dloss if count is None else dloss / count.clamp(min=1)).view(1)  # not 0-d: multiplied in its own float32
    scaled = (grad if grad is None else torch.mul(grad, scale, out=torch.empty_like(grad)) for grad in grads)
    return _autograd.first_order_only(OP, tuple(scaled))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, *arguments: Any) -> Tensor:
        needed = ctx.needs_input_grad
        result = _forward(module, arguments, (needed[1], needed[2], needed[4]))
        ctx.save_for_backward(*result[1:])
        return result.loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        count, *grads = ctx.saved_tensors
        dx, dweight, dbias = _times(dloss, count, tuple(grads))
        return None, dx, dweight, None, dbias, None, None, None, None


def _run(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
    wanted: list[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    _checks.classes_in_range(OP, "targets", targets, weight.shape[0], ignore_index)
    arguments = (x, weight, targets, bias, ignore_index, label_smoothing, reduction, dtype)
    result = _forward(select(OP, backend, arguments), arguments, (wanted[0], wanted[1], wanted[2]))
    counted = torch.ones_like(result.loss) if result.counted is None else result.counted
    grads = (x.new_empty(0) if grad is None else grad for grad in result[2:])
    return _autograd.unaliased(result.loss, counted, *grads)


def _fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    dtype: torch.dtype,
    wanted: list[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    scalar = x.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    likes = (torch.empty_like(x.contiguous()), torch.empty_like(weight), bias)
    grads = (
        torch.empty_like(like) if want and like is not None else x.new_empty(0)
        for like, want in zip(likes, wanted, strict=True)
    )
    return scalar, torch.empty_like(scalar), *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-2]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _registered_gradient(ctx: Any, dloss: Tensor, *_: Tensor | None) -> Any:
    count, *grads = ctx.saved_tensors
    kept = tuple(grad if want else None for grad, want in zip(grads, ctx.wanted, strict=True))
    dx, dweight, dbias = _times(dloss, count, kept)
    return dx, dweight, None, dbias, None, None, None, None, None, None


_registered = _autograd.register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor? bias, int ignore_index,"
    " float label_smoothing, str reduction, ScalarType dtype, bool[3] wanted, str? backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)
