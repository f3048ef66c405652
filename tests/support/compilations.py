"""Which compilations Triton would make for a script, counted by its own specialisation keys; no GPU is needed.

Run as a program, without TRITON_INTERPRET: `python -m tests.support.compilations softmax-batches`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from transformer_kernels.reports.launches import record


def compilations(case: str) -> dict[str, int]:
    """How many compilations of each kernel the case needs, found in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.support.compilations", case]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


def _count(case: Callable[[], None]) -> dict[str, int]:
    return dict(Counter(launch.kernel_name for launch in record([("counted", case)], (9, 0))))


BATCHES = range(1, 21)
ALIGNED_WIDTHS = range(528, 528 + 20 * 8, 8)
ODD_WIDTHS = range(513, 513 + 40, 2)


def _softmax(rows: int, width: int) -> None:
    from transformer_kernels.ops.softmax import _triton as softmax

    x = torch.empty(rows, width, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, width, dtype=torch.bool).expand(1, 1, rows, width)
    for arguments in ((x, None, False, 1.0), (x, mask, False, 1.0), (x, None, True, 0.5)):
        softmax.forward(*arguments)
    softmax.backward(x, x, 1.0)


def _layer_norm(rows: int, width: int) -> None:
    from transformer_kernels.ops.add_layer_norm import _triton as add_layer_norm
    from transformer_kernels.ops.layer_norm import _triton as layer_norm

    x, weight = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(width)
    statistics, seed = torch.empty(rows), torch.ones(1, dtype=torch.int64)
    layer_norm.forward(x, weight, weight, 1e-5)
    layer_norm.backward(x, x, weight, statistics, statistics, True)
    add_layer_norm.forward(x, x, weight, weight, seed, 1e-5, 0.1)
    add_layer_norm.backward(x, x, x, weight, statistics, statistics, seed, 0.1, True)


def _gelu(rows: int, width: int) -> None:
    from transformer_kernels.ops.bias_gelu import _triton as bias_gelu
    from transformer_kernels.ops.bias_relu import _triton as bias_relu
    from transformer_kernels.ops.gelu import _triton as gelu

    x, bias = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(width)
    gelu.forward(x, "none")
    gelu.backward(x, x, "none")
    bias_gelu.forward(x, bias, "none")
    bias_gelu.backward(x, x, bias, "none")
    bias_relu.forward(x, bias)
    bias_relu.backward(x, x, torch.float32)


def _cross_entropy(rows: int, width: int) -> None:
    from transformer_kernels.ops.cross_entropy import _triton as cross_entropy

    logits, targets = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
    options = (-100, 0.0, "mean")
    loss, statistics, count = cross_entropy.forward(logits, targets, *options)
    cross_entropy.backward(loss, logits, targets, statistics, count, *options)
    cross_entropy.row_losses_and_gradient(logits, targets, -100, 0.0)


def _embedding(rows: int, width: int) -> None:
    from transformer_kernels.ops.embedding import _triton as embedding

    weight, tokens = torch.empty(100 + rows, width, dtype=torch.bfloat16), torch.zeros(2, rows, dtype=torch.int64)
    norm, statistics, seed = torch.empty(width), torch.empty(2 * rows), torch.ones(1, dtype=torch.int64)
    dy = torch.empty(2, rows, width, dtype=torch.bfloat16)
    embedding.forward(weight, tokens, weight, None, norm, norm, seed, 1.0 + rows, 1e-5, 0.1)
    embedding.backward(dy, weight, tokens, weight, None, norm, statistics, statistics, seed, 1.0 + rows, 0.1, True)
    embedding.backward(dy, weight, tokens, weight, None, None, None, None, seed, 1.0, 0.1, False)


def _attention(rows: int, width: int) -> None:
    """A batch of `rows` packed projections, `width` tokens each, plain, causal and with all masks; then the same as
    packed sequences; then through tensor descriptors; then one more query to the keys, in either layout."""
    from transformer_kernels.ops.attention import _triton as attention

    starts = torch.arange(rows + 1, dtype=torch.int32) * width
    padding = torch.ones(rows, width, dtype=torch.bool)
    bias = torch.zeros(1, HEADS, width, width, dtype=torch.bfloat16)
    seed = torch.ones(1, dtype=torch.int64)
    for batch, length, masks, causal, dropout_p in (
        (rows, width, (None, None, None, None), False, 0.0),
        (rows, width, (None, None, None, None), True, 0.0),
        (rows, width, (padding, bias, seed, None), True, 0.1),
        (1, rows * width, (None, None, None, starts), True, 0.0),
    ):
        options = (causal, None, dropout_p, 0.125)
        q, k, v = _projected(batch, length)
        attention.forward(q, k, v, *masks, *options)
        lse = torch.empty(batch, HEADS, length)
        grads = _projected(batch, length)
        attention.backward(q, None, q, k, v, q, lse, *masks, *options, masks[1] is not None, grads)
    with mock.patch.object(attention, "_descriptors_pay", return_value=True):
        attention.forward(*_projected(rows, width), None, None, None, None, True, None, 0.0, 0.125)
    for cached in (torch.empty(rows, HEADS, width, 64, dtype=torch.bfloat16), _projected(rows, width)[1]):
        attention.forward(cached[:, :, -1:], cached, cached, None, None, None, None, True, None, 0.0, 0.125)


def _short_attention(rows: int, width: int) -> None:
    """The same of 72 to 119 tokens, which share one tile."""
    from transformer_kernels.ops.attention import _triton as attention

    length = 72 + width % 48
    q, k, v = _projected(rows, length)
    padding = torch.ones(rows, length, dtype=torch.bool)
    for mask in (None, padding):
        options = (mask, None, None, None, False, None, 0.0, 0.125)
        attention.forward(q, k, v, *options)
        attention.backward(q, None, q, k, v, q, torch.empty(rows, HEADS, length), *options, False)


HEADS = 4


def _projected(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Views (B, H, L, 64) of the queries, keys and values of a packed projection."""
    return torch.empty(batch, length, 3, HEADS, 64, dtype=torch.bfloat16).transpose(1, 3).unbind(2)


OPERATIONS = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "attention": _attention,
    "short_attention": _short_attention,
}
SHAPES = {
    "batches": [(rows, 768) for rows in BATCHES],
    "aligned": [(6, width) for width in ALIGNED_WIDTHS],
    "odd": [(6, width) for width in ODD_WIDTHS],
}


def _run(case: str) -> None:
    operation, shapes = case.split("-")
    for rows, width in SHAPES[shapes]:
        OPERATIONS[operation](rows, width)


if __name__ == "__main__":
    print(json.dumps(_count(lambda: _run(sys.argv[1]))))
