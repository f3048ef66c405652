"""The command of benchmarks/gpu.sh."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import gpu
from benchmarks.gpu import steps
from benchmarks.gpu.session import record
from transformer_kernels.backends import dispatch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "benchmarks/gpu.sh", description=gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    call = parser.add_mutually_exclusive_group(required=True)
    for name in steps.CALLS:
        call.add_argument(f"--{name}", dest="call", action="store_const", const=name, help=f"the {name} call")
    call.add_argument("--plan", action="store_true", help="print the planned seconds")
    parser.add_argument("--seconds", type=float, help="limit of the call (default: 440 and 350)")
    parser.add_argument("--folder", type=Path, default=gpu.FOLDER, help="default: runs/gpu")
    parser.add_argument("--op", action="append", choices=[*dispatch.OPERATIONS], metavar="NAME", help="only this one")
    parser.add_argument("--device", type=torch.device, default="cuda:0", help="default: %(default)s")
    parser.add_argument("--out", default=os.environ.get("OUT"), help="where to copy the files (default: $OUT)")
    chosen = parser.parse_args(arguments)
    if chosen.plan:
        print(steps.plan_text())
        return 0
    if chosen.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch sees no GPU")
    os.environ.setdefault("TRITON_CACHE_DIR", str(chosen.folder.resolve() / "triton"))
    seconds = chosen.seconds or steps.limit(chosen.call)
    out = Path(chosen.out) if chosen.out else None
    return record(steps.CALLS[chosen.call], chosen.device, chosen.folder, seconds, chosen.op or (), out)


if __name__ == "__main__":
    raise SystemExit(main())
