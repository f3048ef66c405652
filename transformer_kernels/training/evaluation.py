"""What a model makes of a batch: its loss, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    """What a step works on: `model(*inputs)` gives logits (..., classes) for `targets` (...)."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    tokens: int


class Totals(NamedTuple):
    """Sums over targets, so that processes can add theirs."""

    loss: float
    correct: float
    targets: float


def batch_loss(model: nn.Module, batch: Batch, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    """The mean cross-entropy in float32, and how many targets got the largest logit."""
    device = batch.targets.device.type
    with nullcontext() if dtype == "float32" else torch.autocast(device, getattr(torch, dtype)):
        logits = model(*batch.inputs)
    logits, targets = logits.float().flatten(0, -2), batch.targets.flatten()
    return F.cross_entropy(logits, targets), (logits.detach().argmax(-1) == targets).sum()


@torch.no_grad()
def evaluation_totals(
    model: nn.Module,
    batches: Iterable[Batch],
    dtype: str = "float32",
    cancelled: Callable[[], bool] = lambda: False,
) -> Totals:
    """The sums over `batches` with dropout off, or over as many as came before `cancelled()` was true."""
    was_training = model.training
    model.eval()
    loss_sum = correct = count = 0.0
    for batch in batches:
        if cancelled():
            break
        loss, right = batch_loss(model, batch, dtype)
        loss_sum += loss.item() * batch.targets.numel()
        correct += right.item()
        count += batch.targets.numel()
    model.train(was_training)
    return Totals(loss_sum, correct, count)
