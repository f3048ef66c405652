"""What a model makes of a batch: the loss that it learns from, and the loss and accuracy that it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_kernels.training.precision import autocast, matrix_products


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


class TrainingLoss(nn.Module):
    """A model whose forward is its loss, so that what wraps a module's forward (DDP, torch.compile) wraps the loss too.

    Args:
        model: whose parameters these are.
        loss: `loss(model, inputs, targets)`, the mean over the targets; from the recipe.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return self.loss(self.model, inputs, targets)


def training_loss(loss: nn.Module, batch: Batch, dtype: str = "float32") -> Tensor:
    """What a training step differentiates: `loss` is a `TrainingLoss`, or a wrapper of one."""
    with autocast(batch.targets.device.type, dtype):
        return loss(batch.inputs, batch.targets)


def batch_loss(model: nn.Module, batch: Batch, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    """The mean cross-entropy in float32, and how many targets got the largest logit."""
    with autocast(batch.targets.device.type, dtype):
        logits = model(*batch.inputs)
    logits, targets = logits.float().flatten(0, -2), batch.targets.flatten()
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).sum()


@torch.no_grad()
def evaluation_totals(
    model: nn.Module,
    batches: Iterable[Batch],
    dtype: str = "float32",
    cancelled: Callable[[], bool] = lambda: False,
) -> Totals:
    """The sums over `batches` with dropout off, or over as many as came before `cancelled()` was true.

    Results are read after the last batch: to look at each would make the host wait for a GPU.
    """
    was_training = model.training
    model.eval()
    seen: list[tuple[Tensor, Tensor, int]] = []
    for batch in batches:
        if cancelled():
            break
        with matrix_products(dtype):
            seen.append((*batch_loss(model, batch, dtype), batch.targets.numel()))
    model.train(was_training)
    if not seen:
        return Totals(0.0, 0.0, 0.0)
    losses = torch.stack([loss for loss, *_ in seen]).tolist()
    right = torch.stack([right for _, right, _ in seen]).tolist()
    counts = [count for *_, count in seen]
    loss_sum = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return Totals(loss_sum, float(sum(right)), float(sum(counts)))
