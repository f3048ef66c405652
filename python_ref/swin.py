"""Swin's attention: within windows of a grid, shifted by half a window in every other layer."""

from typing import Any

import torch
from torch import Tensor

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Attention, Layer
from python_ref.windows import shifted_windows


class WindowAttention(Layer):
    """Attention within the (shifted) windows of a grid of tokens, (B, height, width, E) -> the same.

    All windows of all images form one packed batch. Swin's relative position bias is not implemented.
    """

    def __init__(self, config: TransformerConfig, ops: Any = reference_ops, *, size: int, shift: int = 0) -> None:
        super().__init__(ops)
        self.size, self.shift = size, shift
        self.attention = Attention(config, ops)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        order, edges = shifted_windows(height, width, self.size, self.shift, device=x.device)
        first = torch.arange(batch, device=x.device)[:, None] * (height * width)
        rows = (first + order).flatten()  # (B * height * width,)
        cu_seqlens = torch.cat(((first + edges[:-1]).flatten(), first.new_tensor([len(rows)]))).int()
        tokens = x.flatten(0, 2)
        mixed = self.attention(tokens[rows].unsqueeze(0), causal=False, key_padding_mask=None, cu_seqlens=cu_seqlens)
        return torch.empty_like(tokens).index_copy(0, rows, mixed[0]).view_as(x)
