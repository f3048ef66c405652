"""Embedding, positions, LayerNorm and dropout in C++ for the CPU: csrc/cpu/rows/embedding.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address
from transformer_kernels.backends.cpu import DTYPE_CODES, load, parameter
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult


def forward(call: EmbeddingCall) -> EmbeddingResult:
    """y, and with LayerNorm per row the mean and 1 / sqrt(var + eps) in float32."""
    weight, tokens, positions, position_ids, norm_weight, norm_bias, seed, scale, eps, dropout_p = call
    y = weight.new_empty((*tokens.shape, weight.shape[1]))
    mean, rstd = None, None
    if norm_weight is not None:
        mean, rstd = weight.new_empty((2, tokens.numel()), dtype=torch.float32).unbind()
    rows, places = tokens.long(), _long(position_ids)
    wide_weight, wide_bias = parameter(norm_weight), parameter(norm_bias)
    load().embedding_forward(
        DTYPE_CODES[weight.dtype],
        weight.data_ptr(),
        rows.data_ptr(),
        address(positions),
        address(places),
        address(wide_weight),
        address(wide_bias),
        address(seed),
        dropout_p,
        y.data_ptr(),
        address(mean),
        address(rstd),
        *_sizes(call),
        scale,
        eps,
    )
    return EmbeddingResult(y, mean, rstd)


def backward(call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """dweight, dpositions, dnorm_weight, dnorm_bias."""
    ds, *sums = _below_norm(call, result, grads[0], wanted)
    parameters = (call.norm_weight, call.norm_bias)
    norms = (None if x is None or own is None else x.to(own.dtype) for x, own in zip(sums, parameters, strict=True))
    return *table_gradients(call, ds, wanted), *norms


def table_gradients(call: EmbeddingCall, ds: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    """dweight and dpositions, where they are wanted, from the gradient ds (B, L, E) of the gathered sum."""
    dweight = _scattered(ds, call.tokens.long(), call.weight, call.scale) if wanted[0] else None
    if call.positions is None or not wanted[1]:
        return dweight, None
    return dweight, _scattered(ds, _long(call.position_ids), call.positions, 1.0)


def _sizes(call: EmbeddingCall) -> tuple[int, ...]:
    """The length of a sequence, rows, columns, and the rows of the two tables."""
    places = 0 if call.positions is None else call.positions.shape[0]
    return call.tokens.shape[1], call.tokens.numel(), call.weight.shape[1], call.weight.shape[0], places


def _long(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.long()


def _below_norm(
    call: EmbeddingCall, result: EmbeddingResult, dy: Tensor, wanted: Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of the gathered sum (B, L, E), and those of LayerNorm's parameters in float32."""
    weight, tokens, positions, position_ids, norm_weight, _, seed, scale, _, dropout_p = call
    if norm_weight is None and seed is None:
        return dy, None, None
    ds, columns = torch.empty_like(dy), weight.shape[1]
    rows, places = tokens.long(), _long(position_ids)
    sums = weight.new_empty((2, columns), dtype=torch.float32)
    dnorm_weight, dnorm_bias = (sums[i] if wanted[i + 2] else None for i in range(2))
    wide_weight = parameter(norm_weight)
    load().embedding_backward(
        DTYPE_CODES[weight.dtype],
        dy.data_ptr(),
        weight.data_ptr(),
        rows.data_ptr(),
        address(positions),
        address(places),
        address(wide_weight),
        address(result.mean),
        address(result.rstd),
        address(seed),
        dropout_p,
        ds.data_ptr(),
        address(dnorm_weight),
        address(dnorm_bias),
        *_sizes(call),
        scale,
    )
    return ds, dnorm_weight, dnorm_bias


def _scattered(ds: Tensor, ids: Tensor | None, table: Tensor, scale: float) -> Tensor:
    """scale times the sum of the rows of ds (B, L, E) that have each id, in their order; ids None: their place."""
    total = torch.zeros_like(table, dtype=torch.float32)
    columns = ds.shape[-1]
    load().scatter_rows(
        DTYPE_CODES[ds.dtype],
        ds.data_ptr(),
        address(ids),
        total.data_ptr(),
        table.shape[0],
        ds.shape[1],
        ds.numel() // columns,
        columns,
        scale,
    )
    return total.to(table.dtype)
