"""Host cost of a raw call of attention in Triton without the launch, counted without a GPU.

Run as a program, without TRITON_INTERPRET: `python -m tests.support.host_time`. It prints the number of Python and C
functions called, which does not depend on the machine or its load.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from benchmarks.compilers.launches import _standing_in

LENGTHS = {"any length": 256, "short": 128}


def host_costs():
    """Calls by path and pass, counted in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.support.host_time"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


class _Compiled:
    """A mock of a compiled kernel, which accepts a launch's arguments and launches nothing."""

    function = packed_metadata = None
    run = staticmethod(lambda *arguments: None)


def called(call):
    """Number of Python and C functions that a call runs with warm caches."""
    call()
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def _counted():
    import triton
    from triton.runtime.jit import JITFunction

    from transformer_kernels.ops.attention import _triton as attention
    from transformer_kernels.ops.attention import prepare

    def launched(kernel, grid):
        return lambda *arguments, **options: _Compiled

    found = {}
    with _standing_in(triton, (9, 0)), mock.patch.object(JITFunction, "__getitem__", launched):
        for path, length in LENGTHS.items():
            q, k, v = torch.empty(1, length, 3, 2, 64, dtype=torch.bfloat16).transpose(1, 3).unbind(2)
            call = prepare(q, k, v, causal=True, scale=0.125)
            kernels = attention.Kernels(call)
            result = kernels.forward(call)
            given = call, result, (torch.empty_like(result.out), None), (True, True, True, False)
            passes = {
                "forward": functools.partial(kernels.forward, call),
                "backward": functools.partial(kernels.backward, *given),
            }
            for name, each in passes.items():
                found[f"{path} {name}"] = called(each)
    return found


if __name__ == "__main__":
    print(json.dumps(_counted()))
