"""Recorded steps of compiled models: the compiled graph is recorded, and its masks have other values in each replay."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import _host

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"),
]

L, WIDTH = 96, 32
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


def added(scores: Tensor, pad: Tensor, number: float) -> Tensor:
    return scores + torch.zeros(pad.shape, dtype=scores.dtype).masked_fill(pad, number)


MASKS = {
    "-1e9": lambda scores, pad: scores.masked_fill(pad, -1e9),
    "-inf": lambda scores, pad: scores.masked_fill(pad, -math.inf),
    "-1e4": lambda scores, pad: scores.masked_fill(pad, -1e4),
    "added -inf": lambda scores, pad: added(scores, pad, -math.inf),
    "added least": lambda scores, pad: added(scores, pad, torch.finfo(scores.dtype).min),
    "both": lambda scores, pad: scores.masked_fill(pad | CAUSAL, -1e9),
    "two numbers": lambda scores, pad: scores.masked_fill(pad, -1e9).masked_fill(CAUSAL, -2e9),
    "bias and fill": lambda scores, pad: (scores + torch.arange(L) / L).masked_fill(pad, -1e9),
}


class Model(nn.Module):
    """Two layers of hand-written attention, whose mask is made of the tokens; 0 is padding."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.embedding, self.mask = nn.Embedding(20, WIDTH), MASKS[mask]
        self.positions = nn.Parameter(torch.randn(L, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, pad = self.embedding(tokens) + self.positions, (tokens == 0)[:, None, None]
        for layer in self.layers:
            q, k, v = layer(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            weights = self.mask(q @ k.transpose(-2, -1) * 0.35, pad).softmax(-1)
            x = x + (weights @ v).transpose(1, 2).reshape(x.shape)
        return x


def batches(empty: bool) -> list[Tensor]:
    found = []
    for seed in range(7):
        tokens = torch.randint(1, 20, (8, L), generator=torch.Generator().manual_seed(seed))
        tokens[::2, L - 9 * seed :] = 0
        tokens[1] *= not (empty and seed > 4)
        found.append(tokens)
    return found


def recorded_calls(monkeypatch) -> list[str]:
    """The names of the kernels in all recordings from now on."""
    names: list[str] = []
    fuse = _host.Recording.fuse

    def noted(self) -> None:
        names.extend(getattr(function, "__name__", "") for function, _ in self.calls)
        fuse(self)

    monkeypatch.setattr(_host.Recording, "fuse", noted)
    return names


@pytest.mark.parametrize("mask", MASKS)
def test_replays_follow_their_masks(mask, monkeypatch):
    names = recorded_calls(monkeypatch)
    eager = Model(mask)
    counted = itertools.count()
    compiled = tk.compile(copy.deepcopy(eager), backend="cpu")

    def run(tokens: Tensor) -> Tensor:
        next(counted)
        return compiled(tokens)

    recorded = tk.graphed(run, warm_up_calls=2)
    with torch.no_grad():
        for tokens in batches(True):
            torch.testing.assert_close(recorded(tokens), eager(tokens), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert next(counted) <= 4, "the calls after the recording ran the step's Python"
    assert "linear_forward" in names, "the eager program was recorded"


@pytest.mark.parametrize("mask", ("-1e9", "added -inf"))
def test_training_follows_the_masks_and_the_compiled_code_stays(mask, monkeypatch):
    names, models, losses = recorded_calls(monkeypatch), [Model(mask)], []
    models.append(copy.deepcopy(models[0]))
    compiled = tk.compile(models[1], backend="cpu")
    for model, run in zip(models, (models[0], compiled), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, fused=True)

        def step(tokens: Tensor, run=run, optimizer=optimizer) -> Tensor:
            loss = run(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        called = step if run is model else tk.graphed(step, optimizer, warm_up_calls=2)
        losses.append([called(tokens).item() for tokens in batches(mask == "-1e9")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert "linear_backward_data" in names, "the eager program was recorded"
    with cpu.recorded(calls := []):
        compiled(batches(False)[0])
    assert calls, "a capture has removed the compiled code"


def test_a_mask_of_the_model_may_change_between_replays():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Tensor
            self.register_buffer("mask", CAUSAL.clone())

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(-2, -1)).masked_fill(self.mask, -math.inf).softmax(-1) @ x

    model = Masked()
    recorded = tk.graphed(tk.compile(model, backend="cpu"), warm_up_calls=1)
    with torch.no_grad():
        for seed in range(6):
            x = torch.randn(2, 16, L, 8, generator=torch.Generator().manual_seed(seed))
            model.mask[:, seed] = seed > 3
            torch.testing.assert_close(recorded(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
