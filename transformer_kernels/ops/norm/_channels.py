"""LayerNorm over the channels of images (B, C, ...), whose rows are not contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.ops.norm import layer_norm


def channel_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, native: bool, backend: str | None = None
) -> Tensor:
    """LayerNorm over the second axis.

    Args:
        x: (B, C, ...).
        weight, bias: C elements, or None.
        eps: added to the variance.
        native: PyTorch's function is the faster one.
        backend: as in `layer_norm`.

    Returns:
        the shape, dtype and strides of x.
    """
    rows = x.movedim(1, -1)
    gain = x.new_ones(x.shape[1]) if weight is None else weight.flatten()
    shift = None if bias is None else bias.flatten()
    if native:
        y = torch.layer_norm(rows, gain.shape, gain, shift, eps)
    else:
        y = layer_norm(rows, gain, shift, eps=eps, backend=backend)
    y = y.movedim(-1, 1)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)
