"""The number of Triton compilations of a script, by Triton's specialisation keys, without a GPU.

Run as a program, without TRITON_INTERPRET: `python -m tests.support.compilations batches`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.compilers import row_calls
from benchmarks.compilers.launches import record


def compilations(shapes):
    """By operation, the number of compilations of each kernel for the first and for all of these SHAPES.

    They run in a process without the interpreter.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.support.compilations", shapes]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


BATCHES = range(1, 21)
ALIGNED_WIDTHS = range(528, 528 + 20 * 8, 8)
ODD_WIDTHS = range(513, 513 + 40, 2)


def _rows(rows, width):
    """Every call of every row operation, forward and backward, in bf16."""
    for operation, makes in row_calls.CALLS.items():
        for make in makes:
            for arguments in make(torch.bfloat16, rows, width).values():
                row_calls.run(operation, make, arguments)


def _attention(rows, width):
    """A batch of `rows` packed projections of `width` tokens, plain, causal and with all masks; then as packed
    sequences; then one more query, in both layouts."""
    from transformer_kernels.ops.attention import _triton as attention
    from transformer_kernels.ops.attention import prepare

    starts = torch.arange(rows + 1, dtype=torch.int32) * width
    padding = torch.ones(rows, width, dtype=torch.bool)
    bias = torch.zeros(1, HEADS, width, width, dtype=torch.bfloat16)
    for batch, length, options in (
        (rows, width, {}),
        (rows, width, {"causal": True}),
        (rows, width, {"key_padding_mask": padding, "attn_bias": bias, "causal": True, "dropout_p": 0.1}),
        (1, rows * width, {"cu_seqlens": starts, "causal": True}),
    ):
        call = prepare(*_projected(batch, length), **options)
        result = attention.Kernels(call).forward(call)
        wanted = (True, True, True, "attn_bias" in options)
        attention.Kernels(call).backward(call, result, (call.q, None), wanted, _projected(batch, length))
    for cached in (torch.empty(rows, HEADS, width, 64, dtype=torch.bfloat16), _projected(rows, width)[1]):
        call = prepare(cached[:, :, -1:], cached, cached, causal=True)
        attention.Kernels(call).forward(call)


def _short_attention(rows, width):
    """The same with 72 to 119 tokens, which use the same tile."""
    from transformer_kernels.ops.attention import _triton as attention
    from transformer_kernels.ops.attention import prepare

    length = 72 + width % 48
    for mask in (None, torch.ones(rows, length, dtype=torch.bool)):
        call = prepare(*_projected(rows, length), key_padding_mask=mask)
        result = attention.Kernels(call).forward(call)
        attention.Kernels(call).backward(call, result, (call.q, None), (True, True, True, False))


HEADS = 4


def _projected(batch, length):
    """Views (B, H, L, 64) of the queries, keys and values of a packed projection."""
    return torch.empty(batch, length, 3, HEADS, 64, dtype=torch.bfloat16).transpose(1, 3).unbind(2)


OPERATIONS: dict[str, Callable[[int, int], None]] = {
    "rows": _rows,
    "attention": _attention,
    "short_attention": _short_attention,
}
SHAPES = {
    "batches": [(rows, 768) for rows in BATCHES],
    "aligned": [(6, width) for width in ALIGNED_WIDTHS],
    "odd": [(6, width) for width in ODD_WIDTHS],
}


def _count(operation, shapes):
    """The number of compilations of each kernel for the first shape, and for all."""
    calls = [(str(shape), functools.partial(operation, *shape)) for shape in shapes]
    found = [Counter(launch.kernel_name for launch in record(chosen, (9, 0))) for chosen in (calls[:1], calls)]
    return {name: [counted[name] for counted in found] for name in found[1]}


if __name__ == "__main__":
    print(json.dumps({name: _count(operation, SHAPES[sys.argv[1]]) for name, operation in OPERATIONS.items()}))
