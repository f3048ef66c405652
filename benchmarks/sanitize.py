"""Every kernel forward and backward on small, odd shapes, for compute-sanitizer."""

from __future__ import annotations

import torch

from benchmarks import workloads
from benchmarks.measure import prepared
from benchmarks.peers import Candidate, Skipped, candidates
from benchmarks.workloads import Workload
from transformer_kernels import UnsupportedByBackend

DTYPES = (torch.float32, torch.bfloat16)


def grid() -> list[Workload]:
    """Sizes that are no multiple of any tile, one tile and several, so that Hopper's ring of tiles wraps around."""
    bf16, many = torch.bfloat16, {"B": 1, "H": 2, "L": 700}
    listed = [
        workloads.attention(bf16, "both", D=64, causal=True, **many),
        workloads.attention(bf16, "both", D=128, dropout_p=0.1, **many),
        workloads.attention(bf16, "both", D=64, window=200, **many),
    ]
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
    """One call with backward; False if the backend does not support it."""
    try:
        prepared(workload, candidate.make(workload, device), workload.inputs(device))()
    except (Skipped, UnsupportedByBackend):
        return False
    return True


def main() -> int:
    device = torch.device("cuda")
    ran = 0
    for name in ("ours cuda", "ours triton"):  # Triton's are compiled on the way, which takes longest
        for workload in grid():
            for candidate in candidates(workload.op):
                if candidate.name == name and run(workload, candidate, device):
                    torch.cuda.synchronize()
                    ran += 1
                    print(f"{name}: {workload.op} {workload.case} {workload.dtype_name} {workload.shape}", flush=True)
    print(f"{ran} calls")
    return int(ran == 0)


if __name__ == "__main__":
    raise SystemExit(main())
