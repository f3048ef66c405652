"""What the record of a GPU would otherwise compile there, made without one: runs/gpu-kit, minutes on two cores.

    python -m benchmarks.gpu_kit --architecture 90a

The CUDA extension is compiled for the GPU's architecture, and Triton's cache is filled with the kernels of the smoke
cases by a driver that compiles for it and launches nothing. `benchmarks/gpu.sh` uses both if the sources are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.gpu import KIT

MULTIPROCESSORS, SHARED_MEMORY = 132, 232448
"""Of an H100 and an H200."""


class Compiles:
    """A driver of Triton that compiles for a GPU and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, self

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and threads of a kernel."""
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What the compiler asks of a device."""
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": MULTIPROCESSORS, "warpSize": 32}

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """A launcher that does nothing."""
        return lambda *_: None

    def get_current_target(self) -> Any:
        """The GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Its index."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def fill_cache(capability: int) -> int:
    """Compile the Triton kernels of the smoke cases into TRITON_CACHE_DIR; returns the number of cases."""
    import triton

    from transformer_kernels import verification
    from transformer_kernels.backends import triton as backend

    triton.runtime.driver._active = Compiles(capability)
    backend.INTERPRETED_CAPABILITY = divmod(capability, 10)
    backend.multiprocessors = lambda device: MULTIPROCESSORS
    backend._unavailable_on = lambda kind, index: None
    cases = verification.cases()
    for case in cases:
        for _ in verification.run_case(case, "triton", torch.device("cpu")):  # wrong: nothing is computed
            pass
    return len(cases)


def make(architecture: str) -> int:
    """Fill runs/gpu-kit; 1 if the extension was not built."""
    KIT.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "TRANSFORMER_KERNELS_CUDA_ARCHS": architecture, "TRANSFORMER_KERNELS_REQUIRE_CUDA": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder, "--build-temp", f"{folder}/objects"]
        status = subprocess.run(command, cwd=environment.ROOT, env=variables).returncode
        for path in Path(folder, "transformer_kernels").glob("_kernels*"):
            shutil.copy(path, KIT / path.name)
    cache = {**os.environ, "TRITON_CACHE_DIR": str(KIT / "triton"), "TRITON_INTERPRET": "0"}
    capability = architecture.rstrip("af")
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_kit", "--fill", capability], env=cache, check=True)
    (KIT / "hash.txt").write_text(f"{environment.source_hash()} {architecture}\n")
    size = sum(path.stat().st_size for path in KIT.rglob("*") if path.is_file())
    print(f"{KIT}: {size / 2**20:.0f} MiB" + ("" if status == 0 else "; the CUDA extension was not built"))
    return int(status != 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="90a", help="default: %(default)s, an H100 or H200")
    parser.add_argument("--fill", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.fill:
        print(f"{fill_cache(chosen.fill)} cases compiled")
        return 0
    return make(chosen.architecture)


if __name__ == "__main__":
    raise SystemExit(main())
