"""Norms in C++: csrc/cpu/rows/norm.cpp and csrc/ops/norm.cu, which take csrc/calls/norm.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import Machine, address, in_dtype_of
from transformer_kernels.ops._operation import Grads, Wanted
from transformer_kernels.ops.norm import NormCall, NormResult, rows_of


class Sizes(NamedTuple):
    """What the kernels take of a call's layout: the code of the dtype, the rows and columns, and two dtypes."""

    dtype: int
    rows: int
    columns: int
    weight_is_float32: bool
    bias_is_float32: bool


class Kernels:
    """Forward and backward by the compiled kernels of one machine, with `sizes` for calls of one layout."""

    def __init__(self, machine: Machine, sizes: Sizes | None = None) -> None:
        self._machine, self._sizes = machine, sizes

    def bound(self, call: NormCall) -> Kernels:
        """The kernels for calls of this layout."""
        return Kernels(self._machine, self._sizes_of(call.x, call))

    def _sizes_of(self, x: Tensor, call: NormCall) -> Sizes:
        columns, parameter = x.shape[-1], self._machine.parameter
        wide = [each is not None and parameter(each).dtype is torch.float32 for each in (call.weight, call.bias)]
        return Sizes(self._machine.DTYPE_CODES[x.dtype], x.numel() // columns, columns, *wide)

    def forward(self, call: NormCall) -> NormResult:
        """y, the sum if there is one, and the statistics of each row in float32."""
        x, residual, weight, bias, seed, eps, dropout_p, centred = call
        machine = self._machine
        dtype, rows, columns, weight_is_float32, bias_is_float32 = self._sizes or self._sizes_of(x, call)
        y, summed = torch.empty_like(x), None if residual is None else torch.empty_like(x)
        mean = x.new_empty(rows, dtype=torch.float32) if centred else None
        rstd = x.new_empty(rows, dtype=torch.float32)
        weight, bias = machine.parameter(weight), machine.parameter(bias)
        device, stream = machine.stream_of(x)
        machine.load().norm_forward(
            dtype=dtype,
            x=x.data_ptr(),
            residual=address(residual),
            weight=weight.data_ptr(),
            bias=address(bias),
            seed=address(seed),
            dropout_p=dropout_p,
            summed=address(summed),
            y=y.data_ptr(),
            mean=address(mean),
            rstd=rstd.data_ptr(),
            rows=rows,
            columns=columns,
            eps=eps,
            weight_is_float32=weight_is_float32,
            bias_is_float32=bias_is_float32,
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
        dtype, rows, columns, weight_is_float32, _ = self._sizes or self._sizes_of(x, call)
        dx, dresidual = None if seed is None else torch.empty_like(x), torch.empty_like(x)
        dweight = machine.sum_like(call.weight, wanted[2])
        dbias = None if call.bias is None else machine.sum_like(call.weight, wanted[3])
        device, stream = machine.stream_of(x)
        partials, partial_rows = machine.partials(x, rows, columns, 1 if mean is None else 2)
        weight = machine.parameter(call.weight)
        machine.load().norm_backward(
            dtype=dtype,
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
            weight_is_float32=weight_is_float32,
            device=device,
            stream=stream,
        )
        return (
            dresidual if dx is None else dx,
            dresidual,
            in_dtype_of(call.weight, dweight),
            in_dtype_of(call.bias, dbias),
        )
