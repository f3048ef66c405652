from itertools import chain

import pytest
import torch

from transformer_kernels.training.sampler import ShuffledSampler


def batches(sampler, count):
    result = []
    for _ in range(count):
        result.append(sampler.peek().tolist())
        sampler.advance()
    return result


def test_an_epoch_has_every_item_once_in_an_order_of_its_own():
    sampler = ShuffledSampler(12, 4, seed=0)
    first, second = batches(sampler, 3), batches(sampler, 3)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    assert batches(ShuffledSampler(12, 4, seed=0), 3) == first
    assert batches(ShuffledSampler(12, 4, seed=1), 3) != first


def test_processes_share_an_epoch_without_overlap():
    ranks = [ShuffledSampler(20, 3, seed=5, rank=rank, world_size=2) for rank in range(2)]
    seen = [list(chain(*batches(sampler, sampler.batches_per_epoch))) for sampler in ranks]
    assert len(seen[0]) == len(seen[1]) == 9
    assert len(set(seen[0]) | set(seen[1])) == 18


def test_the_position_is_the_whole_state():
    sampler = ShuffledSampler(50, 4, seed=3)
    batches(sampler, 17)
    twin = ShuffledSampler(50, 4, seed=3)
    twin.restore(sampler.state())
    assert batches(twin, 20) == batches(sampler, 20)


def test_peeking_does_not_advance():
    sampler = ShuffledSampler(50, 4, seed=3)
    assert torch.equal(sampler.peek(), sampler.peek())


def test_less_than_a_batch_is_one_batch():
    assert sorted(ShuffledSampler(3, 16, seed=0).peek().tolist()) == [0, 1, 2]


def test_too_few_items_are_told():
    with pytest.raises(ValueError, match="1 training items are too few for 2 processes"):
        ShuffledSampler(1, 16, seed=0, world_size=2)
