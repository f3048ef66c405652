"""`graphed`: a handwritten training loop and inference, on a CPU and on a GPU."""

import ctypes
import functools

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from transformer_kernels.backends import cpu

unbuilt = cpu.unavailable(torch.device("cpu"))  # the dropout of the backend torch reads its seed
pytestmark = pytest.mark.skipif(unbuilt is not None, reason=str(unbuilt))
STEPS = 9
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(dropout=0.1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, activation="gelu", batch_first=True)
    whole = nn.Sequential(nn.Embedding(11, 16), layer, nn.Linear(16, 11)).train()
    tk.patch(whole)
    return whole


class Loop:
    """A handwritten training loop: clipped, with gradients set to None at various points."""

    def __init__(self, device, kind=torch.optim.AdamW, lr=1e-2, **options):
        self.model = model().to(device)
        self.optimizer = kind(self.model.parameters(), lr=lr, **options)

    def __call__(self, tokens, *, targets):
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return {"loss": loss, "norm": norm}

    def state(self):
        moments = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *moments)]


def batches(device, lengths=(8,)):
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        tokens = torch.randint(11, (4, lengths[step % len(lengths)]), generator=generator).to(device)
        yield tokens, tokens.roll(1, 1)


def trained(device, step, lengths=(8,), between=lambda number: None):
    torch.manual_seed(7)
    results = []
    for number, (tokens, targets) in enumerate(batches(device, lengths)):
        between(number)
        results.append(step(tokens, targets=targets))
    return [each[name].item() for each in results for name in ("loss", "norm")]


def graphs(step):
    return [graph for graphs in step._captured.values() for graph in graphs]


def same(found, expected, device):
    exact = torch.equal if device == "cpu" else torch.allclose
    return len(found) == len(expected) and all(map(exact, found, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(8,), (8, 5)])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    ],
)
def test_a_loop_gives_the_same_numbers(device, lengths, kind, options):
    plain, loop = Loop(device, kind, **options), Loop(device, kind, **options)
    step = tk.graphed(loop, loop.optimizer)
    expected = trained(device, plain, lengths)
    assert trained(device, step, lengths) == pytest.approx(expected, rel=0.0 if device == "cpu" else 1e-3)
    assert same(loop.state(), plain.state(), device)
    assert len(graphs(step)) == len(lengths)
    assert all(each.grad is None for each in loop.model.parameters())


def written(loop, scheduler, number):
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.01 / (1 + number)


def scheduled(loop, scheduler, number):
    if number:
        scheduler.step()


@pytest.mark.parametrize("change", [written, scheduled])
def test_a_learning_rate_that_changes_between_steps_is_used(change):
    results = []
    for wrapped in (False, True):
        loop = Loop("cpu", fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (1 + step))
        step = tk.graphed(loop, loop.optimizer) if wrapped else loop
        losses = trained("cpu", step, between=functools.partial(change, loop, scheduler))
        results.append((losses, loop.state()))
    assert results[0][0] == results[1][0]
    assert same(results[1][1], results[0][1], "cpu")
    assert graphs(step)


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "pad_token_id": None}
FAMILIES = {
    "GPT2LMHeadModel": SMALL | {"bos_token_id": 0, "eos_token_id": 0},
    "LlamaForCausalLM": SMALL | {"intermediate_size": 48, "num_key_value_heads": 1},
    "BertForMaskedLM": SMALL | {"intermediate_size": 48},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_is_one_graph(family):
    """Without a mask it reads the positions that it computed."""
    kind = getattr(pytest.importorskip("transformers"), family)
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        whole = kind(kind.config_class(**FAMILIES[family])).train()
        tk.patch(whole)
        optimizer = torch.optim.AdamW(whole.parameters(), fused=True)

        def step(tokens, whole=whole, optimizer=optimizer):
            optimizer.zero_grad()
            loss = whole(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            return loss

        run = tk.graphed(step, optimizer) if wrapped else step
        generator = torch.Generator().manual_seed(2)
        results.append([run(torch.randint(50, (2, 9), generator=generator)).item() for _ in range(7)])
    assert results[0] == results[1] and len(graphs(run)) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_is_only_asked(device):
    whole, generator = model(0.5).to(device).eval(), torch.Generator().manual_seed(1)
    ask = tk.graphed(whole)
    for number in range(12):
        tokens = torch.randint(11, (2, 5 + number % 2), generator=generator).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=number > 8), torch.inference_mode(number % 2 == 0):
            got = ask(tokens)
            with torch.no_grad():
                expected = whole(tokens)
        assert not got.requires_grad and got.dtype is expected.dtype
        torch.testing.assert_close(got, expected)
    assert len(graphs(ask)) == 2
    whole.train()
    assert not torch.equal(ask(tokens), ask(tokens))
    whole.eval().to(torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ask(tokens), whole(tokens))


def test_a_constant_has_graphs_of_its_own():
    times = tk.graphed(lambda x, factor: x * factor, warm_up_calls=0)
    for factor in (2, 2.0, 3, True):
        assert torch.equal(times(torch.tensor([1, 2]), factor), torch.tensor([1, 2]) * factor)
        assert times(torch.tensor([4, 2]), factor).dtype is (torch.tensor([1]) * factor).dtype
    assert len(graphs(times)) == 4


def reads(x):
    return x * x.sum().item()


def leaves_pytorch(x):
    return torch.from_numpy(x.numpy() * 2) + 1


def calls_another_library(x):
    """Writes by address, like a foreign kernel."""
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
    return y + 1


TOTAL = torch.zeros(4)


def adds_what_another_library_computes(x):
    TOTAL.add_(calls_another_library(x))
    return x + 1


def writes(x):
    return x.mul_(2)


@pytest.mark.parametrize(
    "function, message",
    [
        (reads, "the function cannot be captured: aten::_local_scalar_dense reads values on the host"),
        (leaves_pytorch, "Tensor.numpy reads values on the host"),
        (calls_another_library, "part of it is neither an operator of PyTorch nor a kernel of the backend cpu"),
        (adds_what_another_library_computes, "part of it is neither an operator of PyTorch nor a kernel"),
        (writes, "it writes to an argument"),
    ],
)
def test_what_cannot_be_recorded_is_refused(function, message):
    step = tk.graphed(function, warm_up_calls=1)
    x = torch.randn(4)
    step(x.clone())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            step(x)


class CountingSGD(torch.optim.Optimizer):
    """Its rate decreases with a counter in Python."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                each.sub_(each.grad * group["lr"] / state["step"])


NOT_FUSED = r"reads values on the host \(AdamW does, unless it has fused=True\)"


@pytest.mark.parametrize(
    "kind, message",
    [
        (CountingSGD, r"the optimizer counts in Python, .* was 3 and is 4\); use a fused one"),
        (torch.optim.AdamW, NOT_FUSED),
    ],
)
def test_an_optimizer_that_counts_on_the_host_is_refused(kind, message):
    loop = Loop("cpu", kind)
    with pytest.raises(RuntimeError, match=message):
        trained("cpu", tk.graphed(loop, loop.optimizer))


@pytest.mark.parametrize("place", ["before", "after", "argument"])
def test_what_is_refused_leaves_everything_as_it_was(place):
    loop = Loop("cpu", fused=True)

    def step(tokens, targets):
        if place != "before":
            loop(tokens, targets=targets)
        if place == "argument":
            return targets.add_(1)
        return leaves_pytorch(loop.model[0].weight.detach()) if place == "before" else torch.tensor(tokens.sum().item())

    run = tk.graphed(step, loop.optimizer)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        for tokens, targets in batches("cpu"):
            state, random = loop.state(), torch.get_rng_state()
            run(tokens, targets.clone())
    assert same(loop.state(), state, "cpu")
    assert torch.equal(torch.get_rng_state(), random)


def test_gradients_do_not_cross_the_border():
    loop = Loop("cpu", fused=True)
    step = tk.graphed(loop, loop.optimizer)
    (tokens, targets), *_ = batches("cpu")
    assert not any(each.requires_grad for each in step(tokens, targets=targets).values())
    loop.model(tokens).sum().backward()
    with pytest.raises(ValueError, match="a parameter has a gradient before the step; accumulate within the step"):
        step(tokens, targets=targets)
    add = tk.graphed(torch.add, warm_up_calls=0)
    for _ in range(2):  # before a graph is there and after
        with pytest.raises(ValueError, match="an argument requires gradients"):
            add(torch.ones(2), torch.ones(2, requires_grad=True))
        with pytest.raises(ValueError, match=r"tensors must be on one device; got \['cpu', 'meta'\]"):
            add(torch.ones(2), torch.ones(2, device="meta"))
        assert add(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0] and graphs(add)
    with pytest.raises(TypeError, match="the function must return tensors; got float"):
        tk.graphed(lambda x: x.sum().item())(torch.ones(2))


def test_accumulated_gradients_and_random_numbers_of_a_generator():
    def loop():
        whole = model()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
        generator = torch.Generator().manual_seed(5)

        def step(parts):
            for part in parts:
                hidden = torch.rand(part.shape, generator=generator) < 0.2
                loss = nn.functional.cross_entropy(whole(part.masked_fill(hidden, 0)).mT, part)
                (loss / len(parts)).backward()
            optimizer.step()
            return loss

        return step, optimizer

    results = []
    for wrapped in (False, True):
        step, optimizer = loop()
        run = tk.graphed(step, optimizer) if wrapped else step
        torch.manual_seed(7)
        losses = []
        for tokens, other in batches("cpu"):
            losses.append(run([tokens, other]).item())
            optimizer.zero_grad()
        results.append(losses)
    assert results[0] == results[1]
    assert graphs(run)


def test_attention_sinks_are_trained_in_a_recorded_step():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    found = []
    for recorded in (False, True):
        sinks = nn.Parameter(torch.tensor([0.5, -1.0]))
        optimizer = torch.optim.SGD([sinks], lr=0.5, fused=True)

        def step(q, k, v, sinks=sinks, optimizer=optimizer):
            optimizer.zero_grad()
            out = tk.attention(q, k, v, sinks=sinks, causal=True)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        called = tk.graphed(step, optimizer, warm_up_calls=1) if recorded else step
        losses = [called(q, k, v).item() for _ in range(5)]
        assert len(set(losses)) == 5
        found.append((losses, sinks.detach().clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
