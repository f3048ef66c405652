"""Every kernel forward and backward on small and awkward shapes: what compute-sanitizer watches."""

from __future__ import annotations

import torch

from benchmarks import workloads
from benchmarks.measure import prepared
from benchmarks.peers import Candidate, Skipped, candidates
from benchmarks.workloads import Workload
from transformer_kernels import UnsupportedByBackend

DTYPES = (torch.float32, torch.bfloat16)


def grid() -> list[Workload]:
    """Sizes that are no multiple of any tile, one tile and several."""
    listed = []
    for dtype in DTYPES:
        for length, width in ((17, 32), (130, 64), (65, 128)):
            for kind in ("full", "causal", "padded"):
                causal, padded = kind == "causal", kind == "padded"
                listed.append(
                    workloads.attention(dtype, "both", B=2, H=4, Hk=2, L=length, D=width, causal=causal, padded=padded)
                )
        for op in workloads.ROW_OPERATIONS:
            for rows, columns in ((3, 33), (70, 256), (5, 1030), (2, 9000)):
                listed.append(workloads.rows(op, dtype, "both", M=rows, N=columns))
        listed += [workloads.output_layer(dtype, "both", M=rows, E=64, V=1001) for rows in (33, 700)]
    return listed


def run(workload: Workload, candidate: Candidate, device: torch.device) -> bool:
    """One call there and back; False where the backend does not take it."""
    try:
        prepared(workload, candidate.make(workload, device), workload.inputs(device))()
    except (Skipped, UnsupportedByBackend):
        return False
    return True


def main() -> int:
    device = torch.device("cuda")
    ran = sum(
        run(workload, candidate, device)
        for workload in grid()
        for candidate in candidates(workload.op)
        if candidate.name in ("ours triton", "ours cuda")
    )
    torch.cuda.synchronize()
    print(f"{ran} calls")
    return int(ran == 0)


if __name__ == "__main__":
    raise SystemExit(main())
