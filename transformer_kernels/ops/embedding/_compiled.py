"""Embedding, positions, LayerNorm and dropout in csrc: cpu/rows/embedding.cpp, cuda/launchers/embedding.cu.

Both take csrc/calls/embedding.h.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import address, cpu, in_dtype_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult, _scatter


class Kernels(Compiled):
    """Embedding by the compiled kernels of one machine."""

    def __init__(self, call: EmbeddingCall) -> None:
        super().__init__(call)
        machine, weight, positions = self._machine, call.weight, call.positions
        self._rows, self._columns = call.tokens.numel(), weight.shape[1]
        self._dropout_p, self._eps, self._normalises = call.dropout_p, call.eps, call.norm_weight is not None
        self._sizes: dict[str, Any] = {
            "rows": self._rows,
            "columns": self._columns,
            "length": call.tokens.shape[1],
            "vocabulary": weight.shape[0],
            "position_count": 0 if positions is None else positions.shape[0],
            "scale": call.scale,
        }
        tokens, position_ids = machine.index(call.tokens), machine.index(call.position_ids)
        self._index_types = {
            "tokens_are_int64": tokens.dtype is torch.int64,
            "position_ids_are_int64": position_ids is not None and position_ids.dtype is torch.int64,
        }
        self._wide = self._are_float32(call.norm_weight, call.norm_bias)

    @cached_property
    def _forward(self) -> Any:
        return self._bind(
            "embedding_forward",
            dropout_p=self._dropout_p,
            **self._sizes,
            eps=self._eps,
            **self._index_types,
            weight_is_float32=self._wide[0],
            bias_is_float32=self._wide[1],
        )

    def forward(self, call: EmbeddingCall) -> EmbeddingResult:
        """y, and with LayerNorm per row the mean and 1 / sqrt(var + eps) in float32."""
        weight, machine = call.weight, self._machine
        y = weight.new_empty(*call.tokens.shape, self._columns)
        mean, rstd = None, None
        if call.norm_weight is not None:
            mean, rstd = weight.new_empty(2, self._rows, dtype=torch.float32).unbind()
        norm_bias = machine.parameter(call.norm_bias)
        self._forward(*self._gathered(call), norm_bias, call.seed, y, mean, rstd)
        return EmbeddingResult(y, mean, rstd)

    def _gathered(self, call: EmbeddingCall) -> tuple[Tensor | None, ...]:
        """The inputs of both kernels: the tables, the indices of their rows, and LayerNorm's weight."""
        machine = self._machine
        tokens, position_ids = machine.index(call.tokens), machine.index(call.position_ids)
        return call.weight, tokens, call.positions, position_ids, machine.parameter(call.norm_weight)

    def backward(
        self, call: EmbeddingCall, result: EmbeddingResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dweight, dpositions, dnorm_weight, dnorm_bias."""
        (ds,), dnorm_weight, dnorm_bias = grads, None, None
        if call.norm_weight is not None or call.seed is not None:
            ds, dnorm_weight, dnorm_bias = self._below_norm(call, result, ds, wanted)
        return (
            *self.table_gradients(call, ds, wanted),
            in_dtype_of(call.norm_weight, dnorm_weight),
            in_dtype_of(call.norm_bias, dnorm_bias),
        )

    @cached_property
    def _backward(self) -> Any:
        return self._bind(
            "embedding_backward",
            dropout_p=self._dropout_p,
            partial_rows=self._partials(torch.empty(0, device=self._device))[1],
            **self._sizes,
            **self._index_types,
            weight_is_float32=self._wide[0],
        )

    def _partials(self, like: Tensor) -> tuple[Tensor | None, int]:
        return self._machine.partials(like, self._rows, self._columns, 2) if self._normalises else (None, 0)

    def _below_norm(
        self, call: EmbeddingCall, result: EmbeddingResult, dy: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of the gathered sum (B, L, E) and of LayerNorm's parameters."""
        machine, norm_weight = self._machine, call.norm_weight
        ds, dnorm_weight, dnorm_bias = torch.empty_like(dy), None, None
        if norm_weight is not None:
            dnorm_weight = machine.sum_like(norm_weight, wanted[2])
            dnorm_bias = None if call.norm_bias is None else machine.sum_like(norm_weight, wanted[3])
        partials, _ = self._partials(call.weight)
        statistics = result.mean, result.rstd
        self._backward(dy, *self._gathered(call), *statistics, call.seed, ds, dnorm_weight, dnorm_bias, partials)
        return ds, dnorm_weight, dnorm_bias

    def table_gradients(self, call: EmbeddingCall, ds: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """dweight and dpositions, where they are wanted, from the gradient ds (B, L, E) of the gathered sum."""
        if self._machine is not cpu:  # on a GPU PyTorch's deterministic kernels
            return _scatter.table_gradients(call, ds, wanted)
        scatter_rows = cpu.load().scatter_rows
        code, positions = self._machine.DTYPE_CODES[ds.dtype], call.positions

        def scattered(ids: Tensor | None, table: Tensor, scale: float) -> Tensor:
            """scale times the sum of the rows of ds that have each id, in their order; ids None: their position."""
            total = torch.zeros_like(table, dtype=torch.float32)
            ids, columns = None if ids is None else ids.long(), ds.shape[-1]
            sizes = table.shape[0], ds.shape[1], ds.numel() // columns, columns
            scatter_rows(code, ds.data_ptr(), address(ids), total.data_ptr(), *sizes, scale)
            return total.to(table.dtype)

        dweight = scattered(call.tokens, call.weight, call.scale) if wanted[0] else None
        if positions is None or not wanted[1]:
            return dweight, None
        return dweight, scattered(call.position_ids, positions, 1.0)
