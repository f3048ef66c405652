import pytest
import torch

from transformer_kernels.training import CharGPT, Trainer
from transformer_kernels.training.evaluation import Batch
from transformer_kernels.training.transfer import Prefetcher, to_device

CPU = torch.device("cpu")


class Source:
    """Makes batches and remembers of which items."""

    def __init__(self):
        self.asked = []

    def __call__(self, indices):
        self.asked.append(indices.tolist())
        return Batch((indices[:, None],), indices, len(indices))


def test_a_prepared_batch_is_made_once():
    source = Source()
    batches = Prefetcher(source, CPU, ahead=True)
    for first in (0, 2, 4):
        taken = batches.take(torch.arange(first, first + 2))
        assert taken.targets.tolist() == [first, first + 1]
        batches.prepare(torch.arange(first + 2, first + 4))
    assert source.asked == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_that_was_not_prepared_is_made_when_it_is_taken():
    source = Source()
    batches = Prefetcher(source, CPU, ahead=True)
    batches.prepare(torch.arange(2))
    assert batches.take(torch.arange(5, 7)).targets.tolist() == [5, 6]


def test_a_cpu_that_is_busy_until_the_step_is_over_makes_nothing_ahead():
    source = Source()
    Prefetcher(source, CPU).prepare(torch.arange(2))
    assert source.asked == []


def test_a_run_with_batches_made_ahead_is_the_same(char_config):
    losses = []
    for ahead in (False, True):
        trainer = Trainer(CharGPT(char_config()))
        trainer.runner._batches = Prefetcher(trainer.runner._batches._load, CPU, ahead=ahead)
        torch.manual_seed(1)
        losses.append([trainer.step().item() for _ in range(6)])
    assert losses[0] == losses[1]


def test_a_tensor_on_its_device_is_not_copied():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor


@pytest.mark.gpu
def test_a_copy_to_a_gpu_does_not_wait_for_it():
    device = torch.device("cuda")
    to_device(torch.arange(1000), device)  # its pinned memory is used again, since to allocate some may wait
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(500_000_000)
    copied = to_device(torch.arange(1000), device)
    busy.record()
    assert not busy.query()
    assert torch.equal(copied.cpu(), torch.arange(1000))
