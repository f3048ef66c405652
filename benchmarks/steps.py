"""Whole training steps: the ladder from the plain reference to our kernels in one CUDA graph.

A step is forward, cross-entropy, backward and AdamW on a batch that lies on the device. Every rung starts from the same
weights and must give the reference's loss and gradient norm (dropout off) before it is timed (dropout on). A compiled
one is checked as it will be timed, with dropout on and so more loosely: compiling it twice would cost a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import python_ref
import transformer_kernels as tk
from benchmarks import timing
from benchmarks.correctness import WrongResult
from benchmarks.measure import Bench, Row
from benchmarks.peers import Skipped
from transformer_kernels import _dispatch

LOSS_TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 2e-2}
"""Relative, of the loss against the float32 reference; the gradient norm may be off by five times as much."""
WITH_DROPOUT = 1e-1
"""The same where dropout is on."""
SEED = 7


@dataclass(frozen=True)
class Recipe:
    """A preset model and the shape of its batch."""

    model: str
    batch: int
    length: int


@dataclass(frozen=True)
class Rung:
    """One way to run a step.

    Args:
        name: of the candidate.
        operations: "reference", "pytorch" (SDPA and torch's own fused kernels), or one of our backends.
        precision: "float32", "tf32" or "bfloat16" (autocast).
        fused_optimizer: AdamW in one kernel.
        compile: None, or a mode of torch.compile.
        graph: the whole step captured in one CUDA graph.
    """

    name: str
    operations: str
    precision: str
    fused_optimizer: bool = True
    compile: str | None = None
    graph: bool = False


LADDER = (
    Rung("reference fp32", "reference", "float32", fused_optimizer=False),
    Rung("reference TF32", "reference", "tf32", fused_optimizer=False),
    Rung("reference bf16", "reference", "bfloat16", fused_optimizer=False),
    Rung("reference + compile, fp32", "reference", "float32", compile="default"),
    Rung("SDPA + fused AdamW, fp32", "pytorch", "float32"),
    Rung("SDPA + fused AdamW", "pytorch", "bfloat16"),
    Rung("SDPA + compile, fp32", "pytorch", "float32", compile="default"),
    Rung("SDPA + compile", "pytorch", "bfloat16", compile="default"),
    Rung("SDPA + compile + CUDA graphs", "pytorch", "bfloat16", compile="reduce-overhead"),
    Rung("SDPA + one graph", "pytorch", "bfloat16", graph=True),
    Rung("ours torch, fp32", "torch", "float32"),
    Rung("ours torch", "torch", "bfloat16"),
    Rung("ours triton", "triton", "bfloat16"),
    Rung("ours cuda", "cuda", "bfloat16"),
    Rung("ours triton + one graph", "triton", "bfloat16", graph=True),
    Rung("ours cuda + one graph", "cuda", "bfloat16", graph=True),
    Rung("ours auto + one graph", "auto", "bfloat16", graph=True),
)
CPU_RUNGS = (
    "reference fp32",
    "reference bf16",
    "reference + compile, fp32",
    "SDPA + fused AdamW, fp32",
    "SDPA + fused AdamW",
    "SDPA + compile, fp32",
    "ours torch, fp32",
    "ours torch",
)


def rungs(device: torch.device) -> list[Rung]:
    """The ladder for a device: bf16 on a GPU, both precisions on a CPU."""
    if device.type == "cpu":
        return [rung for rung in LADDER if rung.name in CPU_RUNGS or rung.graph or rung.precision == "tf32"]
    return [rung for rung in LADDER if rung.name == "reference fp32" or not rung.name.endswith("fp32")]


# PyTorch's own kernels under the names that the models call


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mask = options.get("key_padding_mask")
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else mask[:, None, None, :],
        dropout_p=options.get("dropout_p", 0.0),
        is_causal=options.get("causal", False),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _packed_attention(qkv: Tensor, *, heads: int, **options: Any) -> Tensor:
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = (part.transpose(1, 2) for part in qkv.split([heads, kv_heads, kv_heads], dim=2))
    return _attention(q, k, v, **options).transpose(1, 2).flatten(2)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, dropout_p) + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def _bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias)


def _embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> Tensor:
    x = F.embedding(tokens, weight)
    if scale != 1.0:
        x = x * scale
    if positions is not None:
        x = x + (positions[: tokens.shape[1]] if position_ids is None else F.embedding(position_ids, positions))
    if norm_weight is not None:
        x = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, eps)
    return F.dropout(x, dropout_p)


def _cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return _cross_entropy(F.linear(x, weight, bias), targets, **options)


PYTORCH_OPERATIONS = SimpleNamespace(
    attention=_attention,
    packed_attention=_packed_attention,
    layer_norm=_layer_norm,
    add_layer_norm=_add_layer_norm,
    gelu=_gelu,
    bias_gelu=_bias_gelu,
    bias_relu=_bias_relu,
    embedding=_embedding,
    cross_entropy=_cross_entropy,
    linear_cross_entropy=_linear_cross_entropy,
)


def operations(name: str, device: torch.device) -> Any:
    """The namespace that a rung's model calls; raises Skipped where it cannot run."""
    if name == "pytorch":
        return PYTORCH_OPERATIONS
    if name in tk.BACKENDS and name != "torch":
        if device.type == "cpu":
            raise Skipped("its kernels run on a GPU; on a CPU they are only interpreted or emulated, for tests")
        if (reason := _dispatch.unavailable(name, device)) is not None:
            raise Skipped(reason)
    return tk.bind(name)


# A step


class Step:
    """A model, its optimizer and one batch; calling it is one training step."""

    def __init__(self, recipe: Recipe, rung: Rung, device: torch.device, dropout: float | None) -> None:
        overrides = {} if dropout is None else {"dropout": dropout}
        preset = python_ref.preset(recipe.model)
        if recipe.length > preset.context:
            overrides["context"] = recipe.length
        torch.manual_seed(SEED)
        self.model: nn.Module = python_ref.build(recipe.model, ops=operations(rung.operations, device), **overrides)
        self.model.to(device).train()
        self.device, self.batch = device, batch(recipe, self.model.config.vocab_size, device)
        self.flops = self.model.flops_per_token(recipe.length) * recipe.batch * recipe.length
        self.autocast = rung.precision == "bfloat16"
        self.run: Callable[..., Tensor] = self.model.loss
        if rung.compile is not None:
            torch._dynamo.reset()
            self.run = torch.compile(self.model.loss, mode=None if rung.compile == "default" else rung.compile)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, fused=rung.fused_optimizer, capturable=rung.graph
        )

    def loss(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.run(*self.batch)

    def loss_and_gradient_norm(self) -> tuple[float, float]:
        """What a rung must agree on with the reference."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        norms = [parameter.grad.norm() for parameter in self.model.parameters() if parameter.grad is not None]
        return loss.item(), torch.stack(norms).norm().item()

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()


def batch(recipe: Recipe, vocabulary: int, device: torch.device) -> tuple[Tensor, ...]:
    """What the loss takes: random tokens and targets; for BERT labels, tokens of which a quarter is padding, a mask."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, vocabulary, (recipe.batch, recipe.length), generator=generator)
    if recipe.model != "imdb_bert":
        targets = torch.randint(0, vocabulary, tokens.shape, generator=generator)
        return tokens.to(device), targets.to(device)
    lengths = torch.linspace(recipe.length, max(1, recipe.length // 2), recipe.batch).long()
    mask = torch.arange(recipe.length) < lengths[:, None]
    labels = torch.randint(0, 2, (recipe.batch,), generator=generator)
    return labels.to(device), tokens.to(device), mask.to(device)


def check_step(recipe: Recipe, rung: Rung, device: torch.device) -> float:
    """The relative error of the loss against the float32 reference; raises WrongResult beyond the tolerance."""
    wanted = Step(recipe, LADDER[0], device, dropout=0.0).loss_and_gradient_norm()
    with _precision(rung.precision):
        dropout = 0.0 if rung.compile is None else None
        got = Step(recipe, rung, device, dropout).loss_and_gradient_norm()
    tolerance = LOSS_TOLERANCE[rung.precision] if rung.compile is None else WITH_DROPOUT
    for name, value, exact, allowed in zip(
        ("loss", "gradient norm"), got, wanted, (tolerance, 5 * tolerance), strict=True
    ):
        if not abs(value - exact) <= allowed * abs(exact):
            raise WrongResult(f"{name} {value:.6g} instead of {exact:.6g}")
    return abs(got[0] - wanted[0]) / abs(wanted[0])


class _precision:
    """float32 products as the rung wants them, and as they were afterwards."""

    def __init__(self, precision: str) -> None:
        self.setting = "high" if precision == "tf32" else "highest"

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.setting)

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def measure_step(recipe: Recipe, rung: Rung, bench: Bench) -> Row:
    """The row of one rung: seconds a step, tokens a second, model FLOP/s."""
    dtype = "bfloat16" if rung.precision == "bfloat16" else "float32"
    shape = {"B": recipe.batch, "L": recipe.length}
    row = bench.row("step", recipe.model, "training step", "step", rung.name, dtype, shape=shape, axis="L")

    def work() -> Row:
        if bench.device.type == "cpu" and (rung.graph or rung.compile == "reduce-overhead"):
            raise Skipped("CUDA graphs need a GPU")
        if bench.device.type == "cpu" and rung.precision == "tf32":
            raise Skipped("TF32 needs a GPU")
        row["error"] = check_step(recipe, rung, bench.device)
        with _precision(rung.precision):
            return _timed(row, recipe, rung, bench)

    return bench.attempt(row, work)


def _timed(row: Row, recipe: Recipe, rung: Rung, bench: Bench) -> Row:
    step = Step(recipe, rung, bench.device, dropout=None)
    if rung.graph:
        call = captured(step)
    elif rung.compile == "reduce-overhead":

        def call() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            step()
    else:
        call = step
    for _ in range(3 if bench.device.type == "cuda" else 1):
        call()
    measured = timing.time_steps(bench.device, call, bench.seconds)
    row["peak_memory"] = timing.peak_memory(bench.device, step if not rung.graph else call)
    row = bench.judged(row, measured, 0, step.flops)
    row["tokens_per_second"] = recipe.batch * recipe.length / measured.median
    return row


def captured(step: Step) -> timing.Call:
    """The whole step as one CUDA graph; gradients live in the graph's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    step.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step.loss()
        loss.backward()
        step.optimizer.step()
    graph.replay()
    if not torch.isfinite(loss):
        raise WrongResult("the replayed step's loss is not finite")
    return graph.replay
