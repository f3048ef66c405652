"""Compiles the Triton kernels that a part of the record launches on a GPU, without one.

    python -m benchmarks.gpu.compile_only 90 smoke KEYS UNTIL

A driver that launches nothing collects the kernels, so results are uninitialised and ignored. Then a process per core
compiles them into TRITON_CACHE_DIR, in the order of their launches, until the time UNTIL (seconds since the epoch). The
file KEYS gets a line for each compiled kernel: its cache key without the hash of Triton's own files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
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


def install(capability: int) -> None:
    """Make the Triton backend compile for a GPU in this process, for CPU tensors."""
    import triton

    triton.runtime.driver._active = Driver(capability)
    backend.INTERPRETED_CAPABILITY = divmod(capability, 10)
    backend.multiprocessors = lambda device: MULTIPROCESSORS
    backend._unavailable_on = lambda kind, index: None


def collect() -> dict[str, Callable[[], Any]]:
    """A dict that gets the compilation of each kernel that this process launches from now on, by its cache key."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import get_cache_key
    from triton.runtime.jit import JITFunction

    compilations: dict[str, Callable[[], Any]] = {}

    def defer(function: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *more: Any) -> None:
        _, _, target, compiler, _ = function.device_caches[device]
        source = function.ASTSource(function, signature, constants, more[0])
        name = get_cache_key(source, compiler, options, get_cache_invalidating_env_vars())
        compilation = functools.partial(function.compile, source, target=target, options=options.__dict__)
        compilations.setdefault(name, compilation)

    JITFunction._do_compile = defer
    return compilations


def compile_all(compilations: dict[str, Callable[[], Any]], keys: Path, until: float) -> int:
    """Compile in a process per core until a time; the number of kernels that are left."""
    from triton.runtime.cache import triton_key

    own, fork = triton_key(), multiprocessing.get_context("fork")
    names, following = list(compilations), fork.Value("i", 0)

    def work() -> None:
        while time.time() < until:
            with following:
                number = following.value
                following.value += 1
            if number >= len(names):
                return
            name = names[number]
            with contextlib.suppress(Exception):  # ptxas refuses it
                compilations[name]()
                line = {"digest": hashlib.sha256(name.encode()).hexdigest(), "key": name.removeprefix(own)}
                with open(keys, "a") as file:
                    file.write(json.dumps(line) + "\n")

    workers = [fork.Process(target=work) for _ in range(os.cpu_count() or 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(0, len(names) - following.value)


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
            leaves = [tensor.requires_grad_() for tensor in tensors.values() if tensor.is_floating_point()]
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
    options += ["-p", "benchmarks.evidence"]  # for its order
    pytest.main([*PARITY, *options, "-m", "not slow and not gpu", "-k", "triton"])


PARTS: dict[str, Callable[[], None]] = {"smoke": smoke, "tables": tables, "steps": steps, "tests": tests}


if __name__ == "__main__":
    install(int(sys.argv[1]))
    launched = collect()
    PARTS[sys.argv[2]]()
    left = compile_all(launched, Path(sys.argv[3]), float(sys.argv[4]))
    print(f"{sys.argv[2]}: {len(launched) - left} of {len(launched)} Triton kernels", flush=True)
