"""Sizes from which the CPU kernels are faster than PyTorch's operators, written to `ops/_crossover_table.py`.

    python -m benchmarks.crossovers [--operations layer_norm,softmax] [--columns avx2] [--seconds 0.1] [--write]

Each column of the table that this processor can measure is measured in a process of its own, in which PyTorch uses the
same instruction set. Each call is measured at powers of two elements, from the largest on until PyTorch is the faster
one, interleaved with PyTorch's, in minimum CPU time on one thread, which is robust to other load. At the crossover the
kernel takes at most 95 % of PyTorch's time, and at no larger size over 2 % more; NEVER: not at the largest either.
`--write` replaces the measured entries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import transformer_kernels as tk
from transformer_kernels.ops import _crossovers
from transformer_kernels.ops._crossover_table import LEVELS, MODULE, REROUTED, TABLE, Limit
from transformer_kernels.patching._accelerate import _block

COLUMNS, CLASSES, HEAD_DIM = 256, 1024, 64
MIN_POWER, MAX_POWER = 10, 24
MAX_REROUTED_POWER = 19
"""Above this size the host time of a rerouted call does not matter: its entry equals the operation's."""
GAIN, TIE = 0.95, 1.02
MIN_ROUNDS = 3
RESTRICTED = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
"""Environment variables with which PyTorch, oneDNN and MKL use no more than the instruction sets of a column."""
Function = Callable[..., Tensor]


def cases(name: str, elements: int, dtype: torch.dtype) -> tuple[Function, Function, list[Tensor]]:
    """Ours, PyTorch's, and the floating inputs of an operation with so many elements."""
    if name.endswith(REROUTED):
        _, function, inputs = cases(name.removesuffix(REROUTED), elements, dtype)
        return function, partial(_left_alone, function), inputs
    rows = elements // COLUMNS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    x, w, b = normal(max(rows, 1), COLUMNS), normal(COLUMNS), normal(COLUMNS)
    shape = (COLUMNS,)
    if name == "attention":
        heads = 8 >> elements.bit_length() % 2  # the length is a power of two, at which PyTorch is at its best
        length = round((elements // heads) ** 0.5)
        qkv = [normal(1, heads, length, HEAD_DIM) for _ in range(3)]
        return tk.attention, F.scaled_dot_product_attention, qkv  # type: ignore[return-value]
    if name == "cross_entropy":
        logits = normal(max(elements // CLASSES, 1), CLASSES)
        targets = torch.randint(CLASSES, (len(logits),))
        return lambda x: tk.cross_entropy(x, targets), lambda x: F.cross_entropy(x, targets), [logits]
    if name == "embedding":
        ids = torch.randint(CLASSES, (1, max(rows, 1)))
        return lambda w: tk.embedding(ids, w), lambda w: F.embedding(ids, w), [normal(CLASSES, COLUMNS)]
    functions: dict[str, tuple[Function, Function, list[Tensor]]] = {
        "add_layer_norm": (
            lambda x, r, w, b: tk.add_layer_norm(x, r, w, b)[0],
            lambda x, r, w, b: F.layer_norm(x + r, shape, w, b),
            [x, torch.randn_like(x), w, b],
        ),
        "add_rms_norm": (
            lambda x, r, w: tk.add_rms_norm(x, r, w)[0],
            lambda x, r, w: F.rms_norm(x + r, shape, w),
            [x, torch.randn_like(x), w],
        ),
        "gelu": (tk.gelu, F.gelu, [x]),
        "gelu_tanh": (lambda x: tk.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), [x]),
        "layer_norm": (tk.layer_norm, lambda x, w, b: F.layer_norm(x, shape, w, b), [x, w, b]),
        "rms_norm": (tk.rms_norm, lambda x, w: F.rms_norm(x, shape, w), [x, w]),
        "softmax": (tk.softmax, lambda x: F.softmax(x, -1), [x]),
    }
    return functions[name]


def _left_alone(function: Function, *inputs: Tensor) -> Tensor:
    """The function's result outside of the block of `accelerate` that it is called in."""
    token = _block.set(None)  # type: ignore[arg-type]
    try:
        return function(*inputs)
    finally:
        _block.reset(token)


def least(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """The minimum CPU seconds of each call in so much CPU time, interleaved in batches of about 0.5 ms."""
    best, batches = [float("inf")] * len(calls), []
    for call in calls:
        call()
        start = time.process_time()
        for _ in range(5):
            call()
        batches.append(max(1, int(5e-4 / max(time.process_time() - start, 1e-6))))
    end, rounds = time.process_time() + seconds, 0
    while time.process_time() < end or rounds < MIN_ROUNDS:
        rounds += 1
        for index, call in enumerate(calls):
            start = time.process_time()
            for _ in range(batches[index]):
                call()
            best[index] = min(best[index], (time.process_time() - start) / batches[index])
    return best


def ratio(name: str, elements: int, dtype: torch.dtype, gradients: bool, seconds: float) -> float:
    """Our time divided by PyTorch's, forward alone or with gradients."""
    with tk.accelerate(backend="cpu") if name.endswith(REROUTED) else nullcontext():
        return _ratio(name, elements, dtype, gradients, seconds)


def _ratio(name: str, elements: int, dtype: torch.dtype, gradients: bool, seconds: float) -> float:
    *functions, inputs = cases(name, elements, dtype)
    inputs = [tensor.requires_grad_(gradients) for tensor in inputs]
    calls: list[Callable[[], Any]] = []
    for function in functions:
        cotangent = torch.ones_like(function(*inputs))  # type: ignore[operator]

        def call(function: Any = function, cotangent: Tensor = cotangent) -> Any:
            out = function(*inputs)
            return torch.autograd.grad(out, inputs, cotangent) if gradients else out

        calls.append(call)
    with torch.set_grad_enabled(gradients):
        ours, theirs = least(calls, seconds)
    return ours / theirs


def crossover(ratios: dict[int, float]) -> int:
    """The least size whose ratio is at most GAIN, and TIE at all larger sizes; NEVER if there is none."""
    found = _crossovers.NEVER
    for elements in sorted(ratios, reverse=True):
        if ratios[elements] > TIE:
            break
        if ratios[elements] <= GAIN:
            found = elements
    return 0 if found == min(ratios) else found


def measured(names: list[str], seconds: float) -> Iterator[tuple[tuple[str, int], tuple[Limit, Limit]]]:
    """The entries of the table, printed with their ratios."""
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            if (name, dtype.itemsize) not in TABLE[_crossovers.level()]:
                continue
            limits: list[Limit] = []
            plain = name.removesuffix(REROUTED)
            largest = MAX_POWER if name == plain else MAX_REROUTED_POWER
            for gradients in (False, True):
                torch.manual_seed(0)
                ratios: dict[int, float] = {}
                for size in (1 << power for power in range(largest, MIN_POWER - 1, -1)):  # malloc adapts to the largest
                    ratios[size] = ratio(name, size, dtype, gradients, seconds)
                    if ratios[size] > TIE:
                        ratios[size] = min(ratios[size], ratio(name, size, dtype, gradients, 3 * seconds))
                    if ratios[size] > TIE:
                        break
                found: Limit = crossover(ratios)
                if found == _crossovers.NEVER and name != plain:
                    found = TABLE[_crossovers.level()][plain, dtype.itemsize][gradients]
                limits.append(found)
                shown = " ".join(f"2^{size.bit_length() - 1}:{1 / ratio:.2f}" for size, ratio in ratios.items())
                print(
                    f"{name} {dtype} {'with gradients' if gradients else 'forward'}: {limits[-1]}: {shown}",
                    file=sys.stderr,
                    flush=True,
                )
            yield (name, dtype.itemsize), (limits[0], limits[1])


def written(table: dict[str, dict[tuple[str, int], tuple[int, int]]]) -> str:
    """The module of the table."""
    head, mark, rest = Path(_crossovers.TABLE_FILE).read_text().partition(" = {\n")
    tail = rest.partition("}\n")[2]

    def size(limit: Any) -> str:
        if isinstance(limit, tuple):
            return f"({size(limit[0])}, {size(limit[1])})"
        return "NEVER" if limit == _crossovers.NEVER else "0" if not limit else f"1 << {limit.bit_length() - 1}"

    lines = []
    for name, itemsize in sorted(table["avx2"], key=lambda entry: (entry[0], -entry[1])):
        limits = (f"({', '.join(map(size, table[level][name, itemsize]))})" for level in LEVELS)
        lines.append(f'    ("{name}", {itemsize}): ({", ".join(limits)}),\n')
    return "".join([head, mark, *lines, "}\n", tail])


def columns() -> dict[str, str]:
    """The columns that this processor can measure, and the widest instruction set of each."""
    sets = tk.backends.cpu.load().instruction_sets
    return {_crossovers.LEVELS.get(name, "avx2"): name for name in sets if name != "plain"}


def measured_alone(column: str, options: argparse.Namespace) -> dict[tuple[str, int], tuple[int, int]]:
    """The entries of a column, measured in a new process that is restricted to its instruction sets."""
    restrictions = {**RESTRICTED[column], "TRANSFORMER_KERNELS_CPU_ISA": columns()[column], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.crossovers", "--operations", options.operations, "--here"]
    result = subprocess.run(
        [*command, "--seconds", str(options.seconds)],
        env={**os.environ, **restrictions},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {(name, itemsize): tuple(limits) for (name, itemsize), limits in json.loads(result.stdout)}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and with `--write` replace the entries of the measured columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {name for name, _ in TABLE["avx2"] if not name.endswith(MODULE)}
    names = sorted(known - {"linear"})  # which has a separate rule
    parser.add_argument("--operations", default=",".join(names))
    parser.add_argument("--columns", default=",".join(columns()))
    parser.add_argument("--seconds", type=float, default=0.1, help="CPU time of each size")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process; prints the entries as JSON")
    options = parser.parse_args(arguments)
    if options.here:
        torch.set_num_threads(1)
        print(tk.backends.cpu.describe(), file=sys.stderr)
        with tk.use_backend("cpu"):
            return print(json.dumps(list(measured(options.operations.split(","), options.seconds))))
    table = dict(TABLE)
    for column in options.columns.split(","):
        table[column] = {**table[column], **measured_alone(column, options)}
        if options.write:
            Path(_crossovers.TABLE_FILE).write_text(written(table))


if __name__ == "__main__":
    main()
