"""Training around a compiled model: recorded steps, processes, adapters, transformers' Trainer, checkpoints."""

from __future__ import annotations

import copy
import itertools
import socket

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from benchmarks import timing
from tests.support import transformers_models as models
from transformer_kernels.backends import cpu
from transformer_kernels.patching import graph

ROWS, WIDTH = 4, 32


class Block(nn.Module):
    """Hand-written causal attention and a feed-forward network, both with a residual and a norm."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-2, -1) * 0.25).masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(x.shape)))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, p: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.head, self.reentrant = (
            nn.ModuleList(Block(p) for _ in range(2)),
            nn.Linear(WIDTH, 5),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def loss_of(model, x: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 5)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 16, WIDTH, generator=torch.Generator().manual_seed(seed))


def losses(step, count: int = 6) -> Tensor:
    return torch.stack([step(batch(seed)).detach().clone() for seed in range(count)])


def training_step(model, parameters):
    optimizer = torch.optim.SGD(parameters, 1e-1, momentum=0.9, fused=True)
    counted = itertools.count()

    def step(x: Tensor) -> Tensor:
        next(counted)
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer, counted


def test_a_step_of_a_compiled_model_is_recorded():
    eager = Model()
    ours = copy.deepcopy(eager)
    compiled = tk.compile(ours)
    expected = losses(training_step(eager, eager.parameters())[0])
    step, optimizer, counted = training_step(compiled, ours.parameters())
    recorded = tk.graphed(step, optimizer, warm_up_calls=2)
    torch.testing.assert_close(losses(recorded), expected, rtol=1e-4, atol=1e-5)
    assert next(counted) <= 4, "the calls after the recording ran the step's Python"
    assert compiled.report().matched["attention"] == 2 * 2, "once more under the modes of a recording"


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_inside_a_compiled_model(reentrant):
    """With dropout, whose mask the recomputation draws again: gradients are those of a model without checkpoints."""
    found = []
    for kind in (None, reentrant):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model(0.5, kind)
        compiled = tk.compile(model)
        torch.manual_seed(3)
        x = batch().requires_grad_()
        compiled(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-5)


def _worker(rank: int, port: int, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model()
    compiled = tk.compile(nn.parallel.DistributedDataParallel(model))
    step, _, _ = training_step(compiled, model.parameters())
    for seed in range(3):
        step(batch(2 * seed + rank))
    results[rank] = (torch.cat([each.detach().flatten() for each in model.parameters()]), compiled.report().matched)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_agree_with_one_of_twice_the_batch():
    if not torch.distributed.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_worker, (port, results), nprocs=2)
        found = dict(results)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1, momentum=0.9)
    for seed in range(3):
        sum(loss_of(model, batch(2 * seed + rank)) / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    torch.testing.assert_close(found[0][0], expected, rtol=1e-3, atol=1e-4)
    assert found[0][1]["attention"] >= 2


def test_low_rank_adapters():
    peft = pytest.importorskip("peft", reason="the package peft is not installed (extra `test`)")
    settings = {"r": 2, "target_modules": ["qkv", "up"], "init_lora_weights": False, "lora_alpha": 8}
    eager = peft.get_peft_model(Model(), peft.LoraConfig(**settings))
    ours = copy.deepcopy(eager)
    compiled = tk.compile(ours)
    for model in (eager, compiled):
        loss_of(model, batch()).backward()
    trained = [name for name, parameter in eager.named_parameters() if parameter.requires_grad]
    assert trained and all("lora" in name for name in trained)
    for (name, theirs), own in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (own.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert compiled.report().matched["attention"] == 2


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_trainer_trains_a_compiled_model(family, tmp_path):
    """Compiled in place: TrainingArguments(torch_compile_backend=) takes only the names that accelerate lists."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")
    pytest.importorskip("accelerate", reason="the package accelerate is not installed (extra `test`)")
    eager = models.make(family)
    ours = copy.deepcopy(eager)
    ours.compile(backend=graph.transformer_kernels)
    runs = []
    for model in (eager, ours):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            report_to=[], use_cpu=True, seed=0, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        given = models.inputs(family)
        rows = [{name: value[row] for name, value in given.items()} for row in range(2)] * 3
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(runs[0]) == 3
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=1e-3, atol=1e-3)


def test_generation_with_a_static_cache():
    pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")
    model = models.make("llama").eval()
    tokens = models.inputs("llama")["input_ids"][:1, :6]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    expected = model.generate(tokens, **options, disable_compile=True)
    model.forward = compiled = tk.compile(model.forward)
    assert torch.equal(model.generate(tokens, **options, disable_compile=True), expected)
    assert compiled.report().graphs >= 2, "the prompt and a token have a graph each"


compiled_kernels = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


@compiled_kernels
def test_attention_reads_views_of_the_projection():
    block, x = Block(), batch()
    compiled = tk.compile(block, backend="cpu")
    compiled(x)
    with cpu.recorded(calls := []):
        compiled(x)
    ((_, q, k, v, *_),) = (arguments for kernel, arguments in calls if kernel.__name__ == "attention_forward")
    assert [each[0] - q[0] for each in (q, k, v)] == [0, 4 * WIDTH, 8 * WIDTH]  # bytes in one row of the projection


class Language(nn.Module):
    """An output layer and its loss, of rows and classes that make several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16384, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(x).view(-1, 16384), targets.view(-1))


@compiled_kernels
def test_the_logits_of_a_loss_are_not_kept():
    model, x = Language(), torch.randn(2, 512, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.arange(1024).view(2, 512)
    compiled = tk.compile(model)
    found = []
    for function in (compiled, model):
        loss = function(x, targets)
        found.append((loss, *torch.autograd.grad(loss, (x, model.head.weight))))
        found[-1] += (timing.peak_memory(x.device, lambda: torch.autograd.grad(function(x, targets), x)),)  # noqa: B023
    assert compiled.report().matched == {"linear_cross_entropy": 1}
    for ours, eager in zip(*(each[:3] for each in found), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert found[0][3] < 0.5 * found[1][3]


@compiled_kernels
def test_conv1d_of_transformers():
    layer = models.transformers.pytorch_utils.Conv1D(512, 256)
    compiled = tk.compile(layer)
    x = torch.randn(2, 1024, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for function in (compiled, layer):
        y = function(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias))))
    assert compiled.report().matched == {"linear": 1}
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())
