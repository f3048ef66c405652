"""Compiles the Triton kernels that a part of the record launches on a GPU, without one.

    python -m benchmarks.gpu.compile_only 90 smoke KEYS

A driver compiles for the GPU into TRITON_CACHE_DIR and launches nothing, so results are uninitialised and ignored. The
file KEYS gets a line for each kernel: its cache key without the hash of Triton's own files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from transformer_kernels import verification
from transformer_kernels.backends import triton as backend

CPU = torch.device("cpu")
MULTIPROCESSORS, SHARED_MEMORY = 132, 232448
"""Multiprocessors, and bytes of shared memory per block, of an H100 and an H200."""


class Driver:
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
        """The GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Index of the current device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def install(capability: int, keys: Path | None = None) -> None:
    """Make the Triton backend compile for a GPU in this process, for CPU tensors; note the keys."""
    import triton
    from triton.compiler import compiler

    triton.runtime.driver._active = Driver(capability)
    backend.INTERPRETED_CAPABILITY = divmod(capability, 10)
    backend.multiprocessors = lambda device: MULTIPROCESSORS
    backend._unavailable_on = lambda kind, index: None
    if keys is None:
        return
    key_of, own = compiler.get_cache_key, triton.runtime.cache.triton_key()

    def noted(*arguments: Any, **options: Any) -> str:
        key: str = key_of(*arguments, **options)
        line = {"digest": hashlib.sha256(key.encode()).hexdigest(), "key": key.removeprefix(own)}
        with open(keys, "a") as file:
            file.write(json.dumps(line) + "\n")
        return key

    compiler.get_cache_key = noted


class Unfilled(TorchFunctionMode):
    """Random tensors are not filled: their pages are never touched."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.randn:
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
            return torch.empty(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def smoke() -> None:
    for case in verification.cases():
        for _ in verification.run_case(case, "triton", CPU):
            pass


def tables() -> None:
    """Forward and backward of each row of attention and of the row kernels."""
    from benchmarks import plan
    from transformer_kernels import ops

    done = set()
    for task in [*plan.PARTS["attention"](CPU), *plan.PARTS["rows"](CPU)]:
        workload = task.run.args[0]  # type: ignore[attr-defined]
        named = (workload.op, workload.case, str(workload.shape))
        if task.candidate != "ours triton" or named in done:
            continue
        done.add(named)
        with Unfilled():
            tensors = workload.inputs(CPU)
            leaves = [each.requires_grad_() for each in tensors.values() if each.is_floating_point()]
            out = getattr(ops, workload.op)(**tensors, **workload.options, backend="triton")
            outputs = out if isinstance(out, tuple) else (out,)
            torch.autograd.grad(outputs, leaves, list(map(torch.empty_like, outputs)), allow_unused=True)


def steps() -> None:
    """A training step of each model, padded and packed."""
    from benchmarks import peers, plan
    from benchmarks import steps as ladder

    ladder.require = peers.require = lambda name, device: None
    for recipe in plan.TRAINED:
        for packed in (False, True):
            with contextlib.suppress(peers.Skipped):
                ladder.Step(recipe, ladder.Rung("triton", "bfloat16", packed=packed), CPU, clip=ladder.UNCLIPPED)()


def tests() -> None:
    """The parity tests of Triton's kernels, whose comparisons are left out."""
    import pytest

    import transformer_kernels as tk
    from benchmarks.gpu.steps import PARITY
    from tests.support import interpreter, parity

    def only_run(op: str, backend: str, tensors: Any, options: Any = None, *, seed: int = 0, **_: Any) -> float:
        function, named = getattr(tk, op), {**(options or {}), "backend": backend}
        outputs = parity.run(function, tensors, named, seed=seed).outputs
        parity.run(function, tensors, named, [torch.zeros_like(output) for output in outputs], seed=seed)
        return 0.0

    @contextlib.contextmanager
    def as_it_is(*_: Any, **__: Any) -> Iterator[None]:
        yield

    parity.check_parity, interpreter.hardened, interpreter.quicken = only_run, as_it_is, lambda: None
    options = ["-q", "--tb=no", "--no-header", "-p", "no:randomly", "-p", "no:random_order", "-p", "no:cacheprovider"]
    pytest.main([*PARITY, *options, "-m", "not slow and not gpu", "-k", "triton"])


PARTS: dict[str, Callable[[], None]] = {"smoke": smoke, "tables": tables, "steps": steps, "tests": tests}


if __name__ == "__main__":
    install(int(sys.argv[1]), Path(sys.argv[3]))
    PARTS[sys.argv[2]]()
