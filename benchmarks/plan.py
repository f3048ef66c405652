"""The measurements in order of value, so that an interrupted run has recorded the most important ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import calls, other_models, steps, workloads
from benchmarks.measure import Bench, Row, identity, measure
from benchmarks.peers import Candidate, candidates
from benchmarks.steps import Recipe
from benchmarks.workloads import OPERATIONS, ROW_OPERATIONS, Sizes, Workload
from transformer_kernels import BACKENDS

HEADLINE_LENGTHS = (512, 2048, 8192, 16384)
HEADLINE_WIDTHS = (256, 768, 1024, 4096, 16384)
COMPILED_WIDTHS = (768, 4096)
COMPILED_LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Task:
    """A row to measure: its identity, its candidate, and the function that measures it."""

    key: str
    op: str
    candidate: str
    run: Callable[[Bench], Row]


def operation_tasks(workloads: Iterable[Workload], names: Iterable[str] | None = None) -> Iterator[Task]:
    """Each workload by each candidate, or by those named."""
    for workload in workloads:
        for candidate in candidates(workload.op):
            if names is None or candidate.name in names:
                yield operation_task(workload, candidate)


def operation_task(workload: Workload, candidate: Candidate) -> Task:
    key = _key(
        "operation", workload.op, workload.case, workload.direction, candidate.name, workload.dtype_name, workload.shape
    )
    return Task(key, workload.op, candidate.name, functools.partial(measure, workload, candidate))


def step_tasks(device: torch.device, recipe: Recipe, names: Iterable[str] | None = None) -> Iterator[Task]:
    """The ladder of one model and batch."""
    for rung in steps.rungs(device):
        if names is None or rung.name in names:
            shape = {"B": recipe.batch, "L": recipe.length}
            key = _key("step", recipe.model, recipe.case, "step", rung.name, rung.precision, shape)
            yield Task(key, "step", rung.name, functools.partial(steps.measure_step, recipe, rung))


def call_tasks() -> Iterator[Task]:
    """The host time of each call."""
    for route in calls.ROUTES:
        for op in OPERATIONS:
            workload = calls.tiny(op)
            for candidate in calls.call_candidates(op):
                key = _key("call", op, "host", route, candidate.name, workload.dtype_name, workload.shape)
                yield Task(key, op, candidate.name, functools.partial(calls.measure_call, op, candidate, route))


def _key(kind: str, op: str, case: str, direction: str, candidate: str, dtype: str, shape: dict[str, int]) -> str:
    return identity(
        {
            "kind": kind,
            "op": op,
            "case": case,
            "direction": direction,
            "candidate": candidate,
            "dtype": dtype,
            "shape": shape,
        }
    )


def plan(device: torch.device, quick: bool = False, part: str | None = None) -> list[Task]:
    """All tasks for a device, or the tasks of one of PARTS, each once, the most valuable first."""
    if part is not None:
        ordered = PARTS[part](device)
    elif quick:
        ordered = _quick()
    elif device.type == "cuda":
        ordered = _on_gpu(device)
    else:
        ordered = _on_cpu(device)
    return list({task.key: task for task in ordered}.values())


def _quick() -> Iterator[Task]:
    sizes = workloads.QUICK
    for direction in ("forward", "both"):
        yield from operation_tasks(
            workloads.attention_sweep(sizes, torch.float32, 64, direction, "causal"), (*OURS, "eager", "sdpa flash")
        )
        for op in ROW_OPERATIONS:
            yield from operation_tasks(workloads.row_sweep(sizes, op, torch.float32, direction), (*OURS, "eager"))
        yield from _output_layers(sizes, torch.float32, (direction,), (*OURS, "eager"))


def _attention(
    sizes: Sizes,
    dtype: torch.dtype,
    kinds: Iterable[tuple[str, int]],
    directions: Iterable[str],
    names: Iterable[str],
    **options: Any,
) -> Iterator[Task]:
    for kind, width in kinds:
        for direction in directions:
            sweep = workloads.attention_sweep(sizes, dtype, width, direction, kind, **options)
            yield from operation_tasks(sweep, names)


def _rows(
    sizes: Sizes,
    dtype: torch.dtype,
    directions: Iterable[str],
    names: Iterable[str],
    approximate: str = "none",
    operations: Iterable[str] = ROW_OPERATIONS,
) -> Iterator[Task]:
    for op in operations if approximate == "none" else workloads.APPROXIMATE:
        for direction in directions:
            yield from operation_tasks(workloads.row_sweep(sizes, op, dtype, direction, approximate), names)


def _output_layers(sizes: Sizes, dtype: torch.dtype, directions: Iterable[str], names: Iterable[str]) -> Iterator[Task]:
    for direction in directions:
        yield from operation_tasks(workloads.output_layer_sweep(sizes, dtype, direction), names)


def _narrowed(sizes: Sizes, lengths: tuple[int, ...] = (), widths: tuple[int, ...] = ()) -> Sizes:
    """The same sizes with fewer points."""
    kept_lengths = tuple(length for length in sizes.lengths if not lengths or length in lengths)
    kept_widths = tuple(width for width in sizes.widths if not widths or width in widths)
    return Sizes(sizes.tokens, sizes.heads, kept_lengths, sizes.elements, kept_widths, sizes.decode, sizes.dtypes)


UNCOMPILED = tuple(rung.name for rung in steps.ladder() if rung.compile is None)
OURS = tuple(f"ours {name}" for name in BACKENDS)
KERNELS = ("ours triton", "ours cuda")
ON_CPU = tuple(name for name in OURS if name not in KERNELS)
EVERY_KIND = (("causal", 64), ("full", 128), ("full", 64), ("causal", 128))


TRAINED = Recipe("char_gpt", 64, 64), Recipe("imdb_bert", 16, 256)
FUSED = (*KERNELS, "sdpa flash", "sdpa cudnn")


def _gpu_attention(device: torch.device) -> Iterator[Task]:
    """Attention beside SDPA's flash backend and cuDNN, and FlexAttention at two lengths."""
    headline = _narrowed(workloads.GPU, HEADLINE_LENGTHS, HEADLINE_WIDTHS)
    yield from _attention(headline, torch.bfloat16, EVERY_KIND, ("forward", "backward"), FUSED)
    two = _narrowed(workloads.GPU, (2048, 8192))
    yield from _attention(two, torch.bfloat16, EVERY_KIND[:2], ("forward", "both"), ("flex",))


def _gpu_rows(device: torch.device) -> Iterator[Task]:
    """The row kernels at three widths, and beside compiled ones at one."""
    three, bf16 = _narrowed(workloads.GPU, widths=(256, 768, 4096)), torch.bfloat16
    yield from _rows(three, bf16, ("forward", "backward"), (*KERNELS, "eager"))
    one = _narrowed(workloads.GPU, widths=(768,))
    yield from _rows(one, bf16, ("forward", "backward"), ("compile", "liger", "quack"))


def _gpu_steps(device: torch.device) -> Iterator[Task]:
    """Training steps of both models, eager and in one CUDA graph."""
    for recipe in TRAINED:
        yield from step_tasks(device, recipe, UNCOMPILED)


def _gpu_compiled(device: torch.device) -> Iterator[Task]:
    """All steps, the compiled ones included."""
    for recipe in TRAINED:
        yield from step_tasks(device, recipe)


def _on_gpu(device: torch.device) -> Iterator[Task]:
    sizes, bf16 = workloads.GPU, torch.bfloat16
    headline = _narrowed(sizes, HEADLINE_LENGTHS, HEADLINE_WIDTHS)
    for part in (_gpu_attention, _gpu_rows, _gpu_steps, _gpu_compiled):
        yield from part(device)
    yield from step_tasks(device, Recipe("gpt2", 8, 1024), UNCOMPILED)
    yield from _rows(_narrowed(sizes, widths=COMPILED_WIDTHS), bf16, ("forward", "backward"), ("compile", "liger"))
    yield from _rows(headline, bf16, ("forward", "backward"), (*KERNELS, "eager"), operations=("cross_entropy",))
    yield from _output_layers(sizes, bf16, ("forward", "both"), (*KERNELS, "ours torch", "eager"))
    yield from _attention(sizes, bf16, EVERY_KIND, ("forward", "backward", "both"), FUSED)
    yield from step_tasks(device, Recipe("gpt2", 8, 1024))
    yield from call_tasks()
    yield from operation_tasks(workloads.decode_sweep(sizes, bf16), (*FUSED, "ours torch", "eager", "flex"))
    yield from _attention(headline, bf16, (("padded", 64),), ("forward", "both"), (*KERNELS, "sdpa efficient", "flex"))
    yield from _attention(headline, bf16, EVERY_KIND[:2], ("forward", "both"), ("sdpa efficient", "flex", "ours torch"))
    yield from _rows(sizes, bf16, ("forward", "backward", "both"), (*KERNELS, "eager", "ours torch", "liger", "quack"))
    yield from _rows(headline, bf16, ("forward", "backward"), (*KERNELS, "eager", "liger"), approximate="tanh")
    for dtype in (torch.float16, torch.float32):
        yield from _attention(headline, dtype, EVERY_KIND[:2], ("forward", "both"), (*FUSED, "sdpa efficient"))
        yield from _rows(headline, dtype, ("forward", "backward"), (*KERNELS, "eager"))
    yield from _attention(headline, bf16, EVERY_KIND[:2], ("both",), ("eager", "sdpa math"))
    named = ("reference", "SDPA + compile", "SDPA + one graph", "ours triton + one graph", "ours cuda + one graph")
    swept = tuple(f"{name}, bf16" for name in named)
    for recipe in _step_sweep():
        yield from step_tasks(device, recipe, swept)
    compiled = ("compile", "compile max-autotune")
    yield from _attention(_narrowed(sizes, COMPILED_LENGTHS), bf16, EVERY_KIND[:1], ("forward", "both"), compiled)
    yield from _rows(_narrowed(sizes, widths=COMPILED_WIDTHS), bf16, ("forward", "both"), compiled)


PARTS = {"attention": _gpu_attention, "rows": _gpu_rows, "steps": _gpu_steps, "compiled": _gpu_compiled}
"""Parts of a GPU's plan, by name."""


def _step_sweep() -> Iterator[Recipe]:
    """Longer sequences and larger batches of each model."""
    for length in (128, 256, 512):
        yield Recipe("char_gpt", 64, length)
        yield Recipe("imdb_bert", 16, length)
    for batch in (16, 256, 1024):
        yield Recipe("char_gpt", batch, 64)
    for batch, length in ((32, 256), (16, 512), (4, 2048)):
        yield Recipe("gpt2", batch, length)


def _on_cpu(device: torch.device) -> Iterator[Task]:
    sizes, fp32, bf16 = workloads.CPU, torch.float32, torch.bfloat16
    recipes = Recipe("char_gpt", 64, 64), Recipe("imdb_bert", 16, 256)
    for recipe in recipes:
        yield from step_tasks(device, recipe, UNCOMPILED)
    for model in other_models.MODELS:
        for recipe in (Recipe(model, 8, 128), Recipe(model, 8, 128, dropout=0.0), Recipe(model, 8, 256)):
            ours = ("ours cpu, fp32", "ours cpu + one graph, fp32")
            yield from step_tasks(device, recipe, (f"{steps.HEADLINE}, fp32", *ours))
    fused = (*ON_CPU, "sdpa flash")
    short, long = _narrowed(sizes, (64, 128, 256)), _narrowed(sizes, (512, 1024, 2048, 4096))
    yield from _attention(short, fp32, EVERY_KIND, ("forward", "both"), (*fused, "sdpa math"))
    yield from _attention(
        _narrowed(sizes, (512,)), fp32, EVERY_KIND[:1], ("forward", "both"), (*fused, "compile", "eager")
    )
    yield from _attention(long, fp32, EVERY_KIND[:2], ("forward", "both"), fused)
    yield from _attention(short, fp32, (("padded", 64),), ("both",), (*fused, "sdpa math"))
    for dtype in (fp32, bf16):
        yield from _attention(short, dtype, EVERY_KIND[:1], ("both",), (*fused, "sdpa math"), dropout_p=0.1)
    yield from _attention(_narrowed(sizes, (256,)), fp32, (("full", 64),), ("both",), fused, window=64)
    yield from operation_tasks(workloads.decode_sweep(sizes, fp32), fused)
    one_width = _narrowed(sizes, widths=(768,))
    yield from _rows(one_width, fp32, ("forward", "both"), (*ON_CPU, "eager", "compile"))  # timed together
    yield from _rows(sizes, fp32, ("forward", "both"), (*ON_CPU, "eager"))
    yield from _output_layers(sizes, fp32, ("forward", "both"), (*ON_CPU, "eager"))
    yield from _attention(sizes, bf16, EVERY_KIND[:2], ("forward", "both"), fused)
    yield from _attention(sizes, fp32, (("causal", 32), ("padded", 64)), ("forward", "both"), fused)
    uneven = replace(sizes, lengths=(65, 129, 197, 1025), widths=(77, 1001))  # multiples of no vector or tile
    for dtype in (fp32, bf16):
        yield from _attention(uneven, dtype, (("full", 64),), ("forward", "both"), fused)
    yield from _rows(uneven, fp32, ("forward", "both"), (*ON_CPU, "eager"))
    yield from step_tasks(device, Recipe("gpt2", 4, 64), UNCOMPILED)
    yield from call_tasks()
    everyone = _narrowed(sizes, (512,), (768,))  # one point with every candidate, so that each is timed or explained
    yield from operation_tasks(workloads.attention_sweep(everyone, fp32, 64, "forward", "causal"))
    for op in ROW_OPERATIONS:
        yield from operation_tasks(workloads.row_sweep(everyone, op, fp32, "forward"))
    for recipe in recipes:
        yield from step_tasks(device, recipe)
    for model in other_models.MODELS:
        for recipe in (Recipe(model, 8, 128), Recipe(model, 8, 128, dropout=0.0)):
            yield from step_tasks(device, recipe, ("SDPA + compile, fp32",))


def chosen(
    tasks: Iterable[Task],
    operations: Iterable[str] = (),
    backends: Iterable[str] = (),
    struck: Iterable[tuple[str, str, str]] = (),
) -> list[Task]:
    """The tasks of the named operations (or "step"), of our named backends without struck kernels, and of peers."""
    operations, backends, left_out = set(operations), set(backends), {tuple(kernel) for kernel in struck}
    unfit = {backend for _, backend, _ in left_out}

    def wanted(task: Task) -> bool:
        ours = task.candidate.split()[1].strip(",") if task.candidate.startswith("ours ") else None
        dtype = task.key.split("|")[5]
        if (task.op, ours, dtype) in left_out or (task.op == "step" and ours in unfit):
            return False
        return (not operations or task.op in operations) and (not backends or ours is None or ours in backends)

    return [task for task in tasks if wanted(task)]
