"""Activations in csrc: cpu/rows/activation.cpp and cuda/launchers/activation.cu, which take calls/activation.h."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import in_dtype_of
from transformer_kernels.ops._kernels import Compiled, Grads, Wanted
from transformer_kernels.ops.activation import ActivationCall

KINDS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}


class Kernels(Compiled):
    """Activations by the compiled kernels of one machine."""

    def __init__(self, call: ActivationCall) -> None:
        super().__init__(call)
        x, bias, up, kind, gated = call
        width = x.shape[-1] if x.dim() else 1
        self._rows, self._columns = x.numel() // width, width // 2 if gated and up is None else width
        self._kind: dict[str, Any] = {"kind": KINDS[kind], "gated": gated}
        (self._bias_is_float32,) = self._are_float32(bias)

    @cached_property
    def _forward(self) -> Any:
        sizes = {"rows": self._rows, "columns": self._columns}
        return self._bind("activation_forward", **self._kind, **sizes, bias_is_float32=self._bias_is_float32)

    def forward(self, call: ActivationCall) -> Tensor:
        """f(x + bias), the sum in float32, or f(gate) * up."""
        y = call.fake()
        self.run(call, y)
        return y

    def run(self, call: ActivationCall, y: Tensor) -> None:
        """`forward` into y, which may be x."""
        self._forward(call.x, self._machine.parameter(call.bias), call.up, y)

    def _partials(self, like: Tensor) -> tuple[Tensor | None, int]:
        return self._machine.partials(like, self._rows, self._columns, 1, by_columns=True)

    @cached_property
    def _backward(self) -> Any:
        return self._bind(
            "activation_backward",
            **self._kind,
            partial_rows=self._partials(torch.empty(0, device=self._device))[1],
            rows=self._rows,
            columns=self._columns,
            bias_is_float32=self._bias_is_float32,
        )

    def backward(
        self, call: ActivationCall, result: Tensor | None, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx, dbias and dup; of a packed projection dx has both gradients.

        The slope is taken from the result where there is one: y of ReLU, else a sum that includes the bias. The sum
        over rows is float32 and in an order that depends on the shape and the device alone.
        """
        (dy,), saved = grads, call.x if result is None else result
        dx, dup = torch.empty_like(saved), None if call.up is None else torch.empty_like(call.up)
        dbias = None if call.bias is None else self._machine.sum_like(call.bias, wanted[1])
        partials = None if dbias is None else self._partials(dy)[0]
        bias = None if result is not None else self._machine.parameter(call.bias)
        self._backward(dy, saved, bias, call.up, dx, dbias, dup, partials)
        return dx, in_dtype_of(call.bias, dbias), dup
