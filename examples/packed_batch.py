"""Sequences of different lengths without padding: one row of tokens, and the offset of each sequence."""

import torch

import transformer_kernels as tk

lengths = [7, 64, 23, 41]
heads, width = 4, 32
starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

# Packed: (1, tokens, 3 * heads, width), as a linear layer over all tokens would give it.
qkv = torch.randn(1, sum(lengths), 3 * heads, width)
packed = tk.packed_attention(qkv, heads=heads, causal=True, cu_seqlens=starts)

# The same sequences padded to the longest one.
padded_qkv = torch.zeros(len(lengths), max(lengths), 3 * heads, width)
real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
padded_qkv[real] = qkv[0]
padded = tk.packed_attention(padded_qkv, heads=heads, causal=True, key_padding_mask=real)

print(f"{sum(lengths)} tokens packed, {real.numel()} padded")
print(f"largest difference: {(packed[0] - padded[real]).abs().max():.1e}")
torch.testing.assert_close(packed[0], padded[real])
