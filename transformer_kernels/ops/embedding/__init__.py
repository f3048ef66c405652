"""Token embedding, positions, LayerNorm and dropout in one pass: the input of the first block of a transformer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops import _checks, _operation
from transformer_kernels.ops._derivatives import Parts, contiguous
from transformer_kernels.ops._dropout import draw_seed, dropped_rows
from transformer_kernels.ops._kernels import Kernels, record
from transformer_kernels.ops.norm import normed

OP = "embedding"


@record
class EmbeddingCall(NamedTuple):
    """All tensors are contiguous; the seed is None without dropout."""

    weight: Tensor
    tokens: Tensor
    positions: Tensor | None
    position_ids: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    seed: Tensor | None
    scale: float
    eps: float
    dropout_p: float

    def fake(self) -> EmbeddingResult:
        weight, tokens = self.weight, self.tokens
        y = weight.new_empty((*tokens.shape, weight.shape[1]))
        if self.norm_weight is None:
            return EmbeddingResult(y, None, None)
        mean = weight.new_empty((tokens.numel(),), dtype=torch.promote_types(weight.dtype, torch.float32))
        return EmbeddingResult(y, mean, torch.empty_like(mean))

    def in_pytorch(self, outputs: int) -> tuple[Tensor]:
        embedded = torch.nn.functional.embedding
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        y = embedded(self.tokens, self.weight).to(wide) * self.scale
        if self.positions is not None:
            y = y + (
                self.positions[: self.tokens.shape[1]]
                if self.position_ids is None
                else embedded(self.position_ids, self.positions)
            )
        if self.norm_weight is not None:
            y = normed(y, self.norm_weight, self.norm_bias, self.eps, True)
        y = y.to(self.weight.dtype)
        return (y if self.seed is None else dropped_rows(y, self.seed, self.dropout_p),)

    def has_tangents(self, given: Parts) -> bool:
        """Of all tables, whose rows are added up."""
        return self.norm_weight is None and given[0] is not None and (self.positions is None or given[1] is not None)

    def tangents(self, kernels: Kernels, result: EmbeddingResult, given: Parts) -> tuple[Tensor]:
        """The rows of the tables' tangents."""
        positions = None if given[1] is None else contiguous(given[1])
        moved: EmbeddingResult = kernels.forward(self._replace(weight=contiguous(given[0]), positions=positions))
        return (moved.y,)

    def is_empty(self) -> bool:
        return not (self.weight.numel() and self.tokens.numel())

    def check_when_run(self) -> None:
        """All ids are rows of their tables."""
        _check_rows(self.tokens, self.weight, self.positions, self.position_ids)


class EmbeddingResult(NamedTuple):
    """y, and with LayerNorm per row (M,) the mean and 1 / sqrt(var + eps) in float32 (float64 for float64)."""

    y: Tensor
    mean: Tensor | None
    rstd: Tensor | None


@_checks.spelled_unlike_torch("F.embedding(tokens, weight, padding_idx)", "embedding(tokens, weight)")
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
    """dropout(layer_norm(s)) with s = scale * weight[token] + positions[position], in one pass over memory.

    Args:
        tokens: int64 or int32 (B, L), rows of weight.
        weight: (V, E), float32, float16, bfloat16 (float64 with backend="torch").
        positions: (P, E), in the dtype of weight, or None. Token l of a sequence has position l.
        norm_weight: (E,), in the dtype of weight or in float32; None for no LayerNorm.
        norm_bias: as norm_weight, or None.
        position_ids: int64 or int32 (B, L), the position of each token, or None.
        scale: multiplies the rows of weight, finite.
        eps: added to the variance, positive.
        dropout_p: probability in [0, 1] with which an element of the result is dropped; the others are multiplied by
            1 / (1 - dropout_p), with dropout_p rounded to a multiple of 2^-16. The mask is philox4x32-7 of (seed,
            b * L + l, column), the same in every backend; the seed is drawn from torch's generator.
        backend: "torch", "cpu", "triton", "cuda" or "auto"; None takes the default (see `set_backend`).

    Returns:
        (B, L, E) in the dtype of weight, also under autocast; computed in float32 (float64 for float64).

    Raises:
        IndexError: an id outside its table. Not validated on a GPU: there such an id gives a row of NaN, and nothing is
            read or written out of bounds; with backend="torch" PyTorch's own assertion stops the device.
        TypeError, ValueError, RuntimeError: invalid arguments, with the same message in every backend.
        BackendUnavailable, UnsupportedByBackend: the named backend cannot run here, or not this call.

    Examples:
        >>> tokens, weight, positions = torch.randint(65, (2, 128)), torch.randn(65, 64), torch.randn(256, 64)
        >>> embedding(tokens, weight, positions, torch.ones(64), torch.zeros(64), dropout_p=0.1).shape
        torch.Size([2, 128, 64])

    Vaswani et al., "Attention Is All You Need", 2017, sections 3.4 and 5.4; Ba, Kiros, Hinton, "Layer Normalization",
    2016, equation 4.
    """
    return OPERATION.run(
        backend,
        tokens,
        weight,
        positions,
        norm_weight,
        norm_bias,
        position_ids,
        scale,
        eps,
        dropout_p,
    )


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
) -> EmbeddingCall:
    """The checked arguments."""
    _check_table("weight", weight, "V", None)
    _checks.row_ids(OP, "tokens", tokens)
    if tokens.dim() != 2:
        raise ValueError(f"{OP}: tokens must have shape (batch, length); got {tuple(tokens.shape)}")
    _check_positions(tokens, weight, positions, position_ids)
    _check_norm(weight, norm_weight, norm_bias)
    others = {"positions": positions, "norm_weight": norm_weight, "norm_bias": norm_bias, "position_ids": position_ids}
    _checks.same_device(OP, weight, tokens=tokens, **others)
    _checks.finite(OP, "scale", scale)
    _checks.positive(OP, "eps", eps)
    _checks.probability(OP, "dropout_p", dropout_p)
    if _operation.reads_values(weight):
        _check_rows(tokens, weight, positions, position_ids)
    seed = draw_seed(weight.device) if dropout_p > 0.0 else None
    return EmbeddingCall(
        weight.contiguous(),
        tokens.contiguous(),
        _contiguous(positions),
        _contiguous(position_ids),
        _contiguous(norm_weight),
        _contiguous(norm_bias),
        seed,
        0.0 + float(scale),  # of -0.0, which equals 0.0 in the layout of a call
        eps,
        float(dropout_p),
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _check_table(name: str, value: Any, rows: str, weight: Tensor | None) -> None:
    """A table (rows, E); of the width and dtype of `weight` where that is given."""
    _checks.tensor(OP, name, value)
    width = "E" if weight is None else weight.shape[1]
    if value.dim() != 2 or (weight is not None and value.shape[1] != width):
        raise ValueError(f"{OP}: {name} must have shape ({rows}, {width}); got {tuple(value.shape)}")
    if weight is not None and value.dtype is not weight.dtype:
        raise TypeError(f"{OP}: weight and {name} must have one dtype; got {weight.dtype} and {value.dtype}")


def _check_positions(tokens: Tensor, weight: Tensor, positions: Tensor | None, position_ids: Tensor | None) -> None:
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


def _check_rows(tokens: Tensor, weight: Tensor, positions: Tensor | None, position_ids: Tensor | None) -> None:
    """The deferred check of a traced call, in which ids have no values before it runs."""
    _checks.rows_in_range(OP, "tokens", tokens, weight.shape[0])
    if position_ids is not None and positions is not None:
        _checks.rows_in_range(OP, "position_ids", position_ids, positions.shape[0])


def _check_norm(weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> None:
    if norm_weight is None:
        if norm_bias is not None:
            raise ValueError(f"{OP}: norm_bias needs a norm_weight; got None")
        return
    _checks.row_parameter(OP, "norm_weight", norm_weight, weight)
    if norm_bias is not None:
        _checks.row_parameter(OP, "norm_bias", norm_bias, weight)


OPERATION = _operation.Operation(
    OP,
    EmbeddingCall,
    prepare,
    result=EmbeddingResult,
    differentiable=("weight", "positions", "norm_weight", "norm_bias"),
    kept=("mean", "rstd"),
)
