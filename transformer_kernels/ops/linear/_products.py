"""The products of a linear layer as PyTorch computes them, by MKL and oneDNN on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels._autograd import Wanted
from transformer_kernels.ops.linear import LinearCall, LinearResult, eager


def product(call: LinearCall) -> LinearResult:
    """y and what its gradient needs."""
    y, before = eager(call)
    if call.activation is None:
        return LinearResult(y, y.new_empty(0))
    return LinearResult(y, y if call.activation == "relu" else before)


def gradients(call: LinearCall, dz: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """dx, dweight and dbias from the gradient of the sums before the activation."""
    x, weight, bias, _ = call
    rows = dz.reshape(-1, weight.shape[0])
    dx = torch.mm(rows, weight.to(dz.dtype)).view(x.shape) if wanted[0] else None
    dweight = torch.mm(rows.t(), x.reshape(-1, weight.shape[1])).to(weight.dtype) if wanted[1] else None
    if bias is None or not wanted[2]:
        return dx, dweight, None
    return dx, dweight, rows.sum(dim=0, dtype=torch.promote_types(dz.dtype, torch.float32)).to(bias.dtype)
