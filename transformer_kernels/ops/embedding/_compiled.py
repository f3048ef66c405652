"""Embedding, positions, LayerNorm and dropout in csrc: cpu/rows/embedding.cpp, cuda/launchers/embedding.cu.

Both take csrc/calls/embedding.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address, cpu, in_dtype_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.embedding import EmbeddingCall, EmbeddingResult, _scatter


class Kernels(Compiled):
    """Embedding by the compiled kernels of one machine."""

    def forward(self, call: EmbeddingCall) -> EmbeddingResult:
        """y, and with LayerNorm per row the mean and 1 / sqrt(var + eps) in float32."""
        weight, machine = call.weight, self._machine
        tokens, position_ids = machine.index(call.tokens), machine.index(call.position_ids)
        norm_weight, norm_bias = machine.parameter(call.norm_weight), machine.parameter(call.norm_bias)
        rows, columns = tokens.numel(), weight.shape[1]
        y = weight.new_empty(*tokens.shape, columns)
        mean, rstd = None, None
        if norm_weight is not None:
            mean, rstd = weight.new_empty(2, rows, dtype=torch.float32).unbind()
        device, stream = machine.stream_of(weight)
        machine.load().embedding_forward(
            dtype=machine.DTYPE_CODES[weight.dtype],
            weight=weight.data_ptr(),
            tokens=tokens.data_ptr(),
            positions=address(call.positions),
            position_ids=address(position_ids),
            norm_weight=address(norm_weight),
            norm_bias=address(norm_bias),
            seed=address(call.seed),
            dropout_p=call.dropout_p,
            y=y.data_ptr(),
            mean=address(mean),
            rstd=address(rstd),
            rows=rows,
            columns=columns,
            length=tokens.shape[1],
            vocabulary=weight.shape[0],
            position_count=0 if call.positions is None else call.positions.shape[0],
            scale=call.scale,
            eps=call.eps,
            tokens_are_int64=tokens.dtype is torch.int64,
            position_ids_are_int64=position_ids is not None and position_ids.dtype is torch.int64,
            weight_is_float32=norm_weight is not None and norm_weight.dtype is torch.float32,
            bias_is_float32=norm_bias is not None and norm_bias.dtype is torch.float32,
            device=device,
            stream=stream,
        )
        return EmbeddingResult(y, mean, rstd)

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

    def _below_norm(
        self, call: EmbeddingCall, result: EmbeddingResult, dy: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradient of the gathered sum (B, L, E), and those of LayerNorm's parameters."""
        weight, machine = call.weight, self._machine
        tokens, position_ids = machine.index(call.tokens), machine.index(call.position_ids)
        rows, columns = tokens.numel(), weight.shape[1]
        norm_weight = machine.parameter(call.norm_weight)
        ds, dnorm_weight, dnorm_bias = torch.empty_like(dy), None, None
        partials, partial_rows = None, 0
        if call.norm_weight is not None:
            partials, partial_rows = machine.partials(weight, rows, columns, 2)
            dnorm_weight = machine.sum_like(call.norm_weight, wanted[2])
            dnorm_bias = None if call.norm_bias is None else machine.sum_like(call.norm_weight, wanted[3])
        device, stream = machine.stream_of(weight)
        machine.load().embedding_backward(
            dtype=machine.DTYPE_CODES[weight.dtype],
            dy=dy.data_ptr(),
            weight=weight.data_ptr(),
            tokens=tokens.data_ptr(),
            positions=address(call.positions),
            position_ids=address(position_ids),
            norm_weight=address(norm_weight),
            mean=address(result.mean),
            rstd=address(result.rstd),
            seed=address(call.seed),
            dropout_p=call.dropout_p,
            ds=ds.data_ptr(),
            dnorm_weight=address(dnorm_weight),
            dnorm_bias=address(dnorm_bias),
            partials=address(partials),
            partial_rows=partial_rows,
            rows=rows,
            columns=columns,
            length=tokens.shape[1],
            vocabulary=weight.shape[0],
            position_count=0 if call.positions is None else call.positions.shape[0],
            scale=call.scale,
            tokens_are_int64=tokens.dtype is torch.int64,
            position_ids_are_int64=position_ids is not None and position_ids.dtype is torch.int64,
            weight_is_float32=norm_weight is not None and norm_weight.dtype is torch.float32,
            device=device,
            stream=stream,
        )
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
