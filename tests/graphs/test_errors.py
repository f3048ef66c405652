"""Errors of `graphed` with their line of Python; state that functions keep between calls."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from tests.graphs.test_graphed import FAMILIES
from transformer_kernels.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


def graphs(function):
    return sum(map(len, function._captured.values()))


def largest(x):
    return x.max().item()


def reads_in_a_function(x):
    return x / largest(x)


def reads_in_a_condition(x):
    return x if x.sum() > 0 else -x


class ReadsInItsForward(nn.Module):
    def forward(self, x):
        return x * float(x.sum())


def reads_in_the_backward_pass(x):
    y = x.clone().requires_grad_()
    y.register_hook(lambda gradient: gradient * gradient.sum().item())
    with torch.enable_grad():
        return torch.autograd.grad((y * x).sum(), y)[0]


@pytest.mark.parametrize(
    "function, source",
    [
        (reads_in_a_function, "in largest: return x.max().item()"),
        (reads_in_a_condition, "in reads_in_a_condition: return x if x.sum() > 0 else -x"),
        (ReadsInItsForward(), "in forward: return x * float(x.sum())"),
        (nn.Sequential(nn.Identity(), ReadsInItsForward()), "in forward: return x * float(x.sum())"),
        (reads_in_the_backward_pass, "gradient.sum().item()"),
    ],
    ids=["function", "condition", "forward", "layers", "backward"],
)
def test_an_error_names_the_line_that_read_a_value(function, source):
    with pytest.raises(RuntimeError) as refused:
        tk.graphed(function, warm_up_calls=0)(torch.randn(4))
    message = str(refused.value)
    assert "reads values on the host" in message and source in message
    line = int(message.partition(f"{__file__}:")[2].partition(" ")[0])
    assert source.partition(": ")[2] in inspect.getsource(inspect.getmodule(largest)).splitlines()[line - 1]


def test_a_library_is_named_with_the_line_that_called_it():
    """The innermost line outside of PyTorch."""

    def function(x):
        return nn.utils.rnn.pack_padded_sequence(x, (x[:, 0] > 0).long() + 1, enforce_sorted=False).data

    with pytest.raises(RuntimeError, match=r"in function: return nn\.utils\.rnn\.pack_padded_sequence"):
        tk.graphed(function, warm_up_calls=0)(torch.rand(4, 4))


@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_causal_model_of_transformers_is_only_asked(family):
    """Without a cache it returns its ModelOutput; with one the error has the remedy."""
    kind = getattr(pytest.importorskip("transformers"), family)
    whole = kind(kind.config_class(**FAMILIES[family])).eval()
    tk.patch(whole, backend="cpu")  # with "auto", eager inference uses PyTorch at this size
    tokens = torch.randint(50, (2, 9))
    with pytest.raises(TypeError, match=r"must return tensors; got \w*Cache.*: pass use_cache=False"):
        tk.graphed(whole)(tokens)
    ask = tk.graphed(whole, warm_up_calls=1)
    for _ in range(4):
        tokens.random_(50)
        found = ask(tokens, use_cache=False)
        with torch.no_grad():
            expected = whole(tokens, use_cache=False)
        assert type(found) is type(expected)
        assert torch.equal(found.logits, expected.logits)
    assert graphs(ask) == 1


class Kept(nn.Module):
    """A layer that keeps a tensor between calls, and may read it."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.calls, self.last = reads, 0, torch.ones(4)

    def forward(self, x):
        self.calls += 1
        y = x * 2 + self.last if self.reads else x * 2
        self.last = y
        return y


def test_a_tensor_that_is_read_and_then_replaced_is_refused():
    with pytest.raises(
        RuntimeError, match=r"it reads Kept\.last and then replaces it; write to it in place, with copy_"
    ):
        tk.graphed(Kept(True), warm_up_calls=0)(torch.ones(4))


def test_what_a_function_only_writes_may_differ():
    layer = Kept(False)
    ask = tk.graphed(layer, warm_up_calls=1)
    for length in (4, 4, 4, 6, 4, 6, 4, 4):
        x = torch.randn(length)
        assert torch.equal(ask(x), x * 2)
    assert graphs(ask) == 2
    assert layer.calls == 6  # two eager calls, and two captures of two calls


def test_the_state_of_an_optimizer_is_made_before_a_capture():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step(x):
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(RuntimeError, match="the optimizer's state must exist; warm_up_calls must be at least 1"):
        tk.graphed(step, optimizer, warm_up_calls=0)(torch.ones(3))


def test_a_dropped_graph_is_captured_again_after_warm_up():
    """Eager calls in another mode do not count: the optimizer's new state must be created eagerly."""
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step(x):
        loss = layer(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    run = tk.graphed(step, optimizer, warm_up_calls=1)
    for _ in range(3):
        run(torch.ones(3))
    layer.eval()
    run(torch.ones(3))
    layer.train()
    optimizer.state.clear()
    for _ in range(4):
        run(torch.ones(3))
    assert optimizer.state[layer.weight]["step"] == 4 and graphs(run) == 1


def test_modes_keep_their_graphs():
    layer = nn.Dropout(0.5)
    ask = tk.graphed(layer, warm_up_calls=1)
    for number in range(12):
        layer.train(number % 2 == 0)
        x = torch.ones(100)
        assert torch.equal(ask(x), x) == (number % 2 == 1)
    assert graphs(ask) == 2


def test_a_number_that_changes_before_each_call_is_followed_ever_more_eagerly():
    layer = nn.Dropout(0.5).eval()
    ask = tk.graphed(layer, warm_up_calls=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(40):
            layer.p = number / 100
            ask(torch.ones(3))
    assert len(caught) == 1
    assert "Dropout.p was 0.02 and is 0.03" in str(caught[0].message)
    assert "graphs are dropped before they are replayed" in str(caught[0].message)
    assert ask._unused.total() < 8


def test_a_training_step_needs_its_optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    step = tk.graphed(lambda x: (weight * x).sum().backward())
    with pytest.raises(RuntimeError, match=r"runs without gradients: pass graphed\(step, optimizer\)"):
        step(torch.ones(2))
