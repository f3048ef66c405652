"""The row kernels and attention of the CPU backend, in each instruction set and dtype; run by test_sanitizers.py.

The first argument is the folder of the instrumented module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gates.sanitized_row_kernels import check, check_all, results
from tests.support.arguments import normal
from transformer_kernels.backends import build, cpu


def int32(*starts):
    return torch.tensor(starts, dtype=torch.int32)


ATTENTION: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (1, 70, 72, 32, {"window": (9, 5)}),  # rows that are read in place
    (1, 70, 70, 21, {"causal": True}),
    (2, 37, 150, 21, {"window": (59, 9), "alibi_slopes": torch.rand(2, 4), "softcap": 2.0, "dropout_p": 0.2}),
    (1, 3, 2100, 21, {"alibi_slopes": torch.rand(4) / 100, "window": (None, 1)}),  # keys split among threads
    (1, 90, 150, 21, {"cu_seqlens": int32(0, 70, 70, 80), "cu_seqlens_k": int32(0, 0, 9, 140), "window": (3, 20)}),
    (2, 70, 150, 21, {"attn_bias": torch.rand(2, 1, 70, 150) < 0.5}),  # not recognised
    (2, 70, 72, 32, {"attn_bias": torch.ones(4, 70, 72).tril().bool() & (torch.rand(2, 1, 1, 72) < 0.7)}),
]
"""Batch, queries, keys, head dimension, and options."""


def check_attention(dtype):
    for batch, queries, keys, width, options in ATTENTION:
        lengths = {"q": (4, queries), "k": (2, keys), "v": (2, keys)}
        tensors = {
            name: normal(batch, *shape, width, dtype=dtype, device=torch.device("cpu"), seed=seed)
            for seed, (name, shape) in enumerate(lengths.items())
        }
        if width % 16:
            tensors["key_padding_mask"] = torch.arange(keys).expand(batch, keys) % 7 != 3
        if "attn_bias" not in options:
            tensors["attn_bias"] = torch.randn(1, 4, queries, keys).to(dtype).requires_grad_()
        both = (results("attention", backend, tensors, options) for backend in ("cpu", "torch"))
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0.08, rtol=0.08)


def main(path):
    spec = importlib.util.spec_from_file_location("transformer_kernels._cpu", Path(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["transformer_kernels._cpu"] = module
    torch.set_num_threads(1)
    assert cpu.load() is module
    for name in module.instruction_sets:
        module.use(name)
        for dtype in cpu.DTYPE_CODES if name in build.CPU_FOLDERS["rows"] else [torch.bfloat16]:
            if name in build.CPU_FOLDERS["rows"]:
                check_all("cpu", dtype)
            check("cpu", "linear", 71, 37, dtype, {})
            check_attention(dtype)
    print("CPU kernels ran")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
