"""Inside a block of `accelerate`, calls of torch have the results that they have outside it; the report counts them."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.decomposition  # imported late it failed in one random order (torch 2.13)
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from transformer_kernels.backends import cpu
from transformer_kernels.ops import _crossovers
from transformer_kernels.patching import _torch_calls
from transformer_kernels.patching._accelerate import _installed

BACKENDS = ["torch"]
if cpu.unavailable(torch.device("cpu")) is None:
    BACKENDS.append("cpu")
BEST = BACKENDS[-1]

B, H, L, D = 2, 4, 6, 8
FUNCTION_NAMES = [(owner, name) for owner, name, _, _ in _torch_calls.FUNCTIONS] + [(Tensor, "softmax")]


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def qkv(queries: int = L, keys: int = L, shared: int = H, width: int = D) -> list[Tensor]:
    return [leaf(B, H, queries, D), leaf(B, shared, keys, D, seed=1), leaf(B, shared, keys, width, seed=2)]


PADDING = torch.tensor([[True] * L, [True] * 3 + [False] * 3])
TRIANGLE = torch.ones(L, L, dtype=torch.bool).tril()
PROBABILITIES = leaf(6, 7).detach().softmax(1)
SMALL = (0.01 * leaf(5, 7).detach()).requires_grad_()  # its squares are below the eps of 16 bits
TOKENS = torch.tensor([[1, 0, 4], [2, 2, 5]])

REROUTED: dict[str, tuple[str, Any]] = {
    "attention": ("attention", lambda: (F.scaled_dot_product_attention, qkv(), {})),
    "causal": ("attention", lambda: (F.scaled_dot_product_attention, qkv(), {"is_causal": True})),
    "causal, fewer keys": ("attention", lambda: (F.scaled_dot_product_attention, qkv(L, 4), {"is_causal": True})),
    "causal, more keys": ("attention", lambda: (F.scaled_dot_product_attention, qkv(4, L), {"is_causal": True})),
    "scale": ("attention", lambda: (F.scaled_dot_product_attention, qkv(), {"scale": 0.7})),
    "grouped": ("attention", lambda: (F.scaled_dot_product_attention, qkv(shared=2), {"enable_gqa": True})),
    "wide values": ("attention", lambda: (F.scaled_dot_product_attention, qkv(width=12), {})),
    "padding": ("attention", lambda: (F.scaled_dot_product_attention, [*qkv(), PADDING[:, None, None]], {})),
    "expanded padding": (
        "attention",
        lambda: (F.scaled_dot_product_attention, [*qkv(), PADDING[:, None, None].expand(B, 1, L, L)], {}),
    ),
    "boolean": ("attention", lambda: (F.scaled_dot_product_attention, [*qkv(), TRIANGLE], {})),
    "boolean of heads": (
        "attention",
        lambda: (F.scaled_dot_product_attention, [*qkv(), (leaf(B, H, L, L) > -0.5) | torch.eye(L, dtype=bool)], {}),
    ),
    "fully masked queries": (
        "attention",
        lambda: (F.scaled_dot_product_attention, [*qkv(), TRIANGLE & (torch.arange(L) > 1)[:, None]], {}),
    ),
    "bias": ("attention", lambda: (F.scaled_dot_product_attention, [*qkv(), leaf(1, H, L, L)], {})),
    "additive padding": (
        "attention",
        lambda: (
            F.scaled_dot_product_attention,
            [*qkv(), torch.zeros(B, 1, 1, L, dtype=torch.float64).masked_fill(~PADDING[:, None, None], -math.inf)],
            {},
        ),
    ),
    "dropout 0": ("attention", lambda: (F.scaled_dot_product_attention, [*qkv(), None, 0.0, False], {})),
    "layer_norm": ("layer_norm", lambda: (F.layer_norm, [leaf(3, 5, 7), (7,), leaf(7), leaf(7, seed=3)], {})),
    "layer_norm without bias": ("layer_norm", lambda: (torch.layer_norm, [leaf(5, 7), [7], leaf(7), None, 0.1], {})),
    "rms_norm": ("rms_norm", lambda: (F.rms_norm, [leaf(3, 5, 7), (7,), leaf(7)], {"eps": 0.01})),
    "rms_norm, no weight or eps": ("rms_norm", lambda: (F.rms_norm, [SMALL, torch.Size([7])], {})),
    "gelu": ("gelu", lambda: (F.gelu, [leaf(4, 9)], {})),
    "gelu tanh": ("gelu", lambda: (F.gelu, [leaf(4, 9)], {"approximate": "tanh"})),
    "softmax": ("softmax", lambda: (F.softmax, [leaf(4, 3, 9)], {"dim": 2})),
    "softmax of torch": ("softmax", lambda: (torch.softmax, [leaf(4, 9)], {"dim": -1})),
    "softmax of a tensor": ("softmax", lambda: (Tensor.softmax, [leaf(4, 9), -1], {})),
    "softmax in another dtype": ("softmax", lambda: (F.softmax, [leaf(4, 9), -1], {"dtype": torch.float32})),
    "cross_entropy": ("cross_entropy", lambda: (F.cross_entropy, [leaf(6, 7), TOKENS.flatten()], {})),
    "cross_entropy, options": (
        "cross_entropy",
        lambda: (
            F.cross_entropy,
            [leaf(6, 7), TOKENS.flatten()],
            {"weight": leaf(7).detach().abs(), "ignore_index": 2, "label_smoothing": 0.1, "reduction": "none"},
        ),
    ),
    "cross_entropy, sum": (
        "cross_entropy",
        lambda: (F.cross_entropy, [leaf(6, 7), TOKENS.flatten()], {"reduction": "sum"}),
    ),
    "cross_entropy, axis 1": ("cross_entropy", lambda: (F.cross_entropy, [leaf(2, 3, 7).transpose(1, 2), TOKENS], {})),
    "cross_entropy, square": (
        "cross_entropy",
        lambda: (F.cross_entropy, [leaf(2, 3, 3).transpose(1, 2), TOKENS % 3], {"reduction": "none"}),
    ),
    "linear": ("linear", lambda: (F.linear, [leaf(3, 5, 7), leaf(4, 7), leaf(4)], {})),
    "linear without bias": ("linear", lambda: (F.linear, [leaf(5, 7), leaf(4, 7)], {"bias": None})),
    "embedding": ("embedding", lambda: (F.embedding, [TOKENS, leaf(7, 3)], {})),
    "embedding, padding": ("embedding", lambda: (F.embedding, [TOKENS, leaf(7, 3)], {"padding_idx": 2})),
    "embedding, one axis": ("embedding", lambda: (F.embedding, [TOKENS[0].int(), leaf(7, 3)], {})),
}  # fmt: skip

LEFT: dict[str, Any] = {
    "attention of three axes": lambda: (F.scaled_dot_product_attention, [x[0] for x in qkv()], {}),
    "a mask beside causality": lambda: (
        F.scaled_dot_product_attention, [*qkv(), PADDING[:, None, None]], {"is_causal": True},
    ),
    "no weight": lambda: (F.layer_norm, [leaf(5, 7), (7,)], {}),
    "two axes": lambda: (F.layer_norm, [leaf(3, 5, 7), (5, 7), leaf(5, 7), leaf(5, 7)], {}),
    "softmax over another axis": lambda: (F.softmax, [leaf(4, 9), 0], {}),
    "probabilities": lambda: (F.cross_entropy, [leaf(6, 7), PROBABILITIES], {}),
    "classes not innermost": lambda: (F.cross_entropy, [leaf(2, 7, 3), TOKENS], {}),
    "one row": lambda: (F.cross_entropy, [leaf(7), torch.tensor(3)], {}),
    "one feature": lambda: (F.linear, [leaf(5, 7), leaf(7)], {}),
    "empty": lambda: (F.gelu, [leaf(0, 7)], {}),
    "by frequency": lambda: (F.embedding, [TOKENS, leaf(7, 3)], {"scale_grad_by_freq": True}),
}  # fmt: skip


def with_gradients(call: Any) -> list[Tensor]:
    """The result and the gradients of the leaves, weighted unevenly."""
    function, arguments, options = call
    y = function(*arguments, **options)
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    weights = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), leaves)] if leaves else [y]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", REROUTED)
def test_a_rerouted_call_means_the_same(name: str, autocast: bool) -> None:
    """In float64, so that another alignment, polarity or axis cannot hide in a tolerance; autocast leaves it alone."""
    operation, make = REROUTED[name]
    expected = with_gradients(make())
    with tk.accelerate(backend="torch") as block, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = with_gradients(make())
    assert [(row.operation, row.backend, row.calls) for row in block.report().rows] == [(operation, "torch", 1)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype and mine.shape == theirs.shape
        near = 1e-6 if mine.dtype is torch.float32 else 1e-10
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REROUTED)
def test_dtypes_are_those_of_torch(name: str, dtype: torch.dtype, autocast: bool) -> None:
    def make() -> Any:
        function, arguments, options = REROUTED[name][1]()
        arguments = [x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        if isinstance(weight := options.get("weight"), Tensor):
            options = options | {"weight": weight.to(dtype)}
        if function is F.cross_entropy and arguments[0].dim() == 3:
            arguments[0] = arguments[0].detach().transpose(1, 2).contiguous().transpose(1, 2)
        return function, arguments, options

    outcomes = []
    for block in (tk.accelerate(backend="cpu"), nullcontext()):
        with block, torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            function, arguments, options = make()
            outcomes.append(function(*arguments, **options))
    mine, theirs = outcomes
    assert mine.dtype is theirs.dtype
    near = 0.04 if torch.bfloat16 in (dtype, mine.dtype) or autocast else 1e-5
    torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_counterpart_is_left_and_counted(name: str) -> None:
    try:
        expected = with_gradients(LEFT[name]())
    except RuntimeError as error:
        pytest.skip(f"this release of torch refuses it: {error}")
    with tk.accelerate(backend="torch") as block:
        found = with_gradients(LEFT[name]())
    (row,) = block.report().rows
    assert row.backend is None and row.reason and row.calls == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_errors_are_torchs() -> None:
    calls: list[Any] = [
        lambda: F.linear(),
        lambda: F.linear(leaf(5, 7), leaf(4, 6)),
        lambda: F.gelu(leaf(5), approximate="erf"),
        lambda: F.gelu(3),
        lambda: F.scaled_dot_product_attention(*qkv(shared=2)),
        lambda: F.cross_entropy(leaf(6, 7), TOKENS.flatten().int()),
        lambda: F.cross_entropy(leaf(6, 7), TOKENS.flatten(), leaf(7)),
        lambda: F.cross_entropy(leaf(6, 7), TOKENS.flatten(), leaf(7).detach().float()),
        lambda: torch.softmax(leaf(5), "x"),
    ]
    for call in calls:
        with pytest.raises(Exception) as theirs:  # whatever torch raises
            call()
        with tk.accelerate(backend="torch"), pytest.raises(theirs.type) as mine:
            call()
        assert str(mine.value) == str(theirs.value)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
@pytest.mark.parametrize("options", [{"label_smoothing": -0.1}, {"label_smoothing": 1.5}, {"weight": torch.ones(7)}])
def test_auto_leaves_what_the_operations_refuse(options: dict[str, Any]) -> None:
    """PyTorch accepts it, or raises an error of its own."""
    logits, targets = torch.randn(512, 512, requires_grad=True), torch.arange(512)
    results = []
    for block in (nullcontext(), tk.accelerate()):
        with block:
            try:
                results.append(F.cross_entropy(logits, targets, **options).item())
            except RuntimeError as error:
                results.append(str(error))
    assert results[0] == results[1]
    assert "does not accept" in block.report().left[0].reason


def test_options_without_a_counterpart() -> None:
    x, out = leaf(4, 9).detach(), torch.empty(4, 9, dtype=torch.float64)
    with tk.accelerate(backend="torch") as block:
        torch.softmax(x, -1, out=out)
    assert torch.equal(out, x.softmax(-1)) and "out=" in block.report().left[0].reason


def test_dropout_of_attention() -> None:
    q, k, v = (x.detach() for x in qkv(64, 64))
    with tk.accelerate(backend="torch") as block:
        torch.manual_seed(0)
        dropped = F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
    assert block.report().rerouted
    assert 0.97 < dropped.mean() < 1.03 and dropped.std() > 0.01


def test_transforms_and_subclasses_are_left() -> None:
    class Marked(Tensor):
        pass

    x = leaf(3, 9)
    with tk.accelerate(backend="torch") as block:
        torch.testing.assert_close(torch.vmap(F.gelu)(x), F.gelu(x.detach()))
        assert isinstance(F.gelu(x.detach().as_subclass(Marked)), Marked)
    assert len(block.report().left) == 2


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
def test_small_calls_are_left_by_auto_and_taken_by_a_named_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gelu_tanh", "rms_norm", "attention"):
        monkeypatch.setitem(_crossovers.TABLE[_crossovers.level()], (f"{name} rerouted", 4), (1 << 15, 1 << 15))
    small, large = torch.randn(4, 16), torch.randn(256, 4096)
    for backend, computed in ((None, {None: 3, "cpu": 3}), ("auto", {None: 3, "cpu": 3}), ("cpu", {"cpu": 6})):
        with tk.accelerate(backend=backend) as block:
            for x in (small, large):
                F.gelu(x, approximate="tanh")
                F.rms_norm(x, x.shape[-1:])
                F.scaled_dot_product_attention(*[x.view(1, 4, -1, 16)[:, :, :512]] * 3)
        found: dict[Any, int] = {}
        for row in block.report().rows:
            found[row.backend] = found.get(row.backend, 0) + row.calls
        assert found == computed


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
def test_a_named_backend_raises_rather_than_fall_back() -> None:
    x = torch.randn(4, 16, dtype=torch.float64)
    with tk.accelerate(backend="cpu"), pytest.raises(tk.UnsupportedByBackend, match="float64"):
        F.gelu(x)
    with tk.accelerate(backend="auto") as block:
        F.gelu(x.expand(4096, 4, 16).contiguous(), approximate="tanh")
    assert block.report().left[0].reason == "there are no kernels for torch.float64"
    with tk.use_backend("torch"), tk.accelerate() as block:
        F.gelu(x)
    assert block.report().rerouted[0].backend == "torch"
    with pytest.raises(ValueError, match="backend must be one of"):
        tk.accelerate(backend="nonsense")


def test_outside_the_block_nothing_is_exchanged() -> None:
    before = [getattr(owner, name) for owner, name in FUNCTION_NAMES]
    with tk.accelerate():
        with tk.accelerate(backend="torch"):
            pass
        assert all(getattr(o, n) is not b for (o, n), b in zip(FUNCTION_NAMES, before, strict=True))
    assert all(getattr(o, n) is b for (o, n), b in zip(FUNCTION_NAMES, before, strict=True))
    assert "softmax" not in vars(Tensor) and _installed._blocks == 0
    with pytest.raises(KeyError), tk.accelerate():
        raise KeyError
    assert F.gelu is before[2] and _installed._blocks == 0


def test_another_librarys_exchange_outlives_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "gelu", F.gelu)  # put back at the end
    with tk.accelerate(backend="torch"):
        theirs = lambda x, inner=F.gelu: inner(x)  # noqa: E731
        F.gelu = theirs
    with tk.accelerate(backend="torch"):
        assert F.gelu is theirs
    assert F.gelu is theirs
    torch.testing.assert_close(theirs(torch.ones(3)), torch._C._nn.gelu(torch.ones(3)))


def test_blocks_belong_to_threads() -> None:
    inside, leave = threading.Event(), threading.Event()
    reports = []

    def other() -> None:
        with tk.accelerate(backend="torch") as block:
            F.gelu(torch.ones(3))
            inside.set()
            leave.wait(10)
            reports.append(block.report())

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    F.gelu(torch.ones(3))
    with tk.accelerate(backend="torch") as mine:
        F.gelu(torch.ones(3))
        F.gelu(torch.ones(3))
    F.gelu(torch.ones(3))
    leave.set()
    thread.join()
    assert reports[0].rows[0].calls == 1 and mine.report().rows[0].calls == 2
    assert _installed._blocks == 0


def test_the_innermost_block_counts() -> None:
    x = torch.ones(3)
    with tk.accelerate(backend="torch") as outer:
        with tk.accelerate(backend="torch") as inner:
            F.gelu(x)
        F.gelu(x)
        with outer:
            F.gelu(x)
    assert inner.report().rows[0].calls == 1 and outer.report().rows[0].calls == 2


def test_our_own_operations_are_not_rerouted_again() -> None:
    """A named backend of a call inside the block is kept, and second derivatives do not go round in circles."""
    x = torch.randn(512, 1024, requires_grad=True)
    with tk.accelerate(backend=BEST) as block:
        y = tk.gelu(x, backend="torch")
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.sum().backward()
        norm = F.layer_norm(x, x.shape[-1:], torch.ones(1024), torch.zeros(1024))
        (dx,) = torch.autograd.grad(norm.square().sum(), x, create_graph=True)
        dx.sum().backward()
    assert [(row.operation, row.calls) for row in block.report().rows] == [("layer_norm", 1)]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 4)
        self.up, self.down, self.act = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.GELU("tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Textbook(nn.Module):
    """A GPT as it is written by hand: torch.nn's modules and torch.nn.functional."""

    def __init__(self, width: int = 32, vocabulary: int = 61, length: int = 48, recompute: bool | None = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.recompute = recompute  # use_reentrant of the checkpoints, None for none

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def textbook(**options: Any) -> tuple[Textbook, Textbook]:
    torch.manual_seed(0)
    model = Textbook(**options)
    return model, copy.deepcopy(model)


def batch(rows: int = 4, length: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone().masked_fill_(tokens[:, 1:] == 7, -1)


def losses_of(model: nn.Module, block: Any, steps: int = 10, autocast: bool = False) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        with block, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch(seed=step % 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CALLS = {"embedding": 2, "layer_norm": 5, "linear": 9, "attention": 2, "gelu": 2, "cross_entropy": 1}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_textbook_model_learns_the_same(autocast: bool) -> None:
    plain, ours = textbook()
    block = tk.accelerate(backend=BEST)
    mine, theirs = losses_of(ours, block, autocast=autocast), losses_of(plain, nullcontext(), autocast=autocast)
    assert mine == pytest.approx(theirs, abs=0.05 if autocast else 2e-5)
    assert theirs[-1] < theirs[0] - 0.1
    assert {row.operation: row.calls for row in block.report().rows} == {k: 10 * n for k, n in CALLS.items()}
    assert not block.report().left


@pytest.mark.parametrize("recompute", [False, True])
def test_checkpoints_recompute_inside_the_block(recompute: bool) -> None:
    """Backward runs after the block; unless recomputed calls are rerouted, their saved tensors do not match."""
    plain, ours = textbook(recompute=recompute)
    handle = tk.accelerate(ours, backend=BEST)
    mine, theirs = losses_of(ours, nullcontext(), 3), losses_of(plain, nullcontext(), 3)
    assert mine == pytest.approx(theirs, abs=1e-5)
    counted = {row.operation: row.calls for row in handle.report().rows}
    assert (counted["attention"], counted["cross_entropy"]) == (12, 3)
    assert _installed._blocks == 0


def test_one_models_forward() -> None:
    plain, ours = textbook()
    block = tk.accelerate(ours, backend="torch")
    twin, loaded = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    expected = plain(*batch())
    assert not block.report().rows
    for model in (ours, twin, loaded):
        torch.testing.assert_close(model(*batch()), expected)
    assert block.report().rerouted[0].calls == 2, "a copy counts for itself"
    with pytest.raises(IndexError):
        ours(torch.tensor([[99]]), torch.tensor([[0]]))
    assert _installed._blocks == 0
    block.remove()
    ours(*batch())
    assert block.report().rerouted[0].calls == 2 and not ours._forward_hooks and not ours._forward_pre_hooks


def test_functions() -> None:
    @tk.accelerate
    def bare(x: Tensor) -> Tensor:
        return F.gelu(x)

    @tk.accelerate(backend="torch")
    def named(x: Tensor) -> Tensor:
        """Its own docstring."""
        return F.gelu(x)

    torch.testing.assert_close(bare(torch.ones(3)), named(torch.ones(3)))
    assert named.__doc__ == "Its own docstring." and bare.acceleration.report().rows[0].calls == 1
    with pytest.raises(TypeError, match="a function or a module is needed"):
        tk.accelerate("model")
    with pytest.raises(TypeError, match="generator or a coroutine"):

        @tk.accelerate
        def generator() -> Any:
            yield F.gelu


def test_modules_of_torch_nn() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, nn.GELU(), batch_first=True).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = layer(x, src_key_padding_mask=padding)
    with tk.accelerate(backend="torch") as block:
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), expected, rtol=1e-9, atol=1e-9)
    counted = {row.operation: row.calls for row in block.report().rerouted}
    assert counted["attention"] == 1 and counted["layer_norm"] == 2 and counted["gelu"] == 1


def test_compiled_code_is_the_compilers() -> None:
    plain, ours = textbook()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with tk.accelerate(backend="torch") as block:
        loss = compiled(*batch())
        loss.backward()
    torch.testing.assert_close(loss, plain(*batch()))
    assert not block.report().rerouted
    torch.testing.assert_close(compiled(*batch()), loss)
    handle = tk.accelerate(plain, backend="torch")
    torch.testing.assert_close(torch.compile(plain, backend="aot_eager", fullgraph=True)(*batch()), loss)
    assert not handle.report().rerouted


def test_scripts_made_inside_the_block() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w)) * F.softmax(x, -1) + F.layer_norm(x, [3])

    x, w = torch.randn(2, 3), torch.randn(3, 3)
    with tk.accelerate(backend="torch"):
        scripted = torch.jit.script(gated)
        torch.testing.assert_close(scripted(x, w), gated(x, w))
        traced = torch.jit.trace(gated, (x, w))
    torch.testing.assert_close(scripted(x, w), gated(x, w))
    torch.testing.assert_close(traced(x, w), gated(x, w))


def test_references_taken_inside_the_block() -> None:
    """They pass calls on outside it, do not bind as methods, and are copied and pickled as torch's."""
    with tk.accelerate(backend="torch"):
        taken = F.gelu

        class Module:
            act = F.gelu

        assert pickle.loads(pickle.dumps(taken)) is taken
        assert pickle.dumps([F.relu, F.cross_entropy, torch._C._nn.gelu])  # the originals, which stay importable
    assert pickle.loads(pickle.dumps(taken)) is F.gelu and copy.deepcopy(taken) is F.gelu
    x = torch.randn(3)
    assert torch.equal(taken(x), F.gelu(x)) and torch.equal(Module().act(x), F.gelu(x))
    assert "gelu" in repr(taken)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
def test_graphed_steps_see_the_kernels() -> None:
    plain, ours = textbook()
    block = tk.accelerate(backend="cpu")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (plain, ours)]

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, around: Any) -> Any:
        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            with around:
                loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    graphed = tk.graphed(step_of(ours, optimizers[1], block), optimizers[1])
    eager = step_of(plain, optimizers[0], nullcontext())
    for step in range(6):
        mine = graphed(*batch(seed=step))
        theirs = eager(*batch(seed=step))
        assert mine.item() == pytest.approx(theirs.item(), abs=1e-4)
    assert block.report().rerouted and not block.report().left


class Softened(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return F.softmax(torch.full((64, 256), float(index)), -1)


def test_data_loader_workers() -> None:
    """Forked inside the block, after kernels have run in it."""
    with tk.accelerate(backend=BEST) as block:
        F.gelu(torch.randn(512, 512))
        loaded = list(torch.utils.data.DataLoader(Softened(), num_workers=2))
        F.gelu(torch.randn(512, 512))
    assert len(loaded) == 4 and all(torch.allclose(x.sum(-1), torch.ones(())) for x in loaded)
    assert block.report().rerouted[0].calls == 2


def test_the_report_prints() -> None:
    x = torch.randn(4, 8)
    with tk.accelerate(backend="torch") as block:
        F.gelu(x)
        F.gelu(x)
        F.cross_entropy(x, x.detach())
    text = str(block.report()).splitlines()
    assert text[0].split() == ["operation", "computed", "by", "calls"]
    assert text[2].split() == ["gelu", "torch", "2"]
    assert text[3].split() == ["cross_entropy", "PyTorch:", "the", "targets", "are", "probabilities", "1"]
    assert text[4] == "2 calls rerouted, 1 left to PyTorch; backend 'torch'"
    assert block.report().line() == (
        "2 calls rerouted, 1 left to PyTorch: gelu 2 (torch), cross_entropy 1 (the targets are probabilities)"
    )
    assert tk.accelerate().report().line() == "0 calls rerouted, 0 left to PyTorch"


def test_functions_that_are_not_rerouted_cost_what_they_did() -> None:
    functions = torch.relu, torch.nn.functional.dropout, torch.Tensor.add
    modes = torch.overrides._get_current_function_mode_stack()
    with tk.accelerate():
        assert functions == (torch.relu, torch.nn.functional.dropout, torch.Tensor.add)
        assert torch.overrides._get_current_function_mode_stack() == modes


def test_a_call_with_fewer_arguments_than_one_that_was_left() -> None:
    x, w = torch.randn(2, 3), torch.randn(3)
    with tk.accelerate() as block:
        for arguments in ((x, [3], w, None, 0.0), (x, [3]), (x, [3], w)):
            torch.testing.assert_close(F.layer_norm(*arguments), torch.layer_norm(*arguments))
    assert sum(row.calls for row in block.report().rows) == 6


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernels are not built")
def test_sizes_that_are_left_without_a_look_at_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those below both sizes of an operation, in inference below one; sizes before PyTorch's begin are rerouted."""
    table, x = _crossovers.TABLE[_crossovers.level()], torch.randn(4, 16)
    q, k = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 8, 4)
    for limits, left in (((65, 65), True), ((65, 64), False), (((65, 66), 65), False), (((0, 65), 65), True)):
        for name in ("gelu", "gelu_tanh", "softmax", "attention", "embedding"):
            monkeypatch.setitem(table, (f"{name} rerouted", 4), limits)
        _crossovers.of_pytorch.cache_clear()
        _torch_calls.left_below.cache_clear()
        for name, args, kwargs in (
            ("gelu", (x,), {}),
            ("gelu", (x,), {"approximate": "tanh"}),
            ("softmax", (x, -1), {}),
            ("attention", (q, k, k), {}),  # 2 x 4 x 8 scores
            ("embedding", (torch.randn(9, 16), torch.zeros(4, dtype=torch.int64)), {}),
        ):
            assert _torch_calls.is_left(name, args, kwargs) is left, (name, limits)
            with torch.no_grad():  # attention may draw random numbers, which do not depend on the mode
                alone = limits in ((65, 64), ((0, 65), 65)) and name not in ("attention", "embedding")
                assert _torch_calls.is_left(name, args, kwargs) is (left or alone), (name, limits)
    assert not _torch_calls.is_left("gelu", (x.double(),), {})
    assert not _torch_calls.is_left("gelu", (), {"input": x})
    _crossovers.of_pytorch.cache_clear()
    _torch_calls.left_below.cache_clear()


def test_products_that_save_less_than_the_checks_of_a_call_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of weights in memory, not in bfloat16, and not where every product is ours."""
    x = torch.randn(64, 128)
    cases = (32, 64, 1023, True), (32, 64, 1024, False), (8, 16, 2047, True), (8, 16, 2048, False), (0, 1, 8, False)
    for fewest, rows, columns, left in cases:
        monkeypatch.setattr(_torch_calls.linear_cpu, "few_rows", lambda *_, fewest=fewest: fewest)
        assert _torch_calls.is_left("linear", (x[:rows], torch.empty(columns, 128)), {}) is left
    with torch.autocast("cpu", torch.bfloat16):
        assert not _torch_calls.is_left("linear", (x, torch.empty(8, 128)), {})
