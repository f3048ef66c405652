"""A model that takes its operations as an object: the reference, and the same class on kernels.

The models of `python_ref` are written this way. `python_ref.ops` is plain tensor algebra; `tk.bind(...)` provides the
same names and signatures, run by a backend.
"""

import torch
from torch import nn

import transformer_kernels as tk
from python_ref import ops as reference


class Classifier(nn.Module):
    """Embedding, one attention layer over the real tokens, and a linear classifier of their mean."""

    def __init__(self, ops, vocabulary: int = 100, width: int = 32, heads: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.ops, self.heads = ops, heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)  # (B, L, E)
        qkv = self.qkv(x).unflatten(2, (3 * self.heads, -1))  # (B, L, 3 H, D)
        mixed = self.ops.packed_attention(qkv, heads=self.heads, key_padding_mask=real)  # (B, L, E)
        normed, _ = self.ops.add_layer_norm(mixed, x, self.norm.weight, self.norm.bias)
        mean = (normed * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return self.classes(mean)


tokens = torch.randint(100, (16, 24), generator=torch.Generator().manual_seed(0))
real = torch.arange(24) < torch.randint(5, 25, (16, 1), generator=torch.Generator().manual_seed(1))
labels = (tokens[:, 0] % 2).long()

found = {}
for name, ops in (("reference", reference), ("kernels", tk.bind("auto"))):
    torch.manual_seed(0)
    model = Classifier(ops)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = tk.cross_entropy(model(tokens, real), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found[name] = loss.item()
    print(f"{name}: loss {loss.item():.5f} after 30 steps")
assert abs(found["reference"] - found["kernels"]) < 1e-3
