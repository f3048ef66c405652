"""The record of a GPU in two calls of a few minutes each: correctness first, then speed.

    benchmarks/gpu.sh --first       smoke cases, conformance, parity, tests marked gpu, tables of the main kernels
    benchmarks/gpu.sh --second      what the first did not end, failed tests alone, sanitizers, fast paths, compiled
                                    steps, the remaining rows

Both work in `runs/gpu`, which the second call continues: a step that ended is not repeated, one that broke off is,
without the tests that have a result. Every step is a process group with a time limit, and writes its results as it has
them. After each step the files are copied to $OUT; a summary is printed last. Nothing is installed, and no network is
needed.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "gpu"
STEPS, VERDICTS, LOG, SUMMARY = "steps.jsonl", "verdicts.jsonl", "record.log", "summary.txt"
BACKENDS = ("triton", "cuda")
