"""Unchanged hand-written models: eager, in `accelerate`, compiled by the graph route, and by Inductor.

    python -m benchmarks.programs [--models gpt,bert] [--modes train,eval,one] [--columns route,inductor] [--tiny]

Rows are training steps with fused AdamW, inference of a batch and of one sequence. Minimum CPU time of interleaved
calls, which is robust to other load; `first` is the CPU time of the first call minus the time of the second,
compilation included, `memory` the peak of a training step. Before it is timed, each way must give the loss and the
gradients of eager PyTorch without dropout. `--tiny` runs everything in a minute.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import transformer_kernels as tk
from benchmarks import timing
from benchmarks.correctness import WrongResult
from benchmarks.handwritten import MODELS, Size
from benchmarks.patched import Call, least
from transformer_kernels.patching import graph

DROPOUT = 0.1
LEARNING_RATE = 1e-4
TINY = Size(layers=1, width=32, heads=2, length=16, batch=2, words=50)
TOLERANCE = 1e-5
"""Of the loss, and of the norm of the gradients' difference, relative to eager PyTorch's."""


def _accelerated(model: nn.Module) -> Callable[..., Tensor]:
    block = tk.accelerate()

    def run(*inputs: Tensor) -> Tensor:
        with block:
            return model(*inputs)  # type: ignore[no-any-return]

    return run


WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda model: model,
    "accelerate": _accelerated,
    "route": lambda model: torch.compile(model, backend=graph.transformer_kernels),
    "inductor": lambda model: torch.compile(model),
}
"""model -> the callable that replaces it."""
MODES = ("train", "eval", "one")


class Program:
    """One model in one way: its calls by mode."""

    def __init__(self, model: Any, way: str) -> None:
        self.model, self.size = copy.deepcopy(model), model.size
        self.run = WAYS[way](self.model)
        self.accelerates = way == "accelerate"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)

    def backward(self) -> Tensor:
        """One loss of a batch and its gradients."""
        loss: Tensor = self.model.loss(self.run, *self.model.inputs(self.size.batch))
        loss.backward()
        return loss.detach()

    def call(self, mode: str) -> Call:
        inputs = self.model.inputs(1 if mode == "one" else self.size.batch)

        def train() -> None:
            self.model.loss(self.run, *inputs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        def infer() -> Tensor:
            with torch.no_grad():
                return self.run(*inputs)

        self.model.train(mode == "train")
        return train if mode == "train" else infer


def check(name: str, size: Size, way: str) -> float:
    """The relative error of loss and gradients without dropout.

    Raises:
        WrongResult: it exceeds TOLERANCE.
    """
    torch.manual_seed(0)
    model = MODELS[name](size, 0.0)
    found = []
    for variant in ("eager", way):
        program = Program(model, variant)
        loss = program.backward()
        gradients = [parameter.grad.flatten() for parameter in program.model.parameters() if parameter.grad is not None]
        found.append((loss, torch.cat(gradients)))
    errors = [((ours - eager).norm() / eager.norm()).item() for eager, ours in zip(*found, strict=True)]
    if not max(errors) <= TOLERANCE:
        raise WrongResult(f"{name}, {way}: loss and gradients differ by {errors[0]:.1e} and {errors[1]:.1e}")
    return max(errors)


def first_calls(calls: list[Call]) -> list[float]:
    """CPU seconds of the first call of each minus the CPU seconds of its second."""
    found = []
    for call in calls:
        times = []
        for _ in range(2):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        found.append(times[0] - times[1])
    return found


def measure(name: str, size: Size, ways: list[str], modes: list[str], seconds: float) -> list[dict[str, Any]]:
    """One row for each mode and way: milliseconds, speedup over eager, seconds of the first call, bytes at the peak."""
    for way in ways:
        if way != "eager":
            check(name, size, way)
    torch.manual_seed(0)
    model = MODELS[name](size, DROPOUT)
    rows = []
    for mode in modes:
        torch.compiler.reset()
        calls = [Program(model, way).call(mode) for way in ways]
        first = first_calls(calls)
        best = least(calls, seconds)
        for way, call, took, begun in zip(ways, calls, best, first, strict=True):
            row = {"model": name, "mode": mode, "way": way, "ms": took, "speedup": best[0] / max(took, 1e-9)}
            memory = timing.peak_memory(torch.device("cpu"), call) if mode == "train" else None
            rows.append(row | {"first": begun, "memory": memory})
    return rows


def line(row: dict[str, Any]) -> str:
    memory = "" if row["memory"] is None else f"{row['memory'] / 2**20:8.1f} MiB"
    return (
        f"{row['model']:6s} {row['mode']:6s} {row['way']:11s} {row['ms']:9.2f} ms {row['speedup']:5.2f}x"
        f" first {row['first']:6.2f} s {memory}"
    )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--columns", default="accelerate,route,inductor", help="beside eager")
    parser.add_argument("--tiny", action="store_true", help="one layer, 32 wide, for tests")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each model and mode")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models.split(","):
        ways = ["eager", *(way for way in options.columns.split(",") if way)]
        size = TINY if options.tiny else Size()
        found = measure(name, size, ways, options.modes.split(","), options.seconds)
        rows += found
        print("\n".join(line(row) for row in found), flush=True)
    return rows


if __name__ == "__main__":
    main()
