#!/usr/bin/env bash
# Build, test and benchmark on this machine's GPU, straight from the checkout; nothing is installed or downloaded.
#   benchmarks/gpu.sh --out DIR                       everything, inside TIME_BUDGET seconds (540)
#   benchmarks/gpu.sh --out DIR --steps build,test    or a part: build, test, bench, paths, sanitize
#   benchmarks/gpu.sh --out DIR --device cpu          the smaller record of a machine without one
# Afterwards: python3 -m benchmarks.cli --merge DIR
set -eu
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.cli --record "$@"
