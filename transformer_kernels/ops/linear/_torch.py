"""A linear layer through PyTorch's own product and activation."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.activation import APPROXIMATIONS, activated, bias_gelu
from transformer_kernels.ops.linear import LinearCall, LinearResult
from transformer_kernels.ops.linear._products import gradients, product, unactivated


class Kernels(_kernels.Kernels):
    """A linear layer through PyTorch's own product and activation."""

    def composed(self, call: LinearCall, backend: str | None, recorded: bool) -> Tensor:
        """PyTorch's product, and a backend's kernel for GELU.

        Before ReLU the bias is added in the product: rounded without it, sums near 0 would get the wrong sign.
        """
        x, weight, bias, activation = call
        if bias is None or activation in (None, "relu"):
            before = torch.nn.functional.linear(x, weight, bias)
            return before.relu_() if activation == "relu" and not recorded else activated(before, activation)
        before = torch.nn.functional.linear(x, weight)
        return bias_gelu(before, bias, approximate=APPROXIMATIONS[activation], backend=backend)

    def forward(self, call: LinearCall) -> LinearResult:
        """y, and y or the sums before the activation for the gradient."""
        if call.activation is None:
            return unactivated(call)
        before = product(call, call.bias)
        y = before.relu_() if call.activation == "relu" else activated(before, call.activation)
        return LinearResult(y, before)

    def backward(
        self, call: LinearCall, result: LinearResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor | None, ...]:
        """dx, dweight and dbias, the last one's sum over the rows in float32."""
        (dy,) = grads
        if call.activation == "relu":
            dy = torch.ops.aten.threshold_backward.default(dy, result.saved, 0)
        elif call.activation is not None:
            approximate = APPROXIMATIONS[call.activation]
            dy = torch.ops.aten.gelu_backward.default(dy, result.saved, approximate=approximate)
        return gradients(call, dy, wanted)
