from itertools import chain

import pytest
import torch

from transformer_kernels.training.data.sampler import BucketedSampler, PackedSampler, ShuffledSampler

SAMPLERS = {
    "shuffled": lambda lengths, *rest, **ranks: ShuffledSampler(len(lengths), *rest, **ranks),
    "bucketed": BucketedSampler,
    "packed": PackedSampler,
}


@pytest.fixture(params=SAMPLERS)
def make(request):
    """Makes a sampler of that many items of widely varying lengths."""
    return lambda count, *rest, **ranks: SAMPLERS[request.param](lengths_of(count), *rest, **ranks)


def lengths_of(count):
    """3 to 258 tokens, a third of them the longest allowed, as reviews are."""
    return 3 + torch.randint(380, (count,), generator=torch.Generator().manual_seed(9)).clamp(max=255)


def batches(sampler, count):
    result = []
    for _ in range(count):
        result.append(sampler.peek().tolist())
        sampler.advance()
    return result


def test_an_epoch_has_every_item_once_in_an_order_of_its_own(make):
    sampler = make(12, 4, seed=0)
    first, second = batches(sampler, 3), batches(sampler, 3)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    assert batches(make(12, 4, seed=0), 3) == first
    assert batches(make(12, 4, seed=1), 3) != first


def test_processes_share_an_epoch_without_overlap(make):
    ranks = [make(20, 3, seed=5, rank=rank, world_size=2) for rank in range(2)]
    seen = [list(chain(*batches(sampler, sampler.batches_per_epoch))) for sampler in ranks]
    assert len(seen[0]) == len(seen[1]) == 9
    assert len(set(seen[0]) | set(seen[1])) == 18


def test_an_epoch_leaves_out_the_same_items_in_any_order():
    seen = []
    for make in SAMPLERS.values():
        sampler = make(lengths_of(50), 4, seed=3)
        seen.append({item for batch in batches(sampler, 12) for item in batch})
    assert len(seen[0]) == 48
    assert seen[0] == seen[1] == seen[2]


def test_the_position_is_the_whole_state(make):
    sampler = make(50, 4, seed=3)
    batches(sampler, 17)
    twin = make(50, 4, seed=3)
    twin.restore(sampler.state())
    assert batches(twin, 20) == batches(sampler, 20)


def test_peeking_does_not_advance(make):
    sampler = make(50, 4, seed=3)
    assert torch.equal(sampler.peek(), sampler.peek())


def test_less_than_a_batch_is_one_batch(make):
    assert sorted(make(3, 16, seed=0).peek().tolist()) == [0, 1, 2]


def test_too_few_items_are_reported(make):
    with pytest.raises(ValueError, match="1 training items are not enough for 2 processes"):
        make(1, 16, seed=0, world_size=2)


def test_a_bucketed_batch_has_items_of_similar_length_in_every_process():
    lengths = lengths_of(3000)
    ranks = [BucketedSampler(lengths, 8, seed=0, rank=rank, world_size=2) for rank in range(2)]
    together = torch.cat([torch.tensor(batches(sampler, 187)) for sampler in ranks], dim=1)  # (187, 2 * 8)
    taken = lengths[together]
    assert (taken.max(1).values - taken.min(1).values).float().mean() < 10  # of 255; 240 when shuffled
    assert taken.max(1).values.diff().abs().float().mean() > 50  # short and long batches alternate


def test_the_pools_of_an_epoch_are_drawn_anew():
    sampler = BucketedSampler(torch.ones(5000), 2, seed=0)
    first, second = (set(map(frozenset, batches(sampler, 2500))) for _ in range(2))
    assert len(first & second) < 25


@pytest.mark.parametrize("count", [1000, 1007, 1030])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_packed_batch_is_over_the_budget_and_few_are_far_below(count, world_size):
    lengths = lengths_of(count)
    budgets, sums = set(), []
    for rank in range(world_size):
        sampler = PackedSampler(lengths, 16, seed=0, rank=rank, world_size=world_size)
        budgets.add(sampler.budget)
        sums += [lengths[batch].sum().item() for batch in batches(sampler, 20 * sampler.batches_per_epoch)]
    (budget,) = budgets
    assert max(sums) <= budget
    assert sum(sums) / len(sums) > 0.93 * budget  # half the range of lengths, 128 tokens of 3200, is the price


def test_the_packed_budget_holds_when_the_longest_items_are_kept():
    """The omitted items differ by epoch: here, in some epoch, the shortest."""
    lengths = torch.tensor([1, 1, 9, 9, 9])
    sampler = PackedSampler(lengths, 2, seed=0)
    sums = [lengths[batch].sum().item() for batch in batches(sampler, 100)]
    assert sampler.budget == 18 == max(sums)


@pytest.mark.parametrize("before, after", [(2, 1), (1, 3), (3, 2)])
def test_another_number_of_processes_continues_in_the_same_order(make, before, after):
    def samplers(count):
        return [make(140, 4, seed=7, rank=rank, world_size=count) for rank in range(count)]

    def together(shares, count):
        return [sorted(chain(*step)) for step in zip(*(batches(each, count) for each in shares), strict=True)]

    first, second = samplers(before), samplers(after)
    together(first, 5)
    state = first[0].state()
    if isinstance(first[0], PackedSampler):
        with pytest.raises(ValueError, match="packed batches continue with the number of processes"):
            second[0].restore(state)
        return
    for each in second:
        each.restore(state)
    assert together(second, 40) == together(first, 40)
    assert [each.is_even for each in second] == [4 * before % after == 0] * after


def test_a_step_needs_an_item_for_each_process():
    sampler = ShuffledSampler(20, 1, 0, rank=0, world_size=2)
    with pytest.raises(ValueError, match="a step has 1 items, which are not enough for 2 processes"):
        sampler.restore({"epoch": 0, "batch": 0, "items": 1})
