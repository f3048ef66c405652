"""The process of `verify`: runs the cases of its standard input and writes a line before each and after each pass."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from transformer_kernels import verification
from transformer_kernels.verification import FAILED, PASSES, Case, Verdict, run_case


def main(backend: str, device: torch.device, path: Path, cases: list[Case]) -> None:
    """Run the cases; an error that leaves the process usable is a verdict, any other ends it."""
    with open(path, "a", buffering=1) as file:
        for case in cases:
            file.write(json.dumps({"started": case.name}) + "\n")
            known = []
            try:
                for verdict in run_case(case, backend, device):
                    file.write(json.dumps(asdict(verdict)) + "\n")
                    known.append(verdict.direction)
            except Exception as error:
                verification.synchronize(device)  # raises again in an unusable process, which ends it
                why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                for direction in PASSES[len(known) :]:
                    failed = Verdict(case.op, backend, case.dtype, direction, case.name, FAILED, why)
                    file.write(json.dumps(asdict(failed)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3]), [Case(**fields) for fields in json.load(sys.stdin)])
