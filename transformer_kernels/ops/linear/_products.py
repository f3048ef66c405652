"""The products of a linear layer as PyTorch computes them, by MKL and oneDNN on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops import _kernels
from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops.activation import APPROXIMATIONS, activated, bias_gelu
from transformer_kernels.ops.linear import LinearCall, LinearResult

ROWS_WORTH_TRANSPOSING = 2048
"""Rows of x from which the faster product of a weight's gradient pays for a copy of its result."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def product(call: LinearCall, bias: Tensor | None = None) -> Tensor:
    """x W^T, and plus a bias."""
    dtype = call.x.dtype
    return torch.nn.functional.linear(call.x, call.weight.to(dtype), None if bias is None else bias.to(dtype))


def unactivated(call: LinearCall) -> LinearResult:
    """y of a layer without an activation."""
    return LinearResult(product(call, call.bias), None)


def gradients(call: LinearCall, dz: Tensor, wanted: Wanted) -> Gradients:
    """dx, dweight and dbias from the gradient of the sums before the activation."""
    x, weight, bias, _ = call
    rows = dz.reshape(-1, weight.shape[0])
    dx = torch.mm(rows, weight.to(dz.dtype)).view(x.shape) if wanted[0] else None
    dweight = _weight_gradient(rows, x.reshape(-1, weight.shape[1]), weight) if wanted[1] else None
    if bias is None or not wanted[2]:
        return dx, dweight, None
    return dx, dweight, rows.sum(dim=0, dtype=torch.promote_types(dz.dtype, torch.float32)).to(bias.dtype)


def _weight_gradient(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dz^T x. Where that is tall and narrow its transpose is the faster product on a CPU, 1.03 to 1.26 times."""
    M, (N, K) = len(dz), weight.shape
    if dz.device.type == "cpu" and N > K and M >= ROWS_WORTH_TRANSPOSING:
        return torch.empty_like(weight).copy_(torch.mm(x.t(), dz).t())
    return torch.mm(dz.t(), x).to(weight.dtype)


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
