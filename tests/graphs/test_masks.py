"""Dense masks in a recorded step: each replay reads their values, and computes what they say then."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import OPERATIONS
from transformer_kernels.graphs._host import Recording
from transformer_kernels.ops.attention import _structure

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)

L = 96
POSITIONS = torch.arange(L)
CAUSAL = POSITIONS[:, None] >= POSITIONS
RANDOM = (torch.rand(L, L, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(L, dtype=torch.bool)
MASKS = {
    "causal": CAUSAL,
    "window": CAUSAL & (POSITIONS[:, None] - POSITIONS < 9),
    "documents": POSITIONS[:, None] // 32 == POSITIONS // 32,
    "padding": (torch.arange(L) < 70).expand(L, L),
    "a query without keys": CAUSAL & (POSITIONS != 0)[:, None],
    "no structure": RANDOM,
}


class Attention(nn.Module):
    """Attention of one projection with itself; the mask is an argument, a buffer, or made of the argument."""

    def __init__(self, source: str, floating: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.2)
        self.source, self.floating = source, floating
        self.mask: Tensor
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = self.mask if self.source == "buffer" else mask
        if self.source == "computed":
            mask = mask & (x[0, 0, :, 0] < 9.0)  # of the shape of the mask, and all of it
        if self.floating:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        q, k, v = (x @ weight for weight in self.weight)
        if self.source == "packed":
            return tk.packed_attention(torch.cat((q, k, v), 1).transpose(1, 2), heads=16, attn_bias=mask)
        return tk.attention(q, k, v, attn_bias=mask, dropout_p=0.1)


def training_step(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=True)

    def step(x: Tensor, mask: Tensor) -> Tensor:
        loss = model(x, mask).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer


def calls(floating: bool = False, source: str = "argument", order: tuple[str, ...] = tuple(MASKS)):
    """Losses and weights of eager and of recorded steps, in which the mask changes from call to call."""
    found = []
    for recorded in (False, True):
        model = Attention(source, floating)
        step, optimizer = training_step(model)
        run = tk.graphed(step, optimizer, warm_up_calls=1) if recorded else step
        torch.manual_seed(0)
        losses = []
        for name in order:
            model.mask.copy_(MASKS[name])
            losses.append(run(torch.randn(2, 16, L, 16), MASKS[name]).item())
        found.append((losses, model.weight.detach()))
    return found


@pytest.mark.parametrize("floating", (False, True), ids=("bool", "float"))
@pytest.mark.parametrize("source", ("argument", "buffer", "computed", "packed"))
def test_a_replay_computes_what_its_mask_says(source, floating):
    for first in ("causal", "no structure"):
        order = (first, first, *MASKS, "causal")
        (eager, weight), (recorded, own) = calls(floating, source, order)
        torch.testing.assert_close(torch.tensor(recorded), torch.tensor(eager), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(own, weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("after_compile", (False, True))
@pytest.mark.parametrize("hidden", (None, -math.inf, -1e9))
@pytest.mark.parametrize("name", [name for name in MASKS if name != "no structure"])
def test_the_structure_is_used_in_replays(name, hidden, after_compile, monkeypatch):
    monkeypatch.setattr(Recording, "runs_compiled", after_compile)
    if hidden == -1e9 and name == "a query without keys":
        pytest.skip("a query that sees no key attends to all of them")
    mask = MASKS[name] if hidden is None else torch.zeros(L, L).masked_fill(~MASKS[name], hidden)
    kernels, read = [], _structure.understood

    def understood(*arguments, **options):
        result = read(*arguments, **options)
        kernels.append(result)
        return result

    monkeypatch.setattr(_structure, "understood", understood)
    model = Attention("argument", False)
    step, optimizer = training_step(model)
    OPERATIONS["attention"].forget_plans()
    for _ in range(2):  # from then on calls with a dense mask are planned
        step(torch.randn(2, 16, L, 16), MASKS["no structure"].to(mask.dtype))
    run = tk.graphed(step, optimizer, warm_up_calls=1)
    for _ in range(3):
        kernels.clear()
        run(torch.randn(2, 16, L, 16), mask)
    assert len(kernels) == 2, "forward and backward read the mask once each"
    assert all(mask is None for mask, *_ in kernels)


@pytest.mark.parametrize("factor", (None, 1.0), ids=("leaf", "computed"))
def test_a_bias_with_a_gradient_stays_dense(factor):
    found = []
    for recorded in (False, True):
        bias = nn.Parameter(torch.zeros(L, L))
        optimizer = torch.optim.SGD([bias], 10.0, fused=True)

        def step(x: Tensor, bias=bias, optimizer=optimizer) -> Tensor:
            added = bias if factor is None else bias * factor
            loss = tk.attention(x, x, x.cos(), attn_bias=added).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = tk.graphed(step, optimizer, warm_up_calls=1) if recorded else step
        torch.manual_seed(0)
        for _ in range(4):
            run(torch.randn(2, 16, L, 16))
        found.append(bias.detach())
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0])
