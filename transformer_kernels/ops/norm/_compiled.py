"""Norms in C++: csrc/cpu/rows/norm.cpp and csrc/ops/norm.cu, which take csrc/calls/norm.h."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, address, in_dtype_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.norm import NormCall, NormResult, rows_of


class Kernels:
    """Forward and backward by the compiled kernels of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def forward(self, call: NormCall) -> NormResult:
        """y, the sum if there is one, and the statistics of each row in float32."""
        x, residual, machine = call.x, call.residual, self._machine
        columns = x.shape[-1]
        rows = x.numel() // columns
        y, summed = torch.empty_like(x), None if residual is None else torch.empty_like(x)
        mean = x.new_empty(rows, dtype=torch.float32) if call.centred else None
        rstd = x.new_empty(rows, dtype=torch.float32)
        weight, bias = machine.parameter(call.weight), machine.parameter(call.bias)
        device, stream = machine.stream_of(x)
        machine.load().norm_forward(
            dtype=machine.DTYPE_CODES[x.dtype],
            x=x.data_ptr(),
            residual=address(residual),
            weight=weight.data_ptr(),
            bias=address(bias),
            seed=address(call.seed),
            dropout_p=call.dropout_p,
            summed=address(summed),
            y=y.data_ptr(),
            mean=address(mean),
            rstd=rstd.data_ptr(),
            rows=rows,
            columns=columns,
            eps=call.eps,
            weight_is_float32=weight.dtype is torch.float32,
            bias_is_float32=bias is not None and bias.dtype is torch.float32,
            device=device,
            stream=stream,
        )
        return NormResult(y, summed, mean, rstd)

    def backward(
        self, call: NormCall, result: NormResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """dx (dresidual itself without dropout), dresidual, dweight, dbias.

        The sums over rows are float32 and in an order that depends on the shape and the device alone.
        """
        dy, *others = grads
        x, seed, mean, machine = rows_of(call, result), call.seed, result.mean, self._machine
        columns = x.shape[-1]
        rows = x.numel() // columns
        dx, dresidual = None if seed is None else torch.empty_like(x), torch.empty_like(x)
        dweight = machine.sum_like(call.weight, wanted[2])
        dbias = None if call.bias is None else machine.sum_like(call.weight, wanted[3])
        device, stream = machine.stream_of(x)
        partials, partial_rows = machine.partials(x, rows, columns, 1 if mean is None else 2)
        weight = machine.parameter(call.weight)
        machine.load().norm_backward(
            dtype=machine.DTYPE_CODES[x.dtype],
            dy=dy.data_ptr(),
            dsummed=address(others[0]) if others else 0,
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            mean=address(mean),
            rstd=result.rstd.data_ptr(),
            seed=address(seed),
            dropout_p=call.dropout_p,
            added=result.summed is not None,
            dx=address(dx),
            dresidual=dresidual.data_ptr(),
            dweight=address(dweight),
            dbias=address(dbias),
            partials=address(partials),
            partial_rows=partial_rows,
            rows=rows,
            columns=columns,
            weight_is_float32=weight.dtype is torch.float32,
            device=device,
            stream=stream,
        )
        return (
            dresidual if dx is None else dx,
            dresidual,
            in_dtype_of(call.weight, dweight),
            in_dtype_of(call.bias, dbias),
        )
