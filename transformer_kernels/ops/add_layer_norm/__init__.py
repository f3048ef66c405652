"""Dropout, residual addition and LayerNorm in one pass: the seam between two sublayers of a transformer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select
from transformer_kernels._dropout import draw_seed

OP = "add_layer_norm"


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = dropout(x) + residual, normalised over the last axis.

    Args:
        x: (..., N), what the sublayer made; float32, float16, bfloat16 (float64 with backend="torch"), any strides.
        residual: what went into the sublayer, the shape and dtype of x.
        weight, bias: (N,), in the dtype of x or in float32; bias may be None.
        eps: added to the variance, positive.
        dropout_p: probability in [0, 1] with which an element of x is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed, row,
            column), the same in every backend; the seed is drawn from torch's generator.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (normed, summed), both of the shape and dtype of x; statistics in float32 (float64 for float64).
    Raises:
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4; Srivastava et al., "Dropout", 2014, section 4.
    """
    arguments = prepare(x, residual, weight, bias, eps=eps, dropout_p=dropout_p)
    if _autograd.is_traced(arguments[0]):
        return _registered(*arguments, backend)[:2]
    module = select(OP, backend, arguments)
    if is_empty(x):
        module = _torch
    if _autograd.needs_grad(*arguments[:4]):
        return _AddLayerNorm.apply(module, *arguments)
    return module.forward(*arguments)[:2]


def prepare(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`: (x, residual, weight, bias, seed, eps, dropout_p)."""
    _checks.tensor(OP, "x", x)
    _checks.tensor(OP, "residual", residual)
    _checks.at_least_1d(OP, x)
    if _autograd.autocast_dtype(x) is not None:
        x, residual = _autograd.promoted(x, residual)
    if residual.shape != x.shape:
        raise ValueError(f"{OP}: residual must have the shape of x {tuple(x.shape)}; got {tuple(residual.shape)}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"{OP}: x and residual must have one dtype; got {x.dtype} and {residual.dtype}")
    _checks.row_parameter(OP, "weight", weight, x)
    if bias is not None:
        _checks.row_parameter(OP, "bias", bias, x)
    _checks.same_device(OP, x, residual=residual, weight=weight, bias=bias)
    _checks.positive(OP, "eps", eps)
    _checks.probability(OP, "dropout_p", dropout_p)
    _autograd.refuse_transforms(OP, x, residual, weight, bias)
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    bias = None if bias is None else bias.contiguous()
    return x.contiguous(), residual.contiguous(), weight.contiguous(), bias, seed, eps, float(dropout_p)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        dropout_p: float,
    ) -> tuple[Tensor, Tensor]:
        y, summed, mean, rstd = module.forward(x, residual, weight, bias, seed, eps, dropout_p)
        ctx.module, ctx.dropout_p, ctx.has_bias = module, dropout_p, bias is not None
        ctx.save_for_backward(summed, weight, mean, rstd, seed)
        ctx.set_materialize_grads(False)
        return y, summed

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None) -> Any:
        summed, weight, mean, rstd, seed = ctx.saved_tensors
        dy = torch.zeros_like(summed) if dy is None else dy.contiguous()
        dsummed = None if dsummed is None else dsummed.contiguous()
        dx, *grads = ctx.module.backward(dy, dsummed, summed, weight, mean, rstd, seed, ctx.dropout_p, ctx.has_bias)
        grads = _autograd.first_order_only(OP, (grads[0] if dx is None else dx, *grads))
        return None, *grads, None, None, None


def _run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    backend: str | None,
) -> tuple[Tensor, ...]:
    arguments = (x, residual, weight, bias, seed, eps, dropout_p)
    module = select(OP, backend, arguments)
    y, summed, mean, rstd = (_torch if is_empty(x) else module).forward(*arguments)
    return _autograd.unaliased(y, summed, mean.view(-1), rstd.view(-1))


def _run_backward(
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    has_bias: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    arguments = (summed, summed, weight, None, seed, 0.0, dropout_p)
    module = _torch if is_empty(summed) else select(OP, backend, arguments)
    dx, dresidual, dweight, dbias = module.backward(
        dy.contiguous(),
        None if dsummed is None else dsummed.contiguous(),
        summed,
        weight,
        mean,
        rstd,
        seed,
        dropout_p,
        has_bias,
    )
    dx, dbias = (weight.new_empty(0) if each is None else each for each in (dx, dbias))
    return _autograd.unaliased(dx, dresidual, dweight, dbias)


def _fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = x.new_empty((x.shape[:-1].numel(),), dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x), torch.empty_like(x), statistics, torch.empty_like(statistics)


def _fake_backward(
    dy: Tensor,
    dsummed: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    has_bias: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty_like(summed) if dropout_p > 0.0 else weight.new_empty(0)
    dbias = torch.empty_like(weight) if has_bias else weight.new_empty(0)
    return dx, torch.empty_like(summed), torch.empty_like(weight), dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, seed, _, ctx.dropout_p, ctx.backend = inputs
    _, summed, mean, rstd = output
    ctx.has_bias = bias is not None
    ctx.save_for_backward(summed, weight, mean, rstd, seed)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _registered_gradient(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Tensor | None) -> Any:
    summed, weight, mean, rstd, seed = ctx.saved_tensors
    dy = torch.zeros_like(summed) if dy is None else dy
    dx, dresidual, dweight, dbias = _registered_backward(
        dy, dsummed, summed, weight, mean, rstd, seed, ctx.dropout_p, ctx.has_bias, ctx.backend
    )
    dx = dx if ctx.dropout_p > 0.0 else dresidual
    return dx, dresidual, dweight, dbias if ctx.has_bias else None, None, None, None, None


_registered = _autograd.register(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, Tensor? seed, float eps, float dropout_p,"
    " str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_registered_backward = _autograd.register(
    "add_layer_norm_backward(Tensor dy, Tensor? dsummed, Tensor summed, Tensor weight, Tensor mean, Tensor rstd,"
    " Tensor? seed, float dropout_p, bool has_bias, str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.add_layer_norm import _torch  # noqa: E402
