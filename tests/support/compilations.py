"""Which compilations Triton would make for a script, counted by its own specialisation keys; no GPU is needed.

Run as a program, without TRITON_INTERPRET: `python -m tests.support.compilations softmax-batches`. Launches go through
Triton's real `JITFunction.run` up to the point where it would compile; a hook there records the key and stops it. The
driver is a stand-in that only answers which device is current.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch


def compilations(case: str) -> dict[str, int]:
    """How many compilations of each kernel the case needs, found in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.support.compilations", case]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


class _Driver:
    """Answers what a launch asks before it compiles."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _count(case: Callable[[], None]) -> dict[str, int]:
    import triton

    keys: dict[str, set[str]] = defaultdict(set)

    def record(*, key: str, fn: object, **_: object) -> bool:
        keys[fn.name].add(key)
        return True

    triton.runtime.driver.set_active(_Driver())
    triton.knobs.runtime.jit_cache_hook = record
    case()
    return {name.rsplit(".", 1)[-1]: len(found) for name, found in keys.items()}


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


OPERATIONS = {"softmax": _softmax, "layer_norm": _layer_norm, "gelu": _gelu}
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
