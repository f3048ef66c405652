"""Every row kernel of the CPU backend, in each instruction set and dtype; run under a sanitizer by test_sanitizers.py.

The instrumented module lies in the folder that the first argument names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from tests.gates.sanitized_row_kernels import check_all
from transformer_kernels.backends import cpu


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("transformer_kernels._cpu", Path(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["transformer_kernels._cpu"] = module
    torch.set_num_threads(1)
    assert cpu.load() is module
    for name in ("plain", "avx2", "avx512"):
        if name in module.instruction_sets:
            module.use(name)
            for dtype in cpu.DTYPE_CODES:
                check_all("cpu", dtype)
    print("CPU kernels ran")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
