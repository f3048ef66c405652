"""A model of torch.nn modules, trained unchanged and then with this package's modules.

The state dict is loaded unchanged, and the losses agree.
"""

import torch
from torch import nn

import transformer_kernels as tk
import transformer_kernels.nn


class Block(nn.Module):
    """A pre-norm transformer block; `kernels` is torch.nn or transformer_kernels.nn."""

    def __init__(self, kernels, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        attention = kernels.MultiheadAttention if kernels is nn else kernels.MultiHeadAttention
        self.attention_norm, self.mlp_norm = kernels.LayerNorm(width), kernels.LayerNorm(width)
        self.attention = attention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), kernels.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


def losses(model: nn.Module, steps: int = 5) -> list[float]:
    """Train to predict the successor of each token."""
    x = torch.randn(8, 33, 64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        loss = (model(x[:, :-1]) - x[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


torch.manual_seed(0)
ours, theirs = Block(tk.nn), Block(nn)
ours.load_state_dict(theirs.state_dict())
for step, (a, b) in enumerate(zip(losses(theirs), losses(ours), strict=True)):
    print(f"step {step}: torch.nn {a:.6f}, transformer_kernels.nn {b:.6f}")
    assert abs(a - b) < 1e-5
print("same losses")
