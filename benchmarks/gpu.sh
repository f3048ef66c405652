#!/usr/bin/env bash
# Verify, test and benchmark on this machine's GPU, straight from the checkout; nothing is installed or downloaded.
#   benchmarks/gpu.sh --first     within 440 s; results in runs/gpu, copied to $OUT if that is set
#   benchmarks/gpu.sh --second    within 350 s, continues there
#   benchmarks/gpu.sh --plan      the seconds of each step
# Afterwards: python3 -m benchmarks.cli --merge runs/gpu
set -eu
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
