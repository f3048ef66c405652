"""Activations in csrc: cpu/rows/activation.cpp and cuda/launchers/activation.cu, which take calls/activation.h."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import address, in_dtype_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.activation import ActivationCall

KINDS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}


class Kernels(Compiled):
    """Activations by the compiled kernels of one machine."""

    def forward(self, call: ActivationCall) -> Tensor:
        """f(x + bias), the sum in float32, or f(gate) * up."""
        y = call.fake()
        self.run(call, y)
        return y

    def run(self, call: ActivationCall, y: Tensor) -> None:
        """`forward` into y, which may be x."""
        x, machine = call.x, self._machine
        columns = y.shape[-1] if y.dim() else 1
        bias = machine.parameter(call.bias)
        device, stream = machine.stream_of(x)
        machine.load().activation_forward(
            dtype=machine.DTYPE_CODES[x.dtype],
            kind=KINDS[call.kind],
            gated=call.gated,
            x=x.data_ptr(),
            bias=address(bias),
            up=address(call.up),
            y=y.data_ptr(),
            rows=y.numel() // columns,
            columns=columns,
            bias_is_float32=bias is not None and bias.dtype is torch.float32,
            device=device,
            stream=stream,
        )

    def backward(
        self, call: ActivationCall, result: Tensor | None, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx, dbias and dup; of a packed projection dx has both gradients.

        The slope is taken from the result where there is one: y of ReLU, else a sum that includes the bias. The sum
        over rows is float32 and in an order that depends on the shape and the device alone.
        """
        (dy,), saved, machine = grads, call.x if result is None else result, self._machine
        columns = dy.shape[-1] if dy.dim() else 1
        rows = dy.numel() // columns
        dx, dup = torch.empty_like(saved), None if call.up is None else torch.empty_like(call.up)
        dbias = partials = None
        partial_rows = 0
        if call.bias is not None and (dbias := machine.sum_like(call.bias, wanted[1])) is not None:
            partials, partial_rows = machine.partials(dy, rows, columns, 1, by_columns=True)
        bias = None if result is not None else machine.parameter(call.bias)
        device, stream = machine.stream_of(dy)
        machine.load().activation_backward(
            dtype=machine.DTYPE_CODES[dy.dtype],
            kind=KINDS[call.kind],
            gated=call.gated,
            dy=dy.data_ptr(),
            x=saved.data_ptr(),
            bias=address(bias),
            up=address(call.up),
            dx=dx.data_ptr(),
            dbias=address(dbias),
            dup=address(dup),
            partials=address(partials),
            partial_rows=partial_rows,
            rows=rows,
            columns=columns,
            bias_is_float32=dbias is not None and dbias.dtype is torch.float32,
            device=device,
            stream=stream,
        )
        return dx, in_dtype_of(call.bias, dbias), dup
