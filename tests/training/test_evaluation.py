import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transformer_kernels.training.evaluation import Batch, evaluation_totals


def batches():
    generator = torch.Generator().manual_seed(0)
    for size in (5, 5, 2):
        inputs = torch.randn(size, 3, generator=generator)
        yield Batch((inputs,), torch.randint(0, 4, (size,), generator=generator), size)


def test_batches_of_all_sizes_count_by_their_targets():
    model = nn.Linear(3, 4)
    totals = evaluation_totals(model, batches())
    logits = torch.cat([model(*batch.inputs) for batch in batches()])
    targets = torch.cat([batch.targets for batch in batches()])
    assert totals.loss == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-6)
    assert totals.correct == (logits.argmax(-1) == targets).sum().item()
    assert totals.targets == 12


def test_what_came_before_the_cancellation_counts():
    answers = iter([False, True])
    model = nn.Linear(3, 4).train()
    assert evaluation_totals(model, batches(), cancelled=lambda: next(answers)).targets == 5
    assert model.training


def test_no_batch_is_no_total():
    assert evaluation_totals(nn.Linear(3, 4), []) == (0.0, 0.0, 0.0)
