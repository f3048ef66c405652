"""CPU recordings: rejected functions, validation in replays, and shared memory."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import transformer_kernels
from transformer_kernels.backends import cpu
from transformer_kernels.graphs._host import HostGraphs

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


def packed(x):
    """Two sequences whose lengths depend on values."""
    lengths = (x[:2] > 0).long() + 2
    return pack_padded_sequence(x.view(4, 2, 1), lengths, enforce_sorted=False)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.nonzero(),
        lambda x: x + float(torch.equal(x, x)),
        lambda x: x * x.tolist()[0],
        lambda x: x[:2] + torch.tensor([x[0], x[1]]),
        lambda x: x.tensor_split((x[:1] > 0).long() + 2)[0].sum(),
        lambda x: packed(x).data,
        lambda x: torch.nn.GRU(1, 2)(packed(x))[0].data,
        lambda x: pad_packed_sequence(PackedSequence(x[:, None], 5 - (x[:2] > 0).long().cumsum(0)))[0],
    ],
    ids=[
        *("item", "bool", "mask", "unique", "nonzero", "equal", "list", "tensor of tensors", "split"),
        *("packed sequence", "recurrent", "padded sequence"),
    ],
)
def test_what_depends_on_values_is_refused_and_no_random_number_is_lost(work):
    x = torch.randn(8)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="reads values on the host"):
        HostGraphs().capture(lambda: work(torch.rand(8) + x))
    assert torch.equal(torch.get_rng_state(), state)
    assert cpu.load().record_with(None) is None


def handed_on(x):
    y = torch.ones(8)
    y.data_ptr()  # assumed to be written through the address
    return y


def used_before(x):
    torch.arange(8.0)
    return torch.empty(8)  # in the memory of those numbers


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.zeros(8).copy_(x),
        lambda x: torch.arange(8.0).add_(x),
        lambda x: torch.rand(8) * 0 + torch.rand(8),
        lambda x: torch.zeros(8).uniform_(),
        lambda x: torch.arange(8.0)[x.argsort()],
        lambda x: torch.add(x, x, out=torch.zeros(8)),
        lambda x: torch.zeros(2, 8).index_copy_(0, torch.tensor([1]), x[None]),
        handed_on,
        used_before,
        lambda x: transformer_kernels.softmax(torch.arange(8.0)[None], backend="cpu")[0],
    ],
    ids=["copy", "add", "random", "uniform", "index", "out", "rows", "address", "uninitialised", "kernel"],
)
def test_what_replays_may_change_is_not_fixed(made):
    x = torch.randn(8)
    with pytest.raises(RuntimeError, match="reads values on the host"):
        HostGraphs().capture(lambda: x + made(x).sum().item())


def test_what_is_made_of_numbers_alone_may_be_read():
    """As transformers does with positions computed by a model."""
    x = torch.randn(2, 8)

    def work():
        positions = torch.arange(8)[None].expand(2, 8)
        begins = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        assert (begins[:, -1] == 0).all() and torch.ones(3).nonzero().shape == (3, 1)
        return x * positions[0].max().item()

    replay = HostGraphs().capture(work)
    replay()
    x.normal_()
    assert torch.equal(replay(), x * 7)


def test_a_replay_follows_its_inputs_by_kernels_operators_and_random_numbers():
    x, weight, token = torch.randn(3, 8), torch.randn(40, 8), torch.tensor([[1, 5, 7]])
    seen = []
    graphs = HostGraphs()
    note = graphs.on_host(lambda value: seen.append(value.item()))

    def work():
        y = transformer_kernels.embedding(token, weight, dropout_p=0.5, backend="cpu")[0]
        y = transformer_kernels.layer_norm(y + x[torch.tensor([2, 0, 1])], weight[0], backend="cpu")
        note(y.sum())
        return torch.cat([y.t().contiguous(), torch.rand(8, 1).to(torch.float64).float()], 1).clone()

    replay = graphs.capture(work)
    replay()
    for seed in range(3):
        x.normal_()
        token.random_(40)
        torch.manual_seed(seed)
        got = replay().clone()
        torch.manual_seed(seed)
        assert torch.equal(got, work())
        assert seen[-1] == seen[-2]
    token.fill_(40)
    with pytest.raises(IndexError, match=r"embedding: tokens must be in \[0, 40\); got .*40"):
        replay()


@pytest.mark.parametrize("kind", ["BatchNorm1d", "InstanceNorm1d", "RReLU"])
def test_an_operator_that_writes_to_its_arguments_and_has_a_result(kind):
    options = {} if kind == "RReLU" else {"num_features": 6, "track_running_stats": True}
    module, twin = (getattr(torch.nn, kind)(**options) for _ in range(2))
    x = torch.randn(4, 6, 8)
    replay = HostGraphs().capture(lambda: module(x))
    for seed in range(3):
        torch.manual_seed(seed)
        got = replay().clone()
        torch.manual_seed(seed)
        expected = twin(x)
        if seed or kind != "RReLU":  # the first replay returns the result of the recorded call
            assert torch.equal(got, expected)
        assert all(map(torch.equal, module.buffers(), twin.buffers()))
        x.normal_()


@pytest.mark.parametrize("gradients", [True, False])
def test_an_lstm_makes_what_its_backward_pass_needs_in_each_replay(gradients):
    """With gradients its layer has an additional result: a replay must call it as the step did."""
    module, x = torch.nn.LSTM(8, 8), torch.randn(5, 2, 8)

    def work():
        with torch.set_grad_enabled(gradients):
            y = module(x)[0]
        return torch.autograd.grad(y.square().sum(), list(module.parameters())) if gradients else y

    with torch.enable_grad():
        replay = HostGraphs().capture(work)
        replay()
        for _ in range(3):
            x.normal_()
            got = [each.clone() for each in replay()]
            assert all(map(torch.allclose, got, work()))


def test_sequences_of_a_replay_are_checked():
    packed, starts = torch.randn(1, 8, 3, 4), torch.tensor([0, 3, 8], dtype=torch.int32)
    replay = HostGraphs().capture(
        lambda: transformer_kernels.packed_attention(packed, heads=1, cu_seqlens=starts, backend="cpu")
    )
    replay()
    starts[2] = 9
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 8"):
        replay()


def test_memory_is_used_again_within_a_step_and_by_the_next_one():
    x = torch.randn(1000)
    graphs = HostGraphs()

    def chain(count):
        y = x
        for _ in range(count):
            y = transformer_kernels.gelu(y, backend="cpu")
        return y

    expected = chain(9)
    first = graphs.capture(lambda: chain(9))
    assert torch.equal(first(), expected)
    taken = sum(map(len, graphs._memory._by_size.values()))
    assert taken <= 3
    second = graphs.capture(lambda: chain(9) + 1)
    assert sum(map(len, graphs._memory._by_size.values())) <= taken + 1  # the result of the first remains
    second()
    for replay, wanted in ((first, expected), (second, expected + 1), (first, expected)):
        assert torch.equal(replay(), wanted)


def test_memory_of_a_dropped_recording_is_free_again():
    x = torch.randn(1000)
    graphs = HostGraphs()
    for _ in range(3):
        assert torch.equal(graphs.capture(lambda: torch.relu(x) * 2)(), torch.relu(x) * 2)
        taken = sum(map(len, graphs._memory._by_size.values()))
    assert taken == 2


def test_calls_of_other_threads_are_not_recorded():
    import threading

    x = torch.randn(10)
    graphs = HostGraphs()

    def work():
        thread = threading.Thread(target=lambda: transformer_kernels.gelu(x, backend="cpu"))
        thread.start()
        thread.join()
        return transformer_kernels.softmax(x, backend="cpu")

    calls = []
    with cpu.recorded(calls):
        work()
    assert len(calls) == 1
    assert torch.equal(graphs.capture(work)(), work())
