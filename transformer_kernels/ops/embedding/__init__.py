"""Token embedding, positions, LayerNorm and dropout in one pass: what stands below the first block of a transformer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels._dispatch import is_empty, select
from transformer_kernels._dropout import draw_seed
from transformer_kernels.ops.embedding._scatter import position_gradient, scattered

OP = "embedding"


def embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """dropout(layer_norm(s)) with s = scale * weight[token] + positions[place], in one pass over memory.

    Args:
        tokens: int64 or int32 (B, L), rows of weight.
        weight: (V, E), float32, float16, bfloat16 (float64 with backend="torch").
        positions: (P, E), in the dtype of weight, or None. Token l of a sequence stands at place l.
        norm_weight, norm_bias: (E,), in the dtype of weight or in float32. Without norm_weight there is no LayerNorm,
            and norm_bias may always be None.
        position_ids: int64 or int32 (B, L), the place of each token instead, or None.
        scale: multiplies the rows of weight, finite.
        eps: added to the variance, positive.
        dropout_p: probability in [0, 1] with which an element of the result is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed,
            b * L + l, column), the same in every backend; the seed is drawn from torch's generator.
        backend: "torch", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).
    Returns:
        (B, L, E) in the dtype of weight, also under autocast; computed in float32 (float64 for float64).
    Raises:
        IndexError: an id outside its table. On a GPU nobody looks: the row is NaN and nothing is read or written out of
            bounds; with backend="torch" PyTorch's own assertion stops the device.
        TypeError, ValueError, RuntimeError: bad arguments, the same in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Vaswani et al., "Attention Is All You Need", 2017, sections 3.4 and 5.4; Ba, Kiros, Hinton, "Layer Normalization",
    2016, equation 4.
    """
    arguments = prepare(
        tokens,
        weight,
        positions,
        norm_weight,
        norm_bias,
        position_ids=position_ids,
        scale=scale,
        eps=eps,
        dropout_p=dropout_p,
    )
    if _autograd.is_traced(arguments[0]):
        return _registered(*arguments, backend)[0]
    module = select(OP, backend, arguments)
    if is_empty(tokens, weight):
        module = _torch
    if _autograd.needs_grad(weight, positions, norm_weight, norm_bias):
        return _Embedding.apply(module, *arguments)
    return module.forward(*arguments)[0]


def prepare(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Any, ...]:
    """The checked arguments of a backend's `forward`, all contiguous.

    They are (weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p).
    """
    _check_table("weight", weight, "V", None)
    _checks.row_ids(OP, "tokens", tokens)
    if tokens.dim() != 2:
        raise ValueError(f"{OP}: tokens must have shape (batch, length); got {tuple(tokens.shape)}")
    _check_places(tokens, weight, positions, position_ids)
    _check_norm(weight, norm_weight, norm_bias)
    others = {"positions": positions, "norm_weight": norm_weight, "norm_bias": norm_bias, "position_ids": position_ids}
    _checks.same_device(OP, weight, tokens=tokens, **others)
    _checks.finite(OP, "scale", scale)
    _checks.positive(OP, "eps", eps)
    _checks.probability(OP, "dropout_p", dropout_p)
    _autograd.refuse_transforms(OP, weight, positions, norm_weight, norm_bias)
    if not _autograd.is_traced(weight):
        _checks.rows_in_range(OP, "tokens", tokens, weight.shape[0])
        if position_ids is not None and positions is not None:
            _checks.rows_in_range(OP, "position_ids", position_ids, positions.shape[0])
    seed = draw_seed(weight.device) if dropout_p > 0.0 else None
    tensors = (weight, tokens, positions, position_ids, norm_weight, norm_bias)
    contiguous = (None if tensor is None else tensor.contiguous() for tensor in tensors)
    return *contiguous, seed, float(scale), eps, float(dropout_p)


def _check_table(name: str, value: Any, rows: str, weight: Tensor | None) -> None:
    """A table (rows, E); of the width and dtype of `weight` where that is given."""
    _checks.tensor(OP, name, value)
    width = "E" if weight is None else weight.shape[1]
    if value.dim() != 2 or (weight is not None and value.shape[1] != width):
        raise ValueError(f"{OP}: {name} must have shape ({rows}, {width}); got {tuple(value.shape)}")
    if weight is not None and value.dtype is not weight.dtype:
        raise TypeError(f"{OP}: weight and {name} must have one dtype; got {weight.dtype} and {value.dtype}")


def _check_places(tokens: Tensor, weight: Tensor, positions: Tensor | None, position_ids: Tensor | None) -> None:
    if positions is None:
        if position_ids is not None:
            raise ValueError(f"{OP}: position_ids need positions; got None")
        return
    _check_table("positions", positions, "P", weight)
    if position_ids is None:
        if tokens.shape[1] > positions.shape[0]:
            raise ValueError(
                f"{OP}: positions must have a row for each token of a sequence; "
                f"got {positions.shape[0]} rows for {tokens.shape[1]} tokens"
            )
        return
    _checks.row_ids(OP, "position_ids", position_ids)
    if position_ids.shape != tokens.shape:
        raise ValueError(
            f"{OP}: position_ids must have the shape of tokens {tuple(tokens.shape)}; got {tuple(position_ids.shape)}"
        )


def _check_norm(weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> None:
    if norm_weight is None:
        if norm_bias is not None:
            raise ValueError(f"{OP}: norm_bias needs a norm_weight; got None")
        return
    _checks.row_parameter(OP, "norm_weight", norm_weight, weight)
    if norm_bias is not None:
        _checks.row_parameter(OP, "norm_bias", norm_bias, weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        weight: Tensor,
        tokens: Tensor,
        positions: Tensor | None,
        position_ids: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        seed: Tensor | None,
        scale: float,
        eps: float,
        dropout_p: float,
    ) -> Tensor:
        y, mean, rstd = module.forward(
            weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p
        )
        ctx.module, ctx.numbers = module, (scale, dropout_p, norm_bias is not None)
        ctx.save_for_backward(weight, tokens, positions, position_ids, norm_weight, mean, rstd, seed)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        _, wants_weight, _, wants_positions, *_ = ctx.needs_input_grad
        with torch.no_grad():  # also under create_graph: first_order_only answers for that
            wanted = {"wants_weight": wants_weight, "wants_positions": wants_positions}
            grads = _gradients(ctx.module, dy, *ctx.saved_tensors, *ctx.numbers, **wanted)
        dweight, dpositions, dnorm_weight, dnorm_bias = _autograd.first_order_only(OP, grads)
        return None, dweight, None, dpositions, None, dnorm_weight, dnorm_bias, None, None, None, None


def _gradients(
    module: ModuleType,
    dy: Tensor,
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    position_ids: Tensor | None,
    norm_weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    has_bias: bool,
    wants_weight: bool,
    wants_positions: bool,
) -> tuple[Tensor | None, ...]:
    """dweight, dpositions, dnorm_weight, dnorm_bias: ds by the backend, its sums over equal ids by PyTorch."""
    rows = (weight, tokens, positions, position_ids, norm_weight)
    ds, dnorm_weight, dnorm_bias = module.backward(dy.contiguous(), *rows, mean, rstd, seed, scale, dropout_p, has_bias)
    dweight = scattered(ds, tokens, weight.shape[0], scale) if wants_weight else None
    dpositions = None
    if positions is not None and wants_positions:
        dpositions = position_gradient(ds, position_ids, positions.shape[0])
    return dweight, dpositions, dnorm_weight, dnorm_bias


def _run(
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    position_ids: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    scale: float,
    eps: float,
    dropout_p: float,
    backend: str | None,
) -> tuple[Tensor, ...]:
    arguments = (weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p)
    module = select(OP, backend, arguments)
    y, mean, rstd = (_torch if is_empty(tokens, weight) else module).forward(*arguments)
    none = weight.new_empty(0, dtype=_statistics_dtype(weight))
    mean, rstd = (none.clone() if each is None else each.view(-1) for each in (mean, rstd))
    return _autograd.unaliased(y, mean, rstd)


def _run_backward(
    dy: Tensor,
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    position_ids: Tensor | None,
    norm_weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    has_bias: bool,
    wants_weight: bool,
    wants_positions: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    rows = (weight, tokens, positions, position_ids, norm_weight)
    module = _torch if is_empty(tokens, weight) else select(OP, backend, (*rows, None, seed, scale, 1.0, dropout_p))
    grads = _gradients(module, dy, *rows, mean, rstd, seed, scale, dropout_p, has_bias, wants_weight, wants_positions)
    return _autograd.unaliased(*(weight.new_empty(0) if each is None else each for each in grads))


def _statistics_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _fake(
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    position_ids: Tensor | None,
    norm_weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = 0 if norm_weight is None else tokens.numel()
    mean = weight.new_empty((rows,), dtype=_statistics_dtype(weight))
    return weight.new_empty((*tokens.shape, weight.shape[1])), mean, torch.empty_like(mean)


def _fake_backward(
    dy: Tensor,
    weight: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    position_ids: Tensor | None,
    norm_weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    has_bias: bool,
    wants_weight: bool,
    wants_positions: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    wanted = (
        weight if wants_weight else None,
        positions if wants_positions else None,
        norm_weight,
        norm_weight if has_bias else None,
    )
    return tuple(weight.new_empty(0) if each is None else torch.empty_like(each) for each in wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tables, norm_bias, seed, scale, _, dropout_p, ctx.backend = inputs
    _, mean, rstd = output
    ctx.numbers = (scale, dropout_p, norm_bias is not None)
    ctx.save_for_backward(*tables, mean, rstd, seed)
    ctx.mark_non_differentiable(mean, rstd)


def _registered_gradient(ctx: Any, dy: Tensor, *_: Tensor | None) -> Any:
    wanted = tuple(ctx.needs_input_grad[i] for i in (0, 2, 4, 5))
    grads = _registered_backward(dy, *ctx.saved_tensors, *ctx.numbers, *wanted[:2], ctx.backend)
    dweight, dpositions, dnorm_weight, dnorm_bias = (
        grad if want else None for grad, want in zip(grads, wanted, strict=True)
    )
    return dweight, None, dpositions, None, dnorm_weight, dnorm_bias, None, None, None, None, None


_registered = _autograd.register(
    "embedding(Tensor weight, Tensor tokens, Tensor? positions, Tensor? position_ids, Tensor? norm_weight,"
    " Tensor? norm_bias, Tensor? seed, float scale, float eps, float dropout_p, str? backend)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_registered_backward = _autograd.register(
    "embedding_backward(Tensor dy, Tensor weight, Tensor tokens, Tensor? positions, Tensor? position_ids,"
    " Tensor? norm_weight, Tensor mean, Tensor rstd, Tensor? seed, float scale, float dropout_p, bool has_bias,"
    " bool wants_weight, bool wants_positions, str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_autograd.register_backward(OP, _setup_context, _registered_gradient)

from transformer_kernels.ops.embedding import _torch  # noqa: E402
