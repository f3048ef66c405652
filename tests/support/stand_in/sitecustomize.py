"""The CPU stands in for a GPU in every Python process that has this folder in PYTHONPATH: for rehearsals of its record.

Operations of the backends triton and cuda run their host code up to the launches, forward and backward. A driver of
Triton that compiles nothing and a module instead of the CUDA extension note them: a line for each process in the folder
$STAND_IN_LAUNCHES. Results are those of the torch backend. Sizes of benchmarks are small, and nothing is compiled.

$STAND_IN_FAULTS plants faults, a JSON list of [fault, operation, backend, dtype]: "hangs", "aborts", "poisons" (all
later calls of the process fail too, as after an illegal memory access), "wrong"; "*" is every operation or backend.
"""

import atexit
import collections
import dataclasses
import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path

CAPABILITY = 90
FAULTS = json.loads(os.environ.get("STAND_IN_FAULTS", "[]"))
LAUNCHES = collections.Counter()
POISON = "CUDA error: an illegal memory access was encountered"
BACKENDS = ("triton", "cuda")
poisoned = False


class Finder(importlib.abc.MetaPathFinder):
    """Calls a function after the first import of a module."""

    def find_spec(self, name, path=None, target=None):
        if name not in HOOKS:
            return None
        hook = HOOKS.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = executed
        return spec


def stand_in(package):
    """The launches of both backends are noted, and the operations return what the torch backend computes."""
    from benchmarks.gpu import compile_only
    from transformer_kernels import ops, verification
    from transformer_kernels.backends import cuda, triton

    compile_only.install(CAPABILITY)
    triton.load().knobs.runtime.jit_cache_hook = lambda *, fn, **_: bool(LAUNCHES.update([f"triton {fn.name}"]) or True)
    cuda._module, cuda._why_unavailable = Extension(), lambda device: None
    for op in verification.EXAMPLES:
        stood_in = functools.wraps(getattr(ops, op))(functools.partial(operation, op, getattr(ops, op)))
        for module in (ops, package):
            setattr(module, op, stood_in)
    bind = package.bind

    def bound(backend=None):
        if backend not in BACKENDS:
            return bind(backend)
        return types.SimpleNamespace(
            **{op: functools.partial(getattr(ops, op), backend=backend) for op in verification.EXAMPLES}
        )

    package.bind, verification.synchronize = bound, synchronize
    atexit.register(write_launches)


class Extension:
    """In place of the CUDA extension: every kernel is a function that notes its launches."""

    architectures, source_hash = "sm_90a", "stand-in"

    def device_problem(self, device):
        return ""

    def architecture(self, device):
        return 90

    def multiprocessors(self, device):
        return 132

    def __getattr__(self, kernel):
        if kernel.startswith("_"):
            raise AttributeError(kernel)

        def note(*arguments, **fields):
            LAUNCHES[f"cuda {kernel}"] += 1
            return note

        return note


def synchronize(device):
    if poisoned:
        raise RuntimeError(POISON)


def operation(op, function, *args, backend=None, **options):
    """The public function of an operation."""
    import torch

    if backend not in BACKENDS:
        return function(*args, backend=backend, **options)
    dtype = next(each.dtype for each in (*args, *options.values()) if is_float(each))
    wrong = plant(op, backend, str(dtype).removeprefix("torch."))
    with torch.random.fork_rng(devices=[]):
        launch(function, args, options | {"backend": backend})
    result = function(*args, backend="torch", **options)
    if not wrong:
        return result
    return tuple(each * 1.2 for each in result) if isinstance(result, tuple) else result * 1.2


def plant(op, backend, dtype):
    """Do what is planted for this call; whether its result is to be wrong."""
    global poisoned
    planted = {
        fault
        for fault, *where in FAULTS
        if all(a in ("*", b) for a, b in zip(where, (op, backend, dtype), strict=True))
    }
    if "hangs" in planted:
        time.sleep(3600)
    if "aborts" in planted:
        os.abort()
    poisoned = poisoned or "poisons" in planted
    synchronize(None)
    return "wrong" in planted


def launch(function, args, options):
    """Run an operation's own host code, forward and backward, on tensors of its own."""
    import torch

    leaves = []

    def detached(value):
        if not is_float(value):
            return value
        leaves.append(value.detach().requires_grad_(value.requires_grad))
        return leaves[-1]

    with torch.enable_grad():
        result = function(*map(detached, args), **{name: detached(value) for name, value in options.items()})
        outputs = [each for each in (result if isinstance(result, tuple) else [result]) if each.requires_grad]
        leaves = [each for each in leaves if each.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.zeros_like(each) for each in outputs], allow_unused=True)


def is_float(value):
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def write_launches():
    folder = os.environ.get("STAND_IN_LAUNCHES")
    if folder and LAUNCHES:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(LAUNCHES))


def small_workloads(module):
    module.GPU = dataclasses.replace(
        module.GPU, tokens=512, heads={64: 2, 128: 1}, lengths=(512,), elements=2**14, widths=(256,), decode=(2, 256)
    )


def small_plan(module):
    module.TRAINED = (module.Recipe("char_gpt", 2, 16), module.Recipe("imdb_bert", 2, 16))
    module._on_gpu = module._on_cpu = lambda device: module._rows(
        module.workloads.GPU, module.torch.float16, ("forward",), (*module.KERNELS, "eager")
    )


def uncompiled(module):
    module.require = lambda backend, device: None
    module.torch.compile = lambda function, **options: function


def small_paths(module):
    paths = module.paths

    def small(capability):
        return [
            dataclasses.replace(
                path, cases=tuple(dataclasses.replace(case, batch=1, heads=1, length=16) for case in path.cases[:1])
            )
            for path in paths(capability)
        ]

    module.paths, module.SECONDS = small, 0.01


def other_package(module):
    """Extensions are not compiled into the checkout."""
    module.PACKAGE = Path(os.environ["STAND_IN_PACKAGE"])
    module.OBJECTS = module.PACKAGE / "objects"


HOOKS = {
    "transformer_kernels": stand_in,
    "benchmarks.workloads": small_workloads,
    "benchmarks.plan": small_plan,
    "benchmarks.peers": uncompiled,
    "benchmarks.steps": uncompiled,
    "benchmarks.fast_paths": small_paths,
    "benchmarks.gpu.kit": other_package,
}
sys.meta_path.insert(0, Finder())
