"""A custom training loop on a patched model: captured once, then replayed with the same results.

On a GPU a replay is one CUDA graph, on a CPU a list of the kernels and operators that the step called.
"""

import time

import torch
from torch import nn

import transformer_kernels as tk

TOKENS = torch.randint(50, (30, 8, 32), generator=torch.Generator().manual_seed(0))  # steps, B, L


def run(replayed: bool) -> tuple[float, float]:
    """The last loss and the seconds per step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))
    tk.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(tokens).mT, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if replayed:
        step = tk.graphed(step, optimizer)
    for number, tokens in enumerate(TOKENS):
        if number == 10:  # captured by now
            start = time.perf_counter()
        loss = step(tokens)
    return loss.item(), (time.perf_counter() - start) / 20


(plain, slow), (replayed, fast) = run(False), run(True)
print(f"{1000 * slow:.1f} ms per step, replayed {1000 * fast:.1f} ms; losses {plain:.6f} and {replayed:.6f}")
assert plain == replayed
print("the losses are equal")
