"""Whole training steps, from the reference to our kernels in one CUDA graph.

A step is `transformer_kernels.training`'s: forward, cross-entropy, backward and AdamW, on a batch in device memory.
Every candidate starts from the same weights and must reproduce the reference's loss and gradient norm (dropout off)
before it is timed (dropout on). A compiled one is checked as it is timed, with dropout on and a larger tolerance,
because a second compilation would take a minute.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import python_ref
import transformer_kernels as tk
from benchmarks import other_models, pytorch, timing
from benchmarks.correctness import WrongResult
from benchmarks.measure import Bench, Row
from benchmarks.peers import Skipped, require
from python_ref.bert import BERTClassifier
from transformer_kernels.graphs import WARM_UP_CALLS, Graphed
from transformer_kernels.training.step import Batch, TrainingLoss, TrainingStep, matrix_products

LOSS_TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 2e-2}
"""Relative tolerance of the loss against the float32 reference; five times as much for the gradient norm."""
WITH_DROPOUT = 1e-1
"""The tolerance with dropout."""
SEED = 7
UNCLIPPED = math.inf
"""A bound at which a step computes the gradient norm but does not clip."""


@dataclass(frozen=True)
class Recipe:
    """A model and the shape of its batch.

    Args:
        model: a preset of `python_ref`, or one of `other_models.MODELS`.
        batch, length: sequences, and tokens in each, padding included.
        dropout: None for the model's own.
    """

    model: str
    batch: int
    length: int
    dropout: float | None = None

    @property
    def case(self) -> str:
        """The kind of row that it belongs to."""
        return "training step" if self.dropout is None else f"training step, dropout {self.dropout:g}"


LABELS = {"float32": "fp32", "tf32": "TF32", "bfloat16": "bf16"}
HEADLINE = "SDPA + fused AdamW"
"""The baseline of the ratios, in the same precision: the fastest PyTorch configuration without a compiler."""


@dataclass(frozen=True)
class Rung:
    """One configuration of a step.

    Args:
        operations: "reference", "pytorch" (SDPA and torch's own fused kernels), or one of our backends.
        precision: "float32", "tf32" or "bfloat16" (autocast).
        fused_optimizer: AdamW in one kernel.
        compile: None, or a mode of torch.compile.
        graph: the whole step captured in one CUDA graph; on the backend cpu recorded and replayed.
        packed: the padded batch as one row of its real tokens.
    """

    operations: str
    precision: str
    fused_optimizer: bool = True
    compile: str | None = None
    graph: bool = False
    packed: bool = False

    @property
    def name(self) -> str:
        """The candidate's name: operations, execution mode and precision."""
        if self.operations in ("reference", "pytorch"):
            what = {"reference": "reference", "pytorch": "SDPA"}[self.operations]
        else:
            what = f"ours {self.operations}"
        how = {None: "", "default": " + compile", "reduce-overhead": " + compile + CUDA graphs"}[self.compile]
        how += (" packed" if self.packed else "") + (" + one graph" if self.graph else "")
        if not how and self.operations == "pytorch":
            how = HEADLINE.removeprefix("SDPA")
        return f"{what}{how}, {LABELS[self.precision]}"


REFERENCE = Rung("reference", "float32", fused_optimizer=False)
"""The configuration that all others are compared with."""


def ladder() -> list[Rung]:
    """Reference, PyTorch's alternatives and ours, on every device; unsupported ones report the reason."""
    fp32, bf16 = "float32", "bfloat16"
    rungs = [Rung("reference", precision, fused_optimizer=False) for precision in (fp32, "tf32", bf16)]
    rungs.append(Rung("reference", fp32, fused_optimizer=False, compile="default"))
    for precision in (fp32, bf16):
        rungs += [Rung("pytorch", precision), Rung("pytorch", precision, compile="default")]
    rungs += [Rung("pytorch", bf16, compile="reduce-overhead"), Rung("pytorch", bf16, graph=True)]
    ours = [name for name in tk.BACKENDS if name != "torch"]
    rungs += [Rung(name, precision) for precision in (fp32, bf16) for name in ("torch", *ours)]
    on_gpus = [name for name in ours if name != "cpu"]
    rungs += [Rung(name, precision, packed=True) for precision in (fp32, bf16) for name in on_gpus]
    rungs += [
        Rung("cpu", precision, packed=packed, graph=True) for precision in (fp32, bf16) for packed in (False, True)
    ]
    return rungs + [Rung(name, bf16, graph=True) for name in (*on_gpus, "auto")]


def rungs(device: torch.device) -> list[Rung]:
    """The configurations of a device; on a GPU only the reference runs in float32."""
    if device.type == "cpu":
        return ladder()
    return [rung for rung in ladder() if rung.precision != "float32" or rung == REFERENCE]


def operations(name: str, device: torch.device) -> Any:
    """The operations that the model of a configuration calls; raises Skipped if unsupported."""
    if name == "pytorch":
        return pytorch
    if name in tk.BACKENDS:
        require(name, device)
    return tk.bind(name)


# A step


class Step:
    """A model, its optimizer and one batch in a step of `transformer_kernels.training`; each call trains once."""

    def __init__(
        self, recipe: Recipe, rung: Rung, device: torch.device, dropout: float | None = None, clip: float = 0.0
    ) -> None:
        torch.manual_seed(SEED)
        self.model = model(recipe, rung, device, recipe.dropout if dropout is None else dropout).to(device).train()
        self.batch = batch(recipe, self.model.config.vocab_size, device)
        if rung.packed:
            self.batch = packed(self.batch)
        self.flops = self.model.flops_per_token(recipe.length) * recipe.batch * recipe.length
        loss: Any = TrainingLoss(self.model, mean_loss)
        if rung.compile is not None:
            torch._dynamo.reset()
            loss = torch.compile(loss, mode=None if rung.compile == "default" else rung.compile)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=rung.fused_optimizer)
        scaler = torch.amp.GradScaler(device.type, enabled=False)
        step = TrainingStep(loss, optimizer, scaler, dtype=rung.precision, clip=clip, check=lambda name, value: None)
        self.run: Callable[[Batch], Tensor] = step
        if rung.graph:
            self.run = Graphed(step, optimizer)

    def __call__(self) -> Tensor:
        """The loss, and the gradient norm if gradients are clipped."""
        return self.run(self.batch)


def model(recipe: Recipe, rung: Rung, device: torch.device, dropout: float | None) -> nn.Module:
    """The recipe's model in this configuration, with weights from torch's generator."""
    called = operations(rung.operations, device)
    if recipe.model in other_models.MODELS:
        return other_models.build(recipe.model, rung.operations, dropout)
    overrides: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
    if recipe.length > python_ref.preset(recipe.model).context:
        overrides["context"] = recipe.length
    return python_ref.build(recipe.model, ops=called, **overrides)


def mean_loss(model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The model's own loss; a classifier takes its labels first, then the offsets of packed sequences."""
    if not isinstance(model, BERTClassifier):
        return model.loss(*inputs, targets)
    tokens, *visible = inputs
    if visible and visible[0].dtype is torch.int32:
        return model.loss(targets, tokens, cu_seqlens=visible[0])
    return model.loss(targets, *inputs)


def batch(recipe: Recipe, vocabulary: int, device: torch.device) -> Batch:
    """Random tokens and targets; for BERT labels, tokens with a quarter of padding, and their mask."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, vocabulary, (recipe.batch, recipe.length), generator=generator)
    if recipe.model != "imdb_bert":
        targets = torch.randint(0, vocabulary, tokens.shape, generator=generator)
        return Batch((tokens.to(device),), targets.to(device), tokens.numel())
    lengths = torch.linspace(recipe.length, max(1, recipe.length // 2), recipe.batch).long()
    mask = torch.arange(recipe.length) < lengths[:, None]
    labels = torch.randint(0, 2, (recipe.batch,), generator=generator)
    return Batch((tokens.to(device), mask.to(device)), labels.to(device), int(mask.sum()))


def packed(padded: Batch) -> Batch:
    """The real tokens of a padded batch as one row, and the offsets of its sequences.

    Raises:
        Skipped: the batch has no padding.
    """
    if len(padded.inputs) < 2:
        raise Skipped("nothing to pack: the batch has no padding")
    tokens, mask = padded.inputs
    begins = nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return padded._replace(inputs=(tokens[mask][None], begins))


@functools.cache
def expected(recipe: Recipe, device: torch.device) -> list[float]:
    """The reference's loss and gradient norm without dropout."""
    return Step(recipe, REFERENCE, device, 0.0, UNCLIPPED)().tolist()


def check_step(recipe: Recipe, rung: Rung, device: torch.device) -> float:
    """The relative error of the loss against the float32 reference; raises WrongResult beyond the tolerance."""
    wanted = expected(recipe, device)
    with matrix_products(rung.precision):
        got = Step(recipe, rung, device, 0.0 if rung.compile is None else None, UNCLIPPED)().tolist()
    tolerance = LOSS_TOLERANCE[rung.precision] if rung.compile is None else WITH_DROPOUT
    for name, value, exact, allowed in zip(
        ("loss", "gradient norm"), got, wanted, (tolerance, 5 * tolerance), strict=True
    ):
        if not abs(value - exact) <= allowed * abs(exact):
            raise WrongResult(f"{name} {value:.6g} instead of {exact:.6g}")
    return abs(got[0] - wanted[0]) / abs(wanted[0])


def measure_step(recipe: Recipe, rung: Rung, bench: Bench) -> Row:
    """The row of one configuration: seconds per step, tokens/s, model FLOP/s."""
    shape = {"B": recipe.batch, "L": recipe.length}
    row = bench.row("step", recipe.model, recipe.case, "step", rung.name, rung.precision, shape=shape, axis="L")

    def work() -> Row:
        graphed = (rung.graph and rung.operations != "cpu") or rung.compile == "reduce-overhead"
        if bench.device.type == "cpu" and graphed:
            raise Skipped("CUDA graphs require a GPU")
        if bench.device.type == "cpu" and rung.precision == "tf32":
            raise Skipped("TF32 requires a GPU")
        row["error"] = check_step(recipe, rung, bench.device)
        with matrix_products(rung.precision):
            return _timed(row, recipe, rung, bench)

    return bench.attempt(row, work)


def _timed(row: Row, recipe: Recipe, rung: Rung, bench: Bench) -> Row:
    step = Step(recipe, rung, bench.device)

    def call() -> Tensor:
        if rung.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return step()

    for _ in range(WARM_UP_CALLS + 1 if rung.graph or bench.device.type == "cuda" else 1):
        result = call()
    if not torch.isfinite(result).all():
        raise WrongResult("the loss is not finite after the warm-up")
    measured = timing.time_steps(bench.device, call, bench.seconds)
    row["peak_memory"] = timing.peak_memory(bench.device, call)
    row = bench.judged(row, measured, 0, step.flops)
    row["tokens_per_second"] = recipe.batch * recipe.length / measured.median
    return row
