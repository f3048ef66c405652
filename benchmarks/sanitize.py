"""The kernels of one family at one size, forward and backward, for compute-sanitizer and ncu.

python -m benchmarks.sanitize --family norm
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.gpu import BACKENDS
from transformer_kernels import verification
from transformer_kernels.backends import dispatch

SIZES = {(5, 1030), (300, 64)}
"""Of the smoke cases: sizes that are no multiple of a tile, and several tiles."""


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; 1 if none ran."""
    parser = argparse.ArgumentParser("python -m benchmarks.sanitize", description=__doc__)
    parser.add_argument("--family", required=True)
    parser.add_argument("--strike", type=json.loads, default=[], help="[[operation, backend, dtype], ...] to leave out")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    chosen = parser.parse_args(arguments)
    struck = {tuple(kernel) for kernel in chosen.strike}
    ran = 0
    for backend in BACKENDS:
        if dispatch.unavailable(backend, chosen.device) is not None:
            continue
        for case in verification.cases(dtypes=("float32", "bfloat16")):
            if case.family != chosen.family or (case.rows, case.columns) not in SIZES:
                continue
            if (case.op, backend, case.dtype) in struck:
                continue
            for verdict in verification.run_case(case, backend, chosen.device):
                print(f"{backend}: {case.name} {verdict.direction}: {verdict.outcome}", flush=True)
                ran += verdict.outcome != verification.UNSUPPORTED
    return int(ran == 0)


if __name__ == "__main__":
    raise SystemExit(main())
