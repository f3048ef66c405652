"""Norms in csrc: cpu/rows/norm.cpp and cuda/launchers/norm.cu, which take calls/norm.h."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import contiguous_memory, cpu, in_dtype_of, memory_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.norm import NormCall, NormResult, rows_of


class Kernels(Compiled):
    """Norms by the compiled kernels of one machine."""

    def __init__(self, call: NormCall) -> None:
        super().__init__(call)
        machine = self.machine
        x, residual, weight, bias, _, self._eps, self._dropout_p, self._centred = call
        self._added, self._columns = residual is not None, x.shape[-1]
        self._rows = x.numel() // self._columns
        self._like_x, self._per_row = memory_of(x), contiguous_memory((self._rows,))
        self._statistics = contiguous_memory((2, self._rows))
        sums = machine.sum_like(weight, True)
        assert sums is not None
        self._sum, self._every = memory_of(sums), machine.sum_like(weight, False) is not None
        self._wide = self._are_float32(weight, bias)

    @cached_property
    def _forward(self) -> Any:
        return self._bind(
            "norm_forward",
            dropout_p=self._dropout_p,
            narrow=0,
            x_is_bfloat16=False,
            rows=self._rows,
            columns=self._columns,
            eps=self._eps,
            weight_is_float32=self._wide[0],
            bias_is_float32=self._wide[1],
        )

    def forward(self, call: NormCall) -> NormResult:
        """y, the sum if there is one, and the statistics of each row in float32."""
        x, residual, weight, bias, seed, _, _, centred = call
        machine = self._machine
        empty = machine.allocator(self._device)
        y, summed = empty(*self._like_x), None if residual is None else empty(*self._like_x)
        mean, rstd = empty(*self._per_row) if centred else None, empty(*self._per_row)
        weight, bias = machine.parameter(weight), machine.parameter(bias)
        self._forward(x, residual, weight, bias, seed, summed, y, mean, rstd)
        return NormResult(y, summed, mean, rstd)

    def forward_recorded(self, call: NormCall) -> NormResult:
        """`forward` of x alone; mean and rstd are one tensor (2, M), for backward only."""
        if not self._centred:
            return self.forward(call)
        machine = self._machine
        empty = machine.allocator(self._device)
        y, statistics = empty(*self._like_x), empty(*self._statistics)
        weight, bias = machine.parameter(call.weight), machine.parameter(call.bias)
        self._forward(call.x, None, weight, bias, None, None, y, *self._rows_of(statistics))
        return NormResult(y, None, statistics, None)  # type: ignore[arg-type]

    def _rows_of(self, statistics: Tensor) -> tuple[int, int]:
        """The addresses of mean and rstd."""
        mean = statistics.data_ptr()
        return mean, mean + 4 * self._rows

    @cached_property
    def _backward(self) -> Any:
        like = torch.empty(0, device=self._device)
        return self._bind(
            "norm_backward",
            dropout_p=self._dropout_p,
            added=self._added,
            residual=0,
            narrow=0,
            dy_is_bfloat16=False,
            partial_rows=self._partials(like)[1],
            rows=self._rows,
            columns=self._columns,
            weight_is_float32=self._wide[0],
        )

    def _partials(self, like: Tensor) -> tuple[Tensor | None, int]:
        return self._machine.partials(like, self._rows, self._columns, 2 if self._centred else 1)

    def backward(
        self, call: NormCall, result: NormResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """dx (dresidual itself without dropout), dresidual, dweight, dbias.

        The sums over rows are float32 and in an order that depends on the shape and the device alone.
        """
        dy, *others = grads
        x, weight, bias, seed, machine = rows_of(call, result), call.weight, call.bias, call.seed, self._machine
        empty = machine.allocator(self._device)
        dx, dresidual = None if seed is None else empty(*self._like_x), empty(*self._like_x)
        dweight = empty(*self._sum) if wanted[2] or self._every else None
        dbias = empty(*self._sum) if bias is not None and (wanted[3] or self._every) else None
        statistics = (result.mean, result.rstd) if result.rstd is not None else self._rows_of(result.mean)
        self._backward(
            dy, others[0] if others else None, x, machine.parameter(weight), *statistics, seed,
            dx, dresidual, dweight, dbias, None if machine is cpu else self._partials(x)[0],
        )  # fmt: skip
        return dresidual if dx is None else dx, dresidual, in_dtype_of(weight, dweight), in_dtype_of(bias, dbias)
