"""Embedding, positions, LayerNorm and dropout in CUDA C++: csrc/ops/embedding_{forward,backward}.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address
from transformer_kernels.backends.cuda import DTYPE_CODES, load, partials, stream_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult
from transformer_kernels.ops.embedding._scatter import table_gradients


def _sizes(weight: Tensor, tokens: Tensor, positions: Tensor | None) -> tuple[int, ...]:
    """Rows, columns, the length of a sequence, and the rows of the two tables."""
    places = 0 if positions is None else positions.shape[0]
    return tokens.numel(), weight.shape[1], tokens.shape[1], weight.shape[0], places


def _id_types(tokens: Tensor, position_ids: Tensor | None) -> tuple[bool, bool]:
    return tokens.dtype is torch.int64, position_ids is not None and position_ids.dtype is torch.int64


def forward(call: EmbeddingCall) -> EmbeddingResult:
    """y, and with LayerNorm per row the mean and 1 / sqrt(var + eps) in float32."""
    weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p = call
    y = weight.new_empty((*tokens.shape, weight.shape[1]))
    mean, rstd = None, None
    if norm_weight is not None:
        mean, rstd = weight.new_empty((2, tokens.numel()), dtype=torch.float32).unbind()
    load().embedding_forward(
        weight.data_ptr(),
        tokens.data_ptr(),
        address(positions),
        address(position_ids),
        address(norm_weight),
        address(norm_bias),
        address(seed),
        y.data_ptr(),
        address(mean),
        address(rstd),
        *_sizes(weight, tokens, positions),
        scale,
        eps,
        dropout_p,
        *_id_types(tokens, position_ids),
        norm_weight is not None and norm_weight.dtype is torch.float32,
        norm_bias is not None and norm_bias.dtype is torch.float32,
        DTYPE_CODES[weight.dtype],
        *stream_of(weight),
    )
    return EmbeddingResult(y, mean, rstd)


def backward(call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """dweight, dpositions, dnorm_weight, dnorm_bias."""
    _, mean, rstd = result
    (dy,), (weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, _, dropout_p) = grads, call
    has_bias = norm_bias is not None
    if norm_weight is None:
        ds = dy if seed is None else _undropped(dy, seed, dropout_p)
        return *table_gradients(call, ds, wanted), None, None
    rows, columns, *_ = sizes = _sizes(weight, tokens, positions)
    device, stream = stream_of(weight)
    workspace, partial_rows = partials(weight, rows, columns, 2)
    ds, dnorm_weight = torch.empty_like(dy), torch.empty_like(norm_weight)
    dnorm_bias = torch.empty_like(norm_weight) if has_bias else None
    load().embedding_backward(
        dy.data_ptr(),
        weight.data_ptr(),
        tokens.data_ptr(),
        address(positions),
        address(position_ids),
        norm_weight.data_ptr(),
        address(mean),
        address(rstd),
        address(seed),
        ds.data_ptr(),
        dnorm_weight.data_ptr(),
        address(dnorm_bias),
        workspace.data_ptr(),
        partial_rows,
        *sizes,
        scale,
        dropout_p,
        *_id_types(tokens, position_ids),
        norm_weight.dtype is torch.float32,
        DTYPE_CODES[weight.dtype],
        device,
        stream,
    )
    return *table_gradients(call, ds, wanted), dnorm_weight, dnorm_bias


def _undropped(dy: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """The gradient of what dropout was given."""
    columns = dy.shape[-1]
    ds = torch.empty_like(dy)
    load().embedding_dropout_backward(
        dy.data_ptr(),
        seed.data_ptr(),
        ds.data_ptr(),
        dy.numel() // columns,
        columns,
        dropout_p,
        DTYPE_CODES[dy.dtype],
        *stream_of(dy),
    )
    return ds
